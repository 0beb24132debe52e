"""Experts that the engine tells of the turns of an episode: each position has its own, wherever the episode was cut."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from talk import PROMPT, Engine, Fickle, Recorder, talks
from test_agent_episode import ASKED, Acting, after, begin, say
from test_turns import Clock, interrupted

from kitae.algorithms.group_stages import experts_of
from kitae.engines.base import Completion, Request
from kitae.envs.base import Outcome
from kitae.envs.episode import Episode
from kitae.envs.rollouts import Episodes
from kitae.serving.base import Model
from kitae.store.journal import Journal
from kitae.types import Chain, Message, Rollout, Segment


class Choosing(Engine):
    """The expert of a position has the number of its token. told: how many were known of what it goes on with."""

    told = 0

    async def generate(self, request: Request) -> Completion:
        done = await super().generate(request)
        if request.experts_from is None:
            return done
        computed = (*request.prompt_tokens, *done.tokens)[request.experts_from : -1]
        experts = np.array(computed, dtype=np.uint8)[:, None, None]
        told = experts[:0] if request.prior_experts is None else request.prior_experts
        assert np.array_equal(told, experts[: len(told)])
        self.told += len(told)
        return replace(done, experts=experts)


def assert_own(rollout: Rollout) -> None:
    for chain in rollout.chains:
        found = experts_of(chain)
        assert found is not None and found[:, 0, 0].tolist() == list(chain.tokens[:-1])


def test_each_turn_tells_what_is_new_in_it() -> None:
    engine = Choosing()
    group = asyncio.run(talks(engine, Fickle, Recorder(), experts=True).group(7, PROMPT, 2, greedy=True))
    assert group.greedy is not None
    for rollout in group.rollouts:
        assert_own(rollout)
        (chain,) = rollout.chains
        assert sum(len(s.experts) for s in chain.segments if s.experts is not None) == chain.length - 1, "each once"
    assert all(s.experts is None for s in group.greedy.segments), "nobody trains on it"


def test_who_does_not_want_them_does_not_ask() -> None:
    engine = Choosing()
    group = asyncio.run(talks(engine, Fickle, Recorder()).group(7, PROMPT, 1))
    assert all(r.experts_from is None for r in engine.requests)
    assert all(s.experts is None for s in group.rollouts[0].segments)


def asking(engine: Engine, clock: Clock | None = None) -> Episodes:
    tick = clock.tick if clock else lambda: None
    return talks(engine, lambda prompt: Fickle(prompt, tick), Recorder(), experts=True)


@pytest.mark.parametrize("way", ["suspend", "kill"])
def test_wherever_it_was_cut(way: str, tmp_path: Path) -> None:
    moment = told = 0
    while True:
        moment += 1
        journal, clock = Journal(tmp_path / f"{way}-{moment}.sqlite"), Clock(moment)
        asyncio.run(interrupted(way, clock, asking(Choosing(clock.tick), clock), 1, journal))
        if not clock.struck.is_set():
            break
        known = [r for r in journal.suspended(7) if any(s.experts is not None for s in r.segments)]
        engine = Choosing()
        (rollout,) = asyncio.run(asking(engine).group(7, PROMPT, 1, journal)).rollouts
        assert_own(rollout)
        for record, request in zip(known, engine.requests, strict=False):
            assert request.experts_from or request.prior_experts is not None, "what is on record is not told again"
            assert_own(replace(record, chains=(_told(record.chains[0]),)))
        assert_own(journal.rollouts(7)[0])
        told += engine.told
        journal.close()
    journal.close()
    assert way == "kill" or told > 0
    assert moment > 12


def test_suspended_then_copied_and_killed(tmp_path: Path) -> None:
    """The copy has tokens beyond those whose experts the suspended part had."""
    longer = 0
    for first in range(1, 13):
        for second in range(1, 7):
            journal, clock = Journal(tmp_path / f"{first}-{second}.sqlite"), Clock(first)
            asyncio.run(interrupted("suspend", clock, asking(Choosing(clock.tick), clock), 1, journal))
            again = Clock(second)
            asyncio.run(interrupted("kill", again, asking(Choosing(again.tick), again), 1, journal))
            for r in journal.suspended(7):
                (chain,), last = r.chains, r.segments[-1]
                places = chain.length - 1 - Chain(chain.prompt_tokens, chain.segments[:-1]).unrouted
                longer += last.source == "model" and last.experts is not None and len(last.experts) < places
            engine = Choosing()
            (rollout,) = asyncio.run(asking(engine).group(7, PROMPT, 1, journal)).rollouts
            assert_own(rollout)
            journal.close()
    assert longer > 0


@pytest.mark.parametrize(("known", "kept"), [(3, False), (6, True)])
def test_a_copy_that_ends_the_turn_has_its_experts_or_none(known: int, kept: bool) -> None:
    """The answer is as long as the settings allow now, so nobody computes what is missing."""
    experts = np.zeros((known, 1, 1), dtype=np.uint8)
    turn = Segment("model", (9, 9, 9, 9), (-1.0,) * 4, (0,) * 4, experts=experts)
    episode = object.__new__(Episode)
    episode._prompt_tokens, episode._segments = (1, 2, 3), []
    assert episode._has_all_experts(turn) is kept and episode._has_all_experts(replace(turn, experts=None))


def _told(chain: Chain) -> Chain:
    """Up to the last turn that has experts."""
    last = max(n for n, s in enumerate(chain.segments) if s.experts is not None)
    return Chain(chain.prompt_tokens, chain.segments[: last + 1])


def test_an_agent_that_rewrites_its_history() -> None:
    """A chain that takes over the tokens of another as its prompt has experts for these too."""

    async def body(model: Model) -> Outcome:
        first = after(ASKED, await say(model, ASKED))
        left, right = (*first, Message("user", "left")), (*first, Message("user", "right"))
        await say(model, left)
        await say(model, after(right, await say(model, right), "on"))
        await asyncio.gather(*(say(model, (*first, Message("user", word))) for word in "abc"))
        return Outcome(1)

    episode = begin(talks(Choosing(), Acting(body), experts=True))
    rollout = asyncio.run(episode.run())
    assert len(rollout.chains) == 5
    assert_own(rollout)
    again = asyncio.run(begin(talks(Choosing(), Acting(body), experts=True), rollout).run())
    assert_own(again)
