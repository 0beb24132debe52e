"""Episodes that a program holds: what it asks becomes chains, each sampled token in one of them alone."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from talk import PROMPT, SAMPLING, Engine, Recorder, next_token, talks

from kitae.engines.base import Completion, Request, SamplingParams
from kitae.envs.agent_episode import AgentEpisode
from kitae.envs.base import Agent, EpisodeLimits, Outcome
from kitae.envs.episode_context import Suspended
from kitae.envs.rollouts import Episodes
from kitae.errors import EngineError, RequestError
from kitae.serving.base import Answer, Ask, Model
from kitae.store.journal import Journal
from kitae.types import Message, Prompt, Rollout, Score

ASKED = PROMPT.messages
Body = Callable[[Model], Awaitable[Outcome]]


class Acting:
    """An agent that does what a function says."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.closed = 0

    def __call__(self, prompt: Prompt) -> "Acting":
        return self

    async def enter(self) -> None:
        pass

    async def run(self, model: Model) -> Outcome:
        return await self.body(model)

    async def close(self) -> None:
        self.closed += 1


async def say(model: Model, messages: tuple[Message, ...], **settings: Any) -> Answer:
    retry = settings.pop("retry", False)
    sampling = SamplingParams(**{"max_tokens": 1000, **settings})
    return await model.ask(Ask("x", messages, sampling=sampling, retry=retry))


def after(messages: tuple[Message, ...], answer: Answer, *more: str) -> tuple[Message, ...]:
    """The conversation as a client sends it back, with more from the user."""
    said = Message("assistant", answer.turn.content, answer.turn.calls)
    return (*messages, said, *(Message("user", text) for text in more))


def run(body: Body, engine: Any = None, judge: Any = None, record: Rollout | None = None, **settings: Any) -> Rollout:
    episodes = talks(engine or Engine(), Acting(body), judge, **settings)
    return asyncio.run(begin(episodes, record).run())


def begin(episodes: Episodes, record: Rollout | None = None) -> AgentEpisode:
    agent = episodes.make(PROMPT)
    assert isinstance(agent, Agent)
    return AgentEpisode(episodes, agent, 7, 0, PROMPT, record)


def check_each_token_once(rollout: Rollout, requests: list[Request], answers: dict[str, Completion]) -> None:
    """What is trained on is what was sampled, after exactly what was read, and each answer is in one place."""
    asked = {request.prompt_tokens: request for request in requests}
    found = []
    for chain in rollout.chains:
        context = chain.prompt_tokens
        for segment in chain.segments:
            if segment.source == "model":
                request = asked[context]
                assert segment.tokens == answers[request.id].tokens
                for spoken, token in enumerate(segment.tokens):
                    assert token == next_token(request.seed, context + segment.tokens[:spoken], spoken)[0]
                found.append(request.id)
            context += segment.tokens
    assert sorted(found) == sorted(answers)


def test_a_conversation_is_one_chain_that_only_grows() -> None:
    engine = Engine()

    async def body(model: Model) -> Outcome:
        messages = ASKED
        for word in ("more", "again", ""):
            messages = after(messages, await say(model, messages), *filter(None, (word,)))
        return Outcome(0.5, "fine")

    rollout = run(body, engine)
    (chain,) = rollout.chains
    assert [s.source for s in chain.segments] == ["model", "environment"] * 2 + ["model"]
    assert rollout.score == Score(0.5, {"environment": 0.5}, detail="fine")
    for before, later in pairwise(engine.requests):
        said = before.prompt_tokens + engine.answers[before.id].tokens
        assert later.prompt_tokens[: len(said)] == said
    check_each_token_once(rollout, engine.requests, engine.answers)
    assert [m.role for m in rollout.transcript] == ["user", "assistant"] * 3
    assert len({r.session for r in engine.requests}) == 1 and engine.requests[0].session


