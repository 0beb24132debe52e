"""One of two engines cheats: it is found and out, nothing that it answered is trained on, and the run ends as with two
honest ones."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from harness import assert_ledger_balances, rows, run_config, toy_config
from safetensors.torch import load_file

from kitae.engines import start_engine
from kitae.engines.base import Completion, Request, WeightUpdate
from kitae.engines.process.process_engine import ProcessEngine
from kitae.rl.proof_check import ProofCheck
from kitae.store.journal import Journal
from kitae.weights.probe import Probe

pytestmark = pytest.mark.slow

TWO = (
    "training.steps=3", "eval.prompts=0", "engine.kind=process", "engine.count=2", "engine.proof.share=1",
    "training.group_size=4", "checkpoint.every=100",
)  # fmt: skip


class Member(ProcessEngine):
    """An honest engine that knows who made which answer."""

    made: ClassVar[list["Member"]] = []
    answered: ClassVar[dict[str, list[str]]] = {}

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        Member.made.append(self)

    async def generate(self, request: Request) -> Completion:
        done = await super().generate(request)
        Member.answered.setdefault(self.name, []).append(request.id)
        return done


class Liar(Member):
    """An engine that cheats if it was made first."""

    @property
    def lies(self) -> bool:
        return Member.made[0] is self


class Editor(Liar):
    """Changes one token."""

    async def generate(self, request: Request) -> Completion:
        done = await super().generate(request)
        if not self.lies or len(done.tokens) < 2:
            return done
        tokens = [*done.tokens]
        tokens[0] = tokens[0] + 1 if tokens[0] < 20 else tokens[0] - 1
        return replace(done, tokens=tuple(tokens))


class Idler(Liar):
    """Goes on with the weights it began with. It says that they are new ones, and copies the log-probs of the probe."""

    async def update_weights(self, update: WeightUpdate) -> int:
        if not self.lies or not update.version:
            return await super().update_weights(update)
        self._version = update.version
        return update.version

    async def probe(self) -> tuple[Probe, ...]:
        return await Member.made[1].probe() if self.lies else await super().probe()

    async def generate(self, request: Request) -> Completion:
        done = await super().generate(request)
        return replace(done, versions=(self._version,) * len(done.tokens)) if self.lies else done


class Prompter(Liar):
    """Answers another prompt."""

    async def generate(self, request: Request) -> Completion:
        prompt = (*request.prompt_tokens[:-2], request.prompt_tokens[-1], request.prompt_tokens[-2])
        return await super().generate(replace(request, prompt_tokens=prompt) if self.lies else request)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    Member.made.clear()
    Member.answered.clear()
    yield
    Member.made.clear()


def trained(folder: Path, kind: type[Member], monkeypatch: pytest.MonkeyPatch, *settings: str) -> Path:
    monkeypatch.setattr(start_engine, "ProcessEngine", kind)
    config = toy_config(folder, *TWO, *settings)
    result = run_config(config)
    if not config.pipeline.max_staleness:
        assert_ledger_balances(result.folder, config)
    return result.folder


def rollouts(run: Path) -> dict[str, Any]:
    journal = Journal(run / "journal.sqlite", read_only=True)
    found = {r.id: r for step in (1, 2, 3) for group in journal.batch(step)[0] for r in group.rollouts}
    journal.close()
    return found


def events(run: Path) -> list[str]:
    journal = Journal(run / "journal.sqlite", read_only=True)
    found = [detail for _, kind, detail in journal.events() if kind == "engine refused"]
    journal.close()
    return found


def assert_same_run(left: Path, right: Path) -> None:
    a, b = rollouts(left), rollouts(right)
    assert a.keys() == b.keys()
    assert all(a[id].chains[0].tokens == b[id].chains[0].tokens for id in a)
    weights = [load_file(run / "model" / "model.safetensors") for run in (left, right)]
    for name, values in weights[0].items():
        np.testing.assert_allclose(values.numpy(), weights[1][name].numpy(), atol=2e-6, err_msg=name)


@pytest.mark.parametrize("cheat", [Editor, Idler, Prompter])
def test_a_cheat_is_out_and_changes_nothing(
    cheat: type[Member], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = trained(tmp_path / "honest", Member, monkeypatch)
    steps = [row for row in rows(honest) if row["kind"] == "step"]
    assert all(row["proof_checked"] == row["rollouts"] == 16 and not row["proof_failed"] for row in steps)
    assert all(row["proof_gap"] < 1e-5 and not row["proof_moved_on"] for row in steps)
    assert not events(honest)
    Member.made.clear()
    cheated = trained(tmp_path / "cheated", cheat, monkeypatch)
    (sentence,) = events(cheated)
    assert "engine 0 " in sentence and "is out" in sentence
    assert ("were part of steps before" in sentence) == (cheat is Idler), "it was honest in the first step"
    assert len(Member.made) == 3, "another is started in its place"
    assert_same_run(honest, cheated)


class Late(Editor):
    """Edits after it has answered some requests, which are not checked."""

    async def generate(self, request: Request) -> Completion:
        _, group, sample, _ = request.id.split("/")
        honest = (int(group), int(sample)) < (6, 0)
        return await (Member.generate if honest else Editor.generate)(self, request)


@pytest.mark.parametrize("staleness", [0, 1])
def test_answers_that_were_not_checked_are_sampled_again(
    staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cheat is found at its second kind of answers; those before it in the same step are withdrawn too, also where
    their groups were complete."""

    async def late(self: ProofCheck, request: Request, done: Completion, served: int) -> str:
        _, group, _, _ = request.id.split("/")
        if int(group) < 6:
            return ""  # not in the share
        await asyncio.sleep(0.5)
        return await examine(self, request, done, served)

    examine = ProofCheck.examine
    settings = (f"pipeline.max_staleness={staleness}",)
    honest = trained(tmp_path / "honest", Member, monkeypatch, *settings)
    Member.made.clear()
    Member.answered.clear()
    monkeypatch.setattr(ProofCheck, "examine", late)
    cheated = trained(tmp_path / "cheated", Late, monkeypatch, *settings)
    (sentence,) = events(cheated)
    liar = Member.made[0].name
    assert sentence.startswith(f"{liar} is out")
    if not staleness:
        assert_same_run(honest, cheated)
    asked = [id for ids in Member.answered.values() for id in ids]
    withdrawn = [id for id in Member.answered[liar] if 4 <= int(id.split("/")[1]) < 6]
    if not staleness:
        assert withdrawn and all(asked.count(id) == 2 for id in withdrawn), "sampled again by another"
