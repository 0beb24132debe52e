"""Groups of rollouts: journalled before they are judged, copied while they grow, continued where they stopped."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kitae.data.chat import Chat
from kitae.engines.base import Completion, Request, Sampled, SamplingParams
from kitae.engines.fake import FakeEngine
from kitae.envs.base import Observation, SingleTurn
from kitae.envs.episode import Episode
from kitae.envs.rollouts import Episodes
from kitae.store.columns import ColumnWriter, StoredText
from kitae.store.journal import Journal
from kitae.types import Group, Message, Prompt, Runs, Score, Turn

PROMPT = Prompt("p", (Message("user", "2 + 2"),), "4")


class Tokenizer:
    eos_token_id = 0
    bos_token_id = None
    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(map(chr, tokens))


class Judge:
    """Looks into the journal before it answers."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.found = list[bool]()

    async def score(self, response: str, reference: Any, context: Mapping[str, Any]) -> Score:
        there = {r.text: r.score for r in self.journal.rollouts(7)}
        self.found.append(response in there and not getattr(there[response], "valid", True))
        return Score(1.0)


def episodes_of(engine: Any, judge: Any) -> Episodes:
    return Episodes(engine, Chat(Tokenizer()), judge, SingleTurn, SamplingParams(max_tokens=200), 0)


def test_complete_rollouts_are_journalled_before_they_are_judged(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    judge = Judge(journal)
    engine = FakeEngine(lambda request: [65 + int(request.id.split("/")[2])] * 3)
    group = asyncio.run(episodes_of(engine, judge).group(7, PROMPT, 3, journal))
    assert judge.found == [True] * 3, "each was in the journal, without a verdict"
    assert [r.score for r in journal.rollouts(7)] == [Score(1.0)] * 3 == [r.score for r in group.rollouts]
    journal.close()


class Filing:
    """An engine that files its answers beside a journal."""

    def __init__(self, journal: Journal) -> None:
        self._engine = FakeEngine(lambda request: [65 + int(request.id.split("/")[2])] * 3)
        self._journal = journal
        self._writer = ColumnWriter(journal.columns.folder, "engine-0")

    async def generate(self, request: Request) -> Completion:
        done = await self._engine.generate(request)
        place = await self._writer.add(done.tokens, done.logprobs, "".join(map(chr, done.tokens)))
        tokens, logprobs = self._journal.columns.lazy(((place, 0, place.tokens),))
        return replace(done, tokens=tokens, logprobs=logprobs, versions=Runs.of(done.versions))


def test_nobody_reads_an_answer_that_only_the_verifier_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []

    class Asked:
        async def score(self, response: Any, reference: Any, context: Mapping[str, Any]) -> Score:
            judged.append(response)
            return Score(1.0)

    def read(*_: object) -> None:
        raise AssertionError("an answer was read")

    journal = Journal(tmp_path / "journal.sqlite")
    with monkeypatch.context() as patched:
        patched.setattr(journal.columns, "read", read)
        group = asyncio.run(_filed_group(journal, Asked()))
        assert [r.response_length for r in group.rollouts] == [3, 3, 3] and not any(
            r.transcript for r in group.rollouts
        )
    texts = sorted(str(r.text) for r in journal.rollouts(7))
    assert texts == ["AAA", "BBB", "CCC"] == sorted(map(str, judged))
    assert all(isinstance(r.text, StoredText) for r in journal.rollouts(7))
    journal.close()


async def _filed_group(journal: Journal, judge: Any) -> Group:
    return await episodes_of(Filing(journal), judge).group(7, PROMPT, 3, journal)


def test_an_environment_that_listens_hears_what_lies_in_files(tmp_path: Path) -> None:
    heard = []

    class Listening(SingleTurn):
        async def step(self, turn: Turn) -> Observation:
            heard.append(turn.text)
            return await super().step(turn)

    async def body(journal: Journal) -> Group:
        episodes = replace(episodes_of(Filing(journal), Judge(journal)), environment=Listening)
        return await episodes.group(7, PROMPT, 2, journal)

    journal = Journal(tmp_path / "journal.sqlite")
    group = asyncio.run(body(journal))
    assert sorted(heard) == ["AAA", "BBB"] == [r.text for r in group.rollouts]
    journal.close()


class Growing:
    """An engine whose only request gets ten tokens more whenever it is looked at."""

    def __init__(self) -> None:
        self.tokens = 0
        self.asked = list[int]()
        self.done = asyncio.Event()

    async def generate(self, request: Request) -> Completion:
        self.request = request
        await self.done.wait()
        s = self.sampled
        return Completion(request.id, s.tokens, s.logprobs, s.versions, "suspended")

    @property
    def sampled(self) -> Sampled:
        return Sampled(tuple(range(self.tokens)), (-0.5,) * self.tokens, (3,) * self.tokens)

    def progress(self, known: Mapping[str, int]) -> dict[str, Sampled]:
        self.tokens += 10
        self.asked.append(known.get(self.request.id, 0))
        return {self.request.id: self.sampled.after(self.asked[-1])}


def test_only_what_grew_is_copied(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")

    async def body() -> None:
        engine = Growing()
        episodes = episodes_of(engine, None)
        sampling = asyncio.create_task(Episode(episodes, SingleTurn(PROMPT), 7, 0, PROMPT).run())
        await asyncio.sleep(0)
        sizes = []
        for _ in range(6):
            grown = episodes.grown(15)
            sizes.append([(len(r.segments[-1].tokens), known) for r, known in grown])
            await journal.extend_suspended(*grown)
        assert sizes == [[], [(20, 0)], [], [(20, 20)], [], [(20, 40)]], "and not what is not worth it"
        assert engine.asked == [0, 0, 20, 20, 40, 40]
        (suspended,) = journal.suspended(7)
        assert suspended.segments[0].tokens == tuple(range(60))
        engine.done.set()
        await sampling
        assert episodes.running.episodes == {}
        # Another run continues it, and copies only what it adds.
        engine = Growing()
        engine.tokens = 60
        episodes = episodes_of(engine, None)
        sampling = asyncio.create_task(Episode(episodes, SingleTurn(PROMPT), 7, 0, PROMPT, suspended).run())
        await asyncio.sleep(0)
        assert engine.request.prior.tokens == tuple(range(60))
        await journal.extend_suspended(*episodes.grown(5))
        assert engine.asked == [60] and journal.suspended(7)[0].segments[0].tokens == tuple(range(70))
        engine.done.set()
        await sampling

    asyncio.run(body())
    journal.close()