def test_a_rewritten_history_is_a_chain_of_its_own() -> None:
    engine = Engine()

    async def body(model: Model) -> Outcome:
        first = after(ASKED, await say(model, ASKED), "more")
        second = after(first, await say(model, first), "again")
        shortened = (*ASKED, Message("assistant", "In short: no."), Message("user", "again"))
        await say(model, shortened)
        await say(model, second)
        return Outcome()

    judge = Recorder()
    rollout = run(body, engine, judge)
    assert [len(c.segments) for c in rollout.chains] == [5, 1], "and the first goes on where it was"
    check_each_token_once(rollout, engine.requests, engine.answers)
    assert rollout.score is None


def test_going_back_takes_over_the_tokens_that_were_sampled() -> None:
    engine = Engine()

    async def body(model: Model) -> Outcome:
        first = after(ASKED, await say(model, ASKED))
        left, right = (*first, Message("user", "left")), (*first, Message("user", "right"))
        await say(model, left)
        await say(model, after(right, await say(model, right), "on"))
        return Outcome(1)

    rollout = run(body, engine)
    one, other = rollout.chains
    assert [len(c.segments) for c in rollout.chains] == [3, 3]
    common = one.prompt_tokens + one.segments[0].tokens
    assert other.prompt_tokens[: len(common)] == common, "as tokens, and not trained on again"
    check_each_token_once(rollout, engine.requests, engine.answers)


def test_asks_at_once_do_not_mix() -> None:
    engine = Engine()

    async def body(model: Model) -> Outcome:
        first = after(ASKED, await say(model, ASKED))
        await asyncio.gather(*(say(model, (*first, Message("user", word))) for word in "abc"))
        await asyncio.gather(say(model, ASKED), say(model, ASKED))
        return Outcome(1)

    rollout = run(body, engine)
    assert len(rollout.chains) == 5
    sampled = [s.tokens for c in rollout.chains for s in c.segments if s.source == "model"]
    assert len(set(sampled)) == len(sampled) == 6, "the same question twice gets two samples"


def test_of_two_alike_at_once_the_second_may_be_answered_first() -> None:
    async def body(model: Model) -> Outcome:
        await asyncio.gather(say(model, ASKED), say(model, ASKED, max_tokens=1))
        return Outcome(1)

    rollout = run(body, Engine())
    assert rollout.status == "complete", rollout.score
    assert len(rollout.chains) == 2 and len(rollout.chains[0].segments[0].tokens) == 1


def test_other_tools_are_another_context() -> None:
    async def body(model: Model) -> Outcome:
        first = after(ASKED, await say(model, ASKED), "more")
        with pytest.raises(RequestError, match="chat template"):
            await model.ask(Ask("x", first, tools=({"type": "function", "function": {"name": "f"}},)))
        return Outcome(1)

    assert len(run(body).chains) == 1


def test_a_retry_gets_the_same_tokens() -> None:
    engine = Engine()

    async def body(model: Model) -> Outcome:
        lost = asyncio.ensure_future(say(model, ASKED))
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.wait([lost])
        got = await say(model, ASKED)
        assert await say(model, ASKED, retry=True) == got
        other = await say(model, ASKED)
        assert other.sampled != got.sampled
        assert await say(model, ASKED, retry=True) == other
        return Outcome(1)

    rollout = run(body, engine)
    assert len(rollout.chains) == 2
    assert engine.requests[0].seed == engine.requests[1].seed != engine.requests[2].seed


@pytest.mark.parametrize("taken_back", [False, True])
def test_a_retry_while_the_first_is_on_its_way_waits_for_it(taken_back: bool) -> None:
    engine = Engine()

    async def body(model: Model) -> Outcome:
        first = asyncio.ensure_future(say(model, ASKED))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(say(model, ASKED, retry=True))
        await asyncio.sleep(0)
        if taken_back:
            first.cancel()
        await asyncio.wait([first, second])
        assert taken_back or second.result() == first.result()
        return Outcome(1)

    assert len(run(body, engine).chains) == 1
    assert len({r.seed for r in engine.requests}) == 1 and len(engine.requests) == 1 + taken_back


