"""Answers go from engines to ranks past the controller: what it hears and sends does not grow with them."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import EXACT, RECIPE, VERIFIER, assert_ledger_balances, finish, kitae, rows, run_toy, toy_config

from kitae.api import resume
from kitae.engines import start_engine
from kitae.errors import CorruptError
from kitae.run.recompute_step import replay
from kitae.store.columns import ColumnFiles, Contents, Filed, LazyColumn, StoredText
from kitae.store.journal import Journal
from kitae.store.journal_rows import problem_of
from kitae.ui.queries import RolloutFilter, rollouts
from kitae.ui.samples import group
from kitae.workers import connection
from kitae.workers.frames import Frame, pack_frame

pytestmark = pytest.mark.usefixtures("warm_posts")

SETTINGS = (
    "training.steps=2", "training.prompts_per_step=2", "training.group_size=4", "checkpoint.every=2", "eval.every=0",
    "eval.prompts=0", "observe.tokens=0", "observe.diagnose=false",
    "training.token_budget=2048",  # one row, whatever the length: each has words of its own for the ranks
)  # fmt: skip
CLUSTER = ("cluster.backend=local", "cluster.ranks=2", "engine.count=1", "cluster.verifiers=1")
SHORT, LONG = "sampling.max_tokens=16", "sampling.max_tokens=160"


class Traffic:
    """Bytes of the controller's connections, but for signs of life; and answers that it read itself."""

    def __init__(self) -> None:
        self.bytes = self.reads = 0


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    found = Traffic()
    read_frame, send, read = connection.read_frame, connection.RemoteWorker.send, ColumnFiles._read

    async def heard(reader: asyncio.StreamReader) -> Frame | None:
        frame = await read_frame(reader)
        if frame is not None and "tick" not in frame.header and "event" not in frame.header:
            found.bytes += len(pack_frame(frame.header, frame.arrays))
        return frame

    def told(self: connection.RemoteWorker, header: Any, arrays: Any = None) -> None:
        found.bytes += len(pack_frame(header, arrays))
        send(self, header, arrays)

    def looked(self: ColumnFiles, filed: Filed) -> Contents:
        found.reads += 1
        return read(self, filed)

    with monkeypatch.context() as patched:
        patched.setattr(connection, "read_frame", heard)
        patched.setattr(connection.RemoteWorker, "send", told)
        patched.setattr(ColumnFiles, "_read", looked)
        yield found


Made = tuple[Path, Traffic]


def made(folder: Path, length: str) -> Made:
    with pytest.MonkeyPatch.context() as monkeypatch, watched(monkeypatch) as traffic:
        return run_toy(folder, *SETTINGS, *CLUSTER, length).folder, traffic


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made(tmp_path_factory.mktemp("short"), SHORT)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made(tmp_path_factory.mktemp("long"), LONG)


@pytest.fixture(scope="module")
def value(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The long answers come to the controller."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(start_engine, "ProcessEngine", partial(_by_value, start_engine.ProcessEngine))
        return made(tmp_path_factory.mktemp("value"), LONG)


def _by_value(make: Any, *given: Any, columns: Path | None, **own: Any) -> Any:
    """An engine that has no place for its answers."""
    assert columns is not None
    return make(*given, **own)


def steps(run: Path) -> list[dict[str, Any]]:
    return [row for row in rows(run) if row["kind"] == "step"]


def test_bytes_of_the_controller_do_not_depend_on_lengths(short: Made, long: Made) -> None:
    (few, little), (many, much) = short, long
    tokens = [sum(row["length"] * row["rollouts"] for row in steps(run)) for run in (few, many)]
    assert tokens[1] > 3 * tokens[0]
    assert little.reads == much.reads == 0
    answers = sum(row["rollouts"] for row in steps(many))
    assert abs(much.bytes - little.bytes) < 40 * answers, (little.bytes, much.bytes)  # digits of lengths and offsets
    assert (few / "journal.sqlite").stat().st_size == (many / "journal.sqlite").stat().st_size


def test_the_same_is_learnt_as_by_value(long: Made, value: Made) -> None:
    tokens = sum(row["length"] * row["rollouts"] for row in steps(long[0]))
    assert value[1].bytes - long[1].bytes > 20 * tokens
    for a, b in zip(steps(long[0]), steps(value[0]), strict=True):
        for key in EXACT:
            assert a[key] == b[key], key
        for key in ("loss", "grad_norm", "entropy", "logp_gap"):  # the engine's batches differ, and so its rounding
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6), key