def test_the_run_decides_how_to_sample_and_the_client_how_much() -> None:
    engine = Engine()

    async def body(model: Model) -> Outcome:
        await say(model, ASKED, temperature=0.1, top_p=0.5, max_tokens=2, stop_strings=("x",))
        return Outcome(1)

    rollout = run(body, engine)
    (request,) = engine.requests
    assert request.sampling == replace(SAMPLING, max_tokens=2, stop_strings=("x",))
    assert rollout.finish == "length" and rollout.response_length == 2


@pytest.mark.parametrize(
    ("limits", "sampling", "rule"),
    [
        (EpisodeLimits(turns=2), SAMPLING, "2 turns"),
        (EpisodeLimits(), replace(SAMPLING, max_tokens=6), "6 tokens"),
        (EpisodeLimits(context=20), SAMPLING, "context of 20"),
    ],
)
def test_what_is_used_up_is_refused_and_judged(limits: EpisodeLimits, sampling: SamplingParams, rule: str) -> None:
    refusals = []

    async def body(model: Model) -> Outcome:
        messages = ASKED
        try:
            while True:
                messages = after(messages, await say(model, messages), "and then?")
        except RequestError as refusal:
            refusals.append(str(refusal))
            raise

    group = asyncio.run(talks(Engine(), Acting(body), Recorder(), limits=limits, sampling=sampling).group(7, PROMPT, 1))
    (rollout,) = group.rollouts
    assert (rollout.status, rollout.finish, rollout.score) == ("complete", "length", Score(1.0))
    assert rule in refusals[0]


@pytest.mark.parametrize(
    ("messages", "rule"),
    [((), "got no message"), ((*ASKED, Message("assistant", "well")), "got 'assistant'")],
)
def test_what_cannot_be_answered_is_refused(messages: tuple[Message, ...], rule: str) -> None:
    async def body(model: Model) -> Outcome:
        with pytest.raises(RequestError, match=rule):
            await say(model, messages)
        with pytest.raises(RequestError, match="chat messages"):
            await model.ask(Ask("x", prompt_tokens=(1, 2)))
        await say(model, ASKED)
        return Outcome(1)

    assert run(body).status == "complete"


async def _nothing(model: Model) -> Outcome:
    return Outcome(1)


async def _boom(model: Model) -> Outcome:
    await say(model, ASKED)
    raise ValueError("boom")


async def _hang(model: Model) -> Outcome:
    await say(model, ASKED)
    await asyncio.sleep(1000)
    return Outcome(1)


async def _nonsense(model: Model) -> Any:
    await say(model, ASKED)
    return 1.0


async def _infinite(model: Model) -> Outcome:
    await say(model, ASKED)
    return Outcome(float("inf"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (_nothing, "without asking"),
        (_boom, "run raised ValueError: boom"),
        (_hang, "asked nothing for 0.2 s"),
        (_nonsense, "must return an Outcome, got float"),
        (_infinite, "finite number"),
    ],
)
def test_a_failure_costs_one_sample(body: Body, reason: str) -> None:
    agent = Acting(body)
    episodes = talks(Engine(), agent, None, limits=EpisodeLimits(seconds=0.2))
    (rollout,) = asyncio.run(episodes.group(7, PROMPT, 1)).rollouts
    assert rollout.status == "failed" and rollout.score is not None and not rollout.score.valid
    assert reason in rollout.score.detail
    assert agent.closed == 1 and episodes.running.episodes == {}


def test_time_that_the_model_takes_is_not_the_agents() -> None:
    class Slow(Engine):
        async def generate(self, request: Request) -> Completion:
            await asyncio.sleep(0.4)
            return await super().generate(request)

    async def body(model: Model) -> Outcome:
        await say(model, after(ASKED, await say(model, ASKED), "more"))
        return Outcome(1)

    assert run(body, Slow(), limits=EpisodeLimits(seconds=0.3)).status == "complete"


def test_an_error_of_the_engine_ends_the_run_though_another_task_met_it() -> None:
    class Broken(Engine):
        async def generate(self, request: Request) -> Completion:
            raise EngineError("out of memory")

    async def body(model: Model) -> Outcome:
        asked = asyncio.ensure_future(say(model, ASKED))  # as the handler of a request does
        await asyncio.wait([asked])
        asked.exception()
        await asyncio.sleep(1000)
        return Outcome(1)

    with pytest.raises(EngineError, match="out of memory"):
        run(body, Broken())


def test_after_its_end_nothing_is_answered() -> None:
    left: list[Model] = []

    async def body(model: Model) -> Outcome:
        left.append(model)
        await say(model, ASKED)
        return Outcome(1)

    async def both() -> None:
        await begin(talks(Engine(), Acting(body))).run()
        with pytest.raises(RequestError, match="is over"):
            await say(left[0], ASKED)

    asyncio.run(both())


# Interrupted and continued.


def _three_turns(heard: list[str]) -> Body:
    async def body(model: Model) -> Outcome:
        messages = ASKED
        for word in ("more", "again", "last"):
            answer = await say(model, messages)
            heard.append(answer.turn.text)
            messages = after(messages, answer, word)
            await asyncio.sleep(0)
        await say(model, (*ASKED, Message("assistant", "rewritten"), Message("user", "?")))
        return Outcome(1)

    return body


@pytest.mark.parametrize("moment", range(0, 22, 3))
@pytest.mark.parametrize("way", ["suspend", "kill"])
def test_an_interrupted_episode_gives_what_the_whole_one_does(moment: int, way: str, tmp_path: Path) -> None:
    whole_heard, heard = list[str](), list[str]()
    whole = run(_three_turns(whole_heard))
    journal = Journal(tmp_path / "journal.sqlite")

    async def cut() -> None:
        ticks = 0
        reached = asyncio.Event()

        def tick() -> None:
            nonlocal ticks
            ticks += 1
            if ticks == moment + 1:
                reached.set()

        episodes = talks(Engine(tick), Acting(_three_turns(heard)))
        task = asyncio.create_task(episodes.group(7, PROMPT, 1, journal))
        waiting = asyncio.create_task(reached.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            return
        if way == "suspend":
            await episodes.suspend()
            with suppress(Suspended):  # or it has just ended
                await task
        else:
            await journal.extend_suspended(*episodes.grown(1))
            task.cancel()
            await asyncio.wait([task])
        assert episodes.running.episodes == {}

    asyncio.run(cut())
    journal.close()  # what was being written when it was cut is there, or nobody writes it any more
    journal = Journal(tmp_path / "journal.sqlite")
    before = {t for r in journal.suspended(7) for s in r.segments for t in [s.tokens] if s.source == "model"}
    heard.clear()
    engine = Engine()
    group = asyncio.run(talks(engine, Acting(_three_turns(heard))).group(7, PROMPT, 1, journal))
    assert group.rollouts[0] == whole
    assert not before & {answer.tokens for answer in engine.answers.values()}, "nothing is sampled twice"
    assert journal.counts()["suspended"] == 0 and len(journal.rollouts(7)) == 1
    journal.close()


def test_waiting_for_ones_turn_is_not_limited_and_can_be_interrupted() -> None:
    class Late(Acting):
        async def enter(self) -> None:
            await asyncio.sleep(0.3)

    async def body(model: Model) -> Outcome:
        await say(model, ASKED)
        return Outcome(1)

    async def both() -> None:
        episodes = talks(Engine(), Late(body), limits=EpisodeLimits(seconds=0.2))
        assert (await begin(episodes).run()).status == "complete"
        task = asyncio.create_task(begin(episodes).run())
        await asyncio.sleep(0.01)
        await episodes.suspend()
        assert (await task).status == "suspended"

    asyncio.run(both())