def test_commands_read_answers_where_they_lie(long: Made, value: Made) -> None:
    kept, came = long[0], value[0]
    journals = [Journal(run / "journal.sqlite", read_only=True) for run in (kept, came)]
    for number in range(4):
        for a, b in zip(*(journal.rollouts(number) for journal in journals), strict=True):
            assert isinstance(a.segments[0].tokens, LazyColumn) and isinstance(a.text, StoredText)
            assert a.segments[0].tokens == b.segments[0].tokens and str(a.text) == b.text and a.score == b.score
            assert tuple(a.segments[0].logprobs) == pytest.approx(b.segments[0].logprobs, abs=1e-5)
        assert [s.text for s in group(kept, number).samples] == [s.text for s in group(came, number).samples]
    for journal in journals:
        journal.close()
    pages = [rollouts(run, RolloutFilter(order="longest")) for run in (kept, came)]
    assert pages[0].rows == pages[1].rows and len(pages[0].rows) == 16
    word = pages[1].rows[0].text[:3]
    found = [rollouts(run, RolloutFilter(text=word)).rows for run in (kept, came)]
    assert found[0] == found[1] and found[0]
    assert replay(kept, 2, print).difference < 1e-5


@pytest.mark.slow
def test_nothing_is_trained_on_a_damaged_answer(short: Made, tmp_path: Path) -> None:
    run = tmp_path / "damaged"
    shutil.copytree(short[0], run)
    for name in ("checkpoints", "model"):  # so that it is not finished, and its steps are trained again
        shutil.rmtree(run / name)
    journal = Journal(run / "journal.sqlite", read_only=True)
    trained = next(group for step in (1, 2) for group in journal.batch(step)[0])
    journal.close()
    tokens = trained.valid[0].segments[0].tokens
    assert isinstance(tokens, LazyColumn)
    filed = tokens.stretches[0][0]
    path = run / "columns" / filed.file
    data = bytearray(path.read_bytes())
    data[filed.offset] ^= 1
    path.write_bytes(data)
    what = rf"columns/{filed.file}: the answer at byte {filed.offset} \({filed.tokens} tokens\) must have the checksum"
    with pytest.raises(CorruptError, match=what + r".* --forget"):
        resume(run)
    assert not (run / "checkpoints").exists() or not any((run / "checkpoints").iterdir())
    assert resume(run, forget=True).step == 2, "what was not trained is sampled again"
    assert_ledger_balances(run, toy_config(tmp_path, *SETTINGS))
    journal = Journal(run / "journal.sqlite", read_only=True)
    assert not any(problem_of(r) for group, *_ in journal.groups() for r in journal.rollouts(group))
    journal.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_goes_on_from_what_lies_there(how: signal.Signals, long: Made, tmp_path: Path) -> None:
    process = kitae("train", str(RECIPE), VERIFIER, f"run.dir={tmp_path}", *SETTINGS, *CLUSTER, LONG)
    run = tmp_path / "toy-001"
    asyncio.run(_until_filed(run, answers=10))
    os.kill(process.pid, how)
    process.ended(timeout=100)
    assert len(steps(run)) < 2
    for path in (run / "columns").iterdir():  # what the engine was writing when it was ended
        with path.open("ab") as file:
            file.write(b"half of an answer")
    finish(kitae("resume", str(run)))
    went_on, whole = ([{key: row[key] for key in EXACT} for row in steps(each)] for each in (run, long[0]))
    assert went_on == whole
    assert_ledger_balances(run, toy_config(tmp_path, *SETTINGS))


@pytest.mark.slow
def test_what_reads_answers_finds_them(tmp_path: Path) -> None:
    """Ahead of training, groups replaced, rollouts computed again, old log-probs, a reference, watched tokens, LoRA."""
    result = run_toy(
        tmp_path, *SETTINGS, *CLUSTER, LONG, "training.steps=3", "pipeline.max_staleness=2", "pipeline.refill=3",
        "algorithm.filter=all-wrong", "engine.spot_check=1", "training.minibatches=2", "algorithm.kl.coef=0.01",
        "algorithm.reference=frozen", "observe.tokens=0.5", "model.lora_rank=2",
        f"verifier.name={RECIPE.parent / 'toy.py'}:any_digit",
    )  # fmt: skip
    found = steps(result.folder)
    assert len(found) == 3 and all(row["spot_gap"] < 1e-3 and not row["spot_refused"] for row in found)
    assert all(row["kl_k1"] is not None and row["errors"] == 0 for row in found)
    journal = Journal(result.folder / "journal.sqlite", read_only=True)
    for number, *_ in journal.groups():
        for rollout in journal.rollouts(number):
            assert len(tuple(rollout.segments[0].tokens)) == len(rollout.segments[0].versions)
    journal.close()


async def _until_filed(run: Path, answers: int) -> None:
    """Until so many answers are in the journal."""
    for _ in range(900):
        await asyncio.sleep(0.2)
        if (run / "journal.sqlite").exists():
            try:
                journal = Journal(run / "journal.sqlite", read_only=True)
                count = journal.counts()["rollouts"]
            except Exception:  # being made
                continue
            journal.close()
            if count >= answers:
                return
    raise AssertionError("the run does not get on")
