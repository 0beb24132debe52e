"""Episodes of several turns: what the model reads, what its environment may do to it, and how they are continued."""

import asyncio
import math
import random
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from talk import PROMPT, SAMPLING, STOP, Engine, Fickle, Recorder, Tokenizer, check_requests, check_tokens, talks

from kitae.data.chat import Chat
from kitae.engines.base import Completion, Request, stream_seed
from kitae.envs.base import EpisodeLimits, Observation, Opening
from kitae.envs.episode import Episode
from kitae.envs.episode_context import Suspended
from kitae.envs.rollouts import Episodes
from kitae.errors import DataError, EngineError, RequestError, StoreError
from kitae.store.journal import Journal
from kitae.types import Group, Message, Prompt, Rollout, Score, Turn


def seed_of(group: int, index: int) -> Callable[[int], int]:
    return lambda number: stream_seed(0, "train", group, index, number)


def run(episodes: Episodes, record: Rollout | None = None) -> Rollout:
    return asyncio.run(Episode(episodes, episodes.make(PROMPT), 7, 0, PROMPT, record).run())


ASKED = Opening(PROMPT.messages)


class Script:
    """Answers `answers` one after the other: observations, exceptions to raise, or functions to call."""

    def __init__(self, *answers: Any, opening: Any = ASKED) -> None:
        self.answers, self.opening = list(answers), opening
        self.heard = list[str]()
        self.closed = 0

    def __call__(self, prompt: Prompt) -> "Script":
        return self

    async def start(self) -> Any:
        return await give(self.opening)

    async def step(self, turn: Turn) -> Any:
        self.heard.append(turn.text)
        return await give(self.answers.pop(0))

    async def close(self) -> None:
        self.closed += 1


async def give(answer: Any) -> Any:
    if isinstance(answer, BaseException):
        raise answer
    return await answer() if callable(answer) else answer


async def hang() -> None:
    await asyncio.sleep(1000)


MORE = Observation((Message("tool", "go on"),))
DONE = Observation(done=True)
QUICK = EpisodeLimits(seconds=0.05, tokens=50)


# A conversation.


def test_the_context_only_grows() -> None:
    engine, judge = Engine(), Recorder()
    rollout = run(talks(engine, Fickle, judge))
    assert [s.source for s in rollout.segments] == ["model", "environment"] * 2 + ["model"]
    assert (rollout.finish, rollout.status, rollout.score) == ("stop", "complete", None)
    check_tokens(rollout, seed_of(7, 0))
    check_requests(engine.requests, engine.answers)
    assert [r.id for r in engine.requests] == ["train/7/0/0", "train/7/0/2", "train/7/0/4"]
    assert [r.share for r in engine.requests] == ["train/7", "", ""]
    assert Fickle.made[-1].closed == 1


def test_the_last_turn_is_judged_and_the_transcript_says_who_said_what() -> None:
    judge = Recorder()
    script = Script(MORE, Observation((Message("user", "Right!"),), done=True))
    group = asyncio.run(talks(Engine(), script, judge).group(7, PROMPT, 1))
    (rollout,) = group.rollouts
    assert rollout.text == "\n\n".join(script.heard) and len(script.heard) == 2
    expected = [
        {"role": "user", "content": "2 + 2"},
        {"role": "assistant", "content": script.heard[0]},
        {"role": "tool", "content": "go on"},
        {"role": "assistant", "content": script.heard[1]},
        {"role": "user", "content": "Right!"},
    ]
    assert judge.asked == [(script.heard[-1], {"question": "2 + 2", "transcript": expected})]
    assert rollout.score == Score(1.0)


def test_one_question_and_one_answer_have_no_transcript() -> None:
    judge = Recorder()
    group = asyncio.run(talks(Engine(), Script(DONE), judge).group(7, PROMPT, 1))
    assert group.rollouts[0].transcript == ()
    assert judge.asked[0][1] is PROMPT.context


def test_a_prompt_that_is_more_than_its_question_is_told_to_the_verifier() -> None:
    judge = Recorder()
    prompt = replace(PROMPT, messages=(Message("system", "Be brief."), *PROMPT.messages))
    asyncio.run(talks(Engine(), Script(DONE), judge).group(7, prompt, 1))
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}]
    assert judge.asked[0][1]["prompt_messages"] == told


def test_observations_do_not_use_up_what_the_model_may_say() -> None:
    long = Observation((Message("tool", "x" * 40),))
    engine = Engine()
    rollout = run(talks(engine, Script(*[long] * 50), Recorder(), sampling=replace(SAMPLING, max_tokens=30)))
    assert rollout.response_length == 30 and rollout.finish == "length"
    spoken = 0
    for request in engine.requests:
        assert request.sampling.max_tokens == 30 - spoken
        spoken += len(engine.answers[request.id].tokens)


def test_a_turn_that_ends_with_the_last_token_is_still_heard() -> None:
    turn = len(run(talks(Engine(), Script(DONE), Recorder())).segments[0].tokens)
    script = Script(replace(MORE, reward=0.5))
    rollout = run(talks(Engine(), script, sampling=replace(SAMPLING, max_tokens=turn)))
    assert (rollout.finish, len(rollout.segments), len(script.heard)) == ("length", 1, 1)
    assert rollout.score == Score(0.5, {"environment": 0.5})
    assert rollout.transcript[-1] == MORE.messages[0]
    assert run(talks(Engine(), Script(DONE), sampling=replace(SAMPLING, max_tokens=turn))).finish == "stop"


def test_turns_are_limited() -> None:
    script = Script(*[MORE] * 9)
    rollout = run(talks(Engine(), script, Recorder(), limits=EpisodeLimits(turns=4)))
    assert len(script.heard) == 4 and rollout.finish == "length" and rollout.status == "complete"
    assert rollout.segments[-1].source == "model"


def test_a_turn_without_a_token_is_a_turn() -> None:
    class Silent(Engine):
        async def generate(self, request: Request) -> Completion:
            return Completion(request.id, (), (), (), "stop")

    script = Script(MORE, DONE)
    rollout = run(talks(Silent(), script, Recorder()))
    assert script.heard == ["", ""] and rollout.status == "complete"


# Room.


def test_the_context_fills_up_with_what_was_said() -> None:
    """A small observation that finds no room is no failure of the environment: the episode is cut off, as it is where
    the model's own words find none."""
    ends = set[int]()
    for context in range(30, 50):
        engine, script = Engine(context=context), Script(*[MORE] * 20)
        rollout = run(talks(engine, script, Recorder(), limits=EpisodeLimits(context=context)))
        assert (rollout.finish, rollout.status) == ("length", "complete")
        assert rollout.segments[-1].source == "model" and len(rollout.chains[0].tokens) <= context
        ends.add(rollout.segments[-1].tokens[-1])
    assert STOP in ends and len(ends) > 1, "both ways"


def test_an_observation_that_is_most_of_the_context_is_a_flood() -> None:
    flood = Observation((Message("tool", "x" * 60),))
    rollout = run(talks(Engine(context=40), Script(flood), Recorder(), limits=EpisodeLimits(context=40)))
    assert rollout.status == "failed" and rollout.score is not None
    assert "an observation of 61 tokens, after" in rollout.score.detail and "the context of 40" in rollout.score.detail


# Failures.

FAILURES: dict[str, tuple[Any, str]] = {
    "raises": (ValueError("boom"), "environment: step raised ValueError: boom"),
    "runs out of time": (TimeoutError("its own"), "environment: step raised TimeoutError: its own"),
    "cancels itself": (asyncio.CancelledError(), "environment: step raised CancelledError: "),
    "raises several": (ExceptionGroup("two", [ValueError("a"), KeyError("b")]), "environment: step raised Exception"),
    "refuses": (RequestError("no"), "environment: step raised RequestError: no"),
    "hangs": (hang, "environment: step took longer than 0.05 s"),
    "floods": (Observation((Message("tool", "x" * 80),)), "an observation must have at most 50 tokens, got 81"),
    "nothing": (None, "environment: step must return an Observation, got NoneType"),
    "nonsense": ("42", "environment: step must return an Observation, got str"),
    "says nothing": (Observation(), "environment: a turn must have at least one message, got none"),
    "no tuple": (Observation("42"), "the messages of step must be a tuple, got str"),  # type: ignore[arg-type]
    "no message": (Observation(({"role": "user"},)), "must be of type Message, got dict"),  # type: ignore[arg-type]
    "no text": (Observation((Message("tool", 42),)), "must be text, got Message"),  # type: ignore[arg-type]
    "no JSON": (Observation((Message("tool", parts=({"x": {1, 2}},)),)), "a message of step must hold JSON: TypeError"),
    "no Unicode": (Observation((Message("tool", "\ud800"),)), "a message must be valid Unicode"),
    "no number": (replace(MORE, reward="1"), "a reward must be a finite number or None, got '1'"),  # type: ignore[arg-type]
    "infinite": (replace(DONE, reward=math.inf), "a reward must be a finite number or None, got inf"),
    "too large": (replace(DONE, reward=10**400), "a reward must be a finite number or None, got 1000"),
    "no calls": (Observation((Message("tool", "4", calls=None),)), "calls must be of type ToolCall"),  # type: ignore[arg-type]
    "no call": (Observation((Message("tool", "4", calls=("add",)),)), "calls must be of type ToolCall"),  # type: ignore[arg-type]
    "no id": (Observation((Message("tool", "4", call_id=5),)), "must be text, got Message"),  # type: ignore[arg-type]
    "no parts": (Observation((Message("tool", "4", parts=("x",)),)), "calls must be of type ToolCall"),  # type: ignore[arg-type]
    "leaves": (SystemExit(3), "environment: step raised SystemExit: 3"),
    "gives up": (Observation(error="the game server is gone"), "environment: the game server is gone"),
}


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("turn", [1, 2])
def test_a_failing_environment_costs_one_sample(kind: str, turn: int, tmp_path: Path) -> None:
    answer, reason = FAILURES[kind]
    judge, journal = Recorder(), Journal(tmp_path / "journal.sqlite")
    scripts = [Script(MORE, MORE, DONE), Script(*[MORE] * (turn - 1), answer), Script(MORE, MORE, DONE)]
    waiting = iter(scripts)
    group = asyncio.run(talks(Engine(), lambda _: next(waiting), judge, limits=QUICK).group(7, PROMPT, 3, journal))
    good, failed, other = group.rollouts
    assert (good.status, failed.status, other.status) == ("complete", "failed", "complete")
    assert (
        failed.score is not None and reason in failed.score.detail and failed.score.detail.startswith("environment: ")
    )
    assert failed.score.outcome == "error" and failed.finish == "stop"
    assert [s.source for s in failed.segments] == (["model", "environment"] * turn)[:-1], "what was sampled is kept"
    check_tokens(failed, seed_of(7, 1))
    assert group.valid == (good, other) and len(judge.asked) == 2
    assert [s.closed for s in scripts] == [1, 1, 1]
    found = {r.index: r for r in journal.rollouts(7)}
    assert found[1].status == "failed" and found[1].score is not None and found[1].score.detail == failed.score.detail

    # A resumed run takes it as it is: no engine, no environment, no verifier is asked.
    again = asyncio.run(talks(None, None, None).group(7, PROMPT, 3, journal))
    assert [r.status for r in again.rollouts] == ["complete", "failed", "complete"]
    journal.close()


OPENINGS = [
    *(ValueError("no room"), SystemExit(3), hang, "2 + 2", Opening("2 + 2"), Opening((42,))),  # type: ignore[arg-type]
    *(Opening(PROMPT.messages, tools) for tools in (None, ("add",), ({"name": 4},), ({"name": "f", "x": {1}},))),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("opening", OPENINGS)
def test_one_that_does_not_start_costs_one_sample(opening: Any) -> None:
    made = iter([Script(DONE), Script(opening=opening), Script(DONE)])
    group = asyncio.run(talks(Engine(), lambda _: next(made), Recorder(), limits=QUICK).group(7, PROMPT, 3))
    assert [r.status for r in group.rollouts] == ["complete", "failed", "complete"]
    failed = group.rollouts[1]
    assert (failed.response_length, failed.finish, failed.text) == (0, "abort", "")


@pytest.mark.parametrize("error", [OSError("no such game"), SystemExit("no such game")])
def test_one_that_cannot_be_made_costs_one_sample(error: BaseException) -> None:
    def make(prompt: Prompt) -> Any:
        raise error

    rollout = run(talks(Engine(), make, Recorder()))
    reason = f"environment: making it raised {type(error).__name__}: no such game"
    assert rollout.score is not None and rollout.score.detail == reason


def test_an_exception_without_words_costs_one_sample() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    rollout = run(talks(Engine(), Script(Mute()), Recorder()))
    assert rollout.score is not None and rollout.score.detail == "environment: step raised Mute"
    long = run(talks(Engine(), Script(ValueError("x" * 10**6)), Recorder()))
    assert long.score is not None and len(long.score.detail) < 600


def test_an_engine_that_refuses_a_later_turn_costs_one_sample() -> None:
    rollout = run(talks(Engine(context=22), Script(*[MORE] * 5), Recorder()))
    assert rollout.status == "failed" and rollout.score is not None
    assert rollout.score.detail.startswith("environment: the engine refuses turn ")


def test_an_impossible_prompt_is_the_group_s() -> None:
    with pytest.raises(RequestError, match="in a context of 3"):
        asyncio.run(talks(Engine(context=3), Fickle, Recorder()).group(7, PROMPT, 2))
    with pytest.raises(DataError, match="at least one message"):
        asyncio.run(talks(Engine(), Script(opening=Opening(())), Recorder()).group(7, PROMPT, 1))


@pytest.mark.parametrize("error", [EngineError("dead"), StoreError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_is_the_run_s_own_ends_it(error: BaseException, wrapped: bool) -> None:
    if wrapped:
        error = BaseExceptionGroup("of a task group", [error])
    script = Script(error)
    with pytest.raises((EngineError, StoreError, KeyboardInterrupt, BaseExceptionGroup)):
        asyncio.run(talks(Engine(), script, Recorder()).group(7, PROMPT, 1))
    assert script.closed == 1


def test_a_cancelled_group_is_cancelled_and_closed() -> None:
    script = Script(hang)

    async def body() -> None:
        group = asyncio.create_task(talks(Engine(), script, Recorder()).group(7, PROMPT, 1))
        while not script.heard:
            await asyncio.sleep(0)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group

    asyncio.run(body())
    assert script.closed == 1


@pytest.mark.parametrize(("closing", "reason"), [(ValueError("stuck"), "ValueError: stuck"), (hang, "TimeoutError")])
def test_what_fails_when_it_closes_is_only_noted(closing: Any, reason: str) -> None:
    class Unclosable(Script):
        async def close(self) -> None:
            await give(closing)

    note = f"the environment could not be closed: {reason}"
    good, bad = Unclosable(DONE), Unclosable(ValueError("boom"))
    made = iter([good, bad])
    group = asyncio.run(talks(Engine(), lambda _: next(made), Recorder(), limits=QUICK).group(7, PROMPT, 2))
    fine, failed = (r.score for r in group.rollouts)
    assert fine is not None and fine.valid and fine.detail.startswith(note)
    assert failed is not None and failed.detail.startswith(f"environment: step raised ValueError: boom; {note}")


def test_every_call_is_watched() -> None:
    seen = list[tuple[str, str]]()

    @contextmanager
    def waiting(what: str, which: str) -> Any:
        seen.append((what, which))
        yield

    run(talks(Engine(), Script(MORE, DONE), Recorder(), waiting=waiting))
    environment = ("the environment", "7/0")
    assert seen == [
        environment,
        ("the engine", "train/7/0/0"),
        environment,
        ("the engine", "train/7/0/2"),
        environment,
        ("the environment to close", "7/0"),
    ]


# Rewards.


def test_rewards_of_the_environment_are_the_score(tmp_path: Path) -> None:
    judge, journal = Recorder(), Journal(tmp_path / "journal.sqlite")
    script = Script(replace(MORE, reward=0.25), MORE, replace(DONE, reward=1))
    group = asyncio.run(talks(Engine(), script, judge).group(7, PROMPT, 1, journal))
    assert group.rollouts[0].score == Score(1.25, {"environment": 1.25}) and judge.asked == []
    assert [s.reward for s in group.rollouts[0].segments] == [0.25, None, None, None, 1.0]
    assert journal.rollouts(7) == list(group.rollouts), "with its score, at once"
    journal.close()


def test_without_a_verifier_no_reward_is_a_0() -> None:
    group = asyncio.run(talks(Engine(), Script(MORE, DONE), None).group(7, PROMPT, 1))
    assert group.rollouts[0].score == Score(0.0, {"environment": 0.0})


# Interruptions.


class Clock:
    """Counts what happens; `struck` is set at the moment given."""

    def __init__(self, moment: int) -> None:
        self.moment, self.count, self.struck = moment, 0, asyncio.Event()

    def tick(self) -> None:
        self.count += 1
        if self.count == self.moment:
            self.struck.set()


async def interrupted(way: str, clock: Clock, episodes: Episodes, size: int, journal: Journal | None) -> Group | None:
    """A group that is interrupted when the clock strikes: suspended, or copied and killed. None: it was."""

    async def interrupt() -> None:
        await clock.struck.wait()
        if way == "suspend":
            await episodes.suspend()
        elif journal is not None:
            news = episodes.grown(1)
            group.cancel()
            await journal.extend_suspended(*news)

    group = asyncio.create_task(episodes.group(7, PROMPT, size, journal))
    interrupting = asyncio.create_task(interrupt())
    try:
        return await group
    except (Suspended, asyncio.CancelledError):
        await interrupting
        return None
    finally:
        interrupting.cancel()


async def one_cut(way: str, moment: int, journal: Journal, environment: Any) -> bool:
    """A group of one, cut at a moment. Whether it came to that."""
    clock = Clock(moment)
    engine = Engine(clock.tick)
    episodes = talks(engine, lambda prompt: environment(prompt, clock.tick), Recorder())
    await interrupted(way, clock, episodes, 1, journal)
    check_requests(engine.requests, engine.answers)
    return clock.struck.is_set()


@pytest.mark.parametrize("way", ["suspend", "kill"])
def test_an_episode_goes_on_from_its_record_wherever_it_was_cut(way: str, tmp_path: Path) -> None:
    """At each token and in each call of an environment that never answers the same twice."""
    seen = set[tuple[int, str]]()
    moment = 0
    while True:
        moment += 1
        journal = Journal(tmp_path / f"{way}-{moment}.sqlite")
        if not asyncio.run(one_cut(way, moment, journal, Fickle)):
            journal.close()
            break
        record = next(iter(journal.suspended(7)), None)
        judge, engine = Recorder(), Engine()
        group = asyncio.run(talks(engine, Fickle, judge).group(7, PROMPT, 1, journal))
        (rollout,) = group.rollouts
        check_tokens(rollout, seed_of(7, 0))
        check_requests(engine.requests, engine.answers)
        if record is not None:
            seen.add((len(record.segments), record.finish))
            cut = record.chains[0].tokens
            assert rollout.chains[0].tokens[: len(cut)] == cut, "what is on record is what was read and said"
            logprobs = [x for s in record.segments for x in s.logprobs]
            assert [x for s in rollout.segments for x in s.logprobs][: len(logprobs)] == logprobs
            for asked in engine.requests:
                assert len(asked.prompt_tokens) + len(asked.prior.tokens) >= len(cut), "nothing is sampled twice"
            assert rollout.transcript[: len(record.transcript)] == record.transcript
        assert rollout.status == "complete" and len(rollout.segments) == 5
        turns = [s for s in rollout.segments if s.source == "model"]
        spoken = [m.content for m in rollout.transcript if m.role == "assistant"]
        assert spoken == Fickle.made[-1].heard == ["".join(map(chr, t.tokens[:-1])) for t in turns]
        observed = [m.content for m in rollout.transcript if m.role == "tool"]
        assert observed == ["".join(map(chr, s.tokens[1:])) for s in rollout.segments if s.source == "environment"]
        assert judge.asked[0][1]["transcript"][-1]["content"] == spoken[-1] and journal.counts()["suspended"] == 0
        journal.close()
    assert moment > 12 and {s for s, _ in seen} == {1, 2, 3, 4, 5} and {f for _, f in seen} == {"suspended", "stop"}


def test_a_single_answer_is_suspended_as_before(tmp_path: Path) -> None:
    class Single(Fickle):
        turns = 1

        async def start(self) -> Opening:
            return Opening(self.prompt.messages)

    journal = Journal(tmp_path / "journal.sqlite")
    asyncio.run(one_cut("suspend", 2, journal, Single))
    (record,) = journal.suspended(7)
    assert (record.finish, record.transcript, len(record.segments)) == ("suspended", (), 1)
    whole = run(talks(Engine(), Single, Recorder()))
    group = asyncio.run(talks(Engine(), Single, Recorder()).group(7, PROMPT, 1, journal))
    assert group.rollouts[0] == replace(whole, score=Score(1.0))
    journal.close()


def recorded(*answers: Any, **settings: Any) -> Rollout:
    """An episode that was suspended while the environment thought about the turn after these answers."""

    async def body() -> Rollout:
        script = Script(*answers, hang)
        episodes = talks(Engine(), script, Recorder(), **settings)
        episode = asyncio.create_task(Episode(episodes, episodes.make(PROMPT), 7, 0, PROMPT).run())
        while len(script.heard) <= len(answers):
            await asyncio.sleep(0)
        await episodes.suspend()
        return await episode

    return asyncio.run(body())


def test_an_environment_is_not_waited_for_when_the_run_stops() -> None:
    record = recorded(MORE)
    assert (record.status, record.finish) == ("suspended", "stop")
    assert [s.source for s in record.segments] == ["model", "environment", "model"]


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([DONE], "environment: it ended after turn 1 this time, where the record of the episode goes on"),
        ([MORE, DONE], "environment: it ended after turn 2 this time, where the record of the episode goes on"),
        ([MORE, Observation(error="lost")], "environment: lost"),
        ([ValueError("boom")], "environment: step raised ValueError: boom"),
        ([MORE, hang], "environment: step took longer than 0.05 s"),
    ],
)
def test_a_record_that_the_environment_does_not_follow_is_a_failure(answers: list[Any], reason: str) -> None:
    record = recorded(MORE, MORE)
    rollout = run(talks(Engine(), Script(*answers), Recorder(), limits=QUICK), record)
    assert rollout.status == "failed" and rollout.score is not None and rollout.score.detail == reason
    assert rollout.chains == record.chains and rollout.finish == "stop", "all that was sampled is kept"
    assert len(rollout.text.split("\n\n")) == 3 and [m.role for m in rollout.transcript].count("assistant") == 3


def test_rewards_on_record_count_and_not_those_given_again() -> None:
    record = recorded(replace(MORE, reward=0.25))
    script = Script(replace(MORE, reward=9), replace(MORE, reward=0.5), DONE)
    assert run(talks(Engine(), script), record).score == Score(0.75, {"environment": 0.75})


def test_a_turn_that_was_copied_at_its_last_token_is_not_sampled_further() -> None:
    whole = run(talks(Engine(), Script(DONE), Recorder()))
    copied = replace(whole, finish="suspended", status="suspended", text="")
    engine, script = Engine(), Script(DONE)
    assert run(talks(engine, script, Recorder()), copied) == whole and engine.requests == []
    assert script.heard == [whole.text]

    used_up = replace(SAMPLING, max_tokens=2)
    whole = run(talks(Engine(), Script(), Recorder(), sampling=used_up))
    copied = replace(whole, finish="suspended", status="suspended", text="")
    assert whole.finish == "length"
    assert run(talks(Engine(), Script(), Recorder(), sampling=used_up), copied) == whole


def test_a_turn_that_ended_without_a_stop_token_is_known_to_have_ended() -> None:
    record = recorded(MORE)
    bare = [
        replace(t, tokens=t.tokens[:-1], logprobs=t.logprobs[:-1], versions=t.versions[:-1]) for t in record.segments
    ]
    record = replace(record, chains=(replace(record.chains[0], segments=tuple(bare)),))
    engine, script = Engine(), Script(MORE, DONE)
    rollout = run(talks(engine, script, Recorder()), record)
    assert engine.requests == [] and rollout.chains == record.chains and len(script.heard) == 2


@pytest.mark.parametrize("finish", ["stop", "suspended"])
def test_a_run_that_stops_again_before_it_got_anywhere_keeps_the_record(finish: Any) -> None:
    record = replace(recorded(MORE, MORE), finish=finish)
    for script in (Script(opening=hang), Script(hang), Script(MORE, hang)):

        async def body(script: Script = script) -> Rollout:
            episodes = talks(Engine(), script, Recorder())
            episode = asyncio.create_task(Episode(episodes, episodes.make(PROMPT), 7, 0, PROMPT, record).run())
            while script.answers[:1] not in ([], [hang]) or not (script.heard or script.opening is hang):
                await asyncio.sleep(0)
            assert episodes.grown(1) == [], "there is nothing new"
            await episodes.suspend()
            return await episode

        assert asyncio.run(body()) == record


def test_only_what_is_new_of_a_conversation_is_copied(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")

    async def body() -> None:
        engine, script = Engine(), Script(MORE, hang)
        episodes = talks(engine, script, Recorder())
        copies = list[tuple[Rollout, int]]()
        engine.tick = lambda: copies.extend(episodes.grown(1))
        episode = asyncio.create_task(Episode(episodes, episodes.make(PROMPT), 7, 0, PROMPT).run())
        while len(script.heard) < 2:
            await asyncio.sleep(0)
        copies += episodes.grown(1)
        shapes = [(len(r.segments), len(r.segments[-1].tokens), known, r.finish) for r, known in copies]
        one, two = (len(engine.answers[f"train/7/0/{n}"].tokens) for n in (0, 2))
        assert shapes == [
            *((1, 1, known, "suspended") for known in range(one - 1)),
            (2, len("\ngo on"), 0, "stop"),  # the end of a turn comes with what was answered to it
            *((3, 1, known, "suspended") for known in range(two - 1)),
            (3, 1, two - 1, "stop"),
        ]
        for rollout, known in copies:
            await journal.extend_suspended((rollout, known))
            (found,) = journal.suspended(7)
            assert len(found.segments[-1].tokens) == known + len(rollout.segments[-1].tokens)
            assert (found.finish, found.transcript) == (rollout.finish, rollout.transcript)
        await episodes.suspend()
        suspended = await episode
        assert (found.chains, found.finish, found.transcript) == (
            suspended.chains,
            suspended.finish,
            suspended.transcript,
        )

    asyncio.run(body())
    journal.close()


def test_a_stop_string_ends_a_turn_that_has_to_be_closed() -> None:
    class Chatty(Engine):
        async def generate(self, request: Request) -> Completion:
            return Completion(request.id, tuple(map(ord, "one. two")), (-1.0,) * 8, (3,) * 8, "stop")

    closings = list[bool]()

    class Listening(Chat):
        def encode_turn(self, messages: Any, *, closed: bool = True) -> tuple[int, ...]:
            closings.append(closed)
            return super().encode_turn(messages, closed=closed)

    script = Script(MORE, DONE)
    sampling = replace(SAMPLING, stop_strings=(". ",))
    episodes = Episodes(Chatty(), Listening(Tokenizer()), Recorder(), script, sampling, 0)  # type: ignore[arg-type]
    rollout = run(episodes)
    assert script.heard == ["one", "one"] and rollout.text == "one\n\none" and closings == [False]
    begun = replace(rollout, chains=(replace(rollout.chains[0], segments=rollout.segments[:1]),), finish="suspended")
    script.answers, script.heard = [DONE], []
    assert run(episodes, begun).text == "one" and script.heard == ["one"]


# All of it, crossed.

WAYS = ["none", "raise", "hang", "flood", "nonsense", "error", "refuse"]


@settings(deadline=None, max_examples=60)
@given(
    turns=st.integers(1, 4),
    way=st.sampled_from(WAYS),
    at=st.integers(1, 4),
    moments=st.lists(st.tuples(st.sampled_from(["suspend", "kill"]), st.integers(1, 40)), max_size=3),
    journalled=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_episode_however_often_interrupted(
    turns: int, way: str, at: int, moments: list[tuple[str, int]], journalled: bool, seed: int
) -> None:
    """It ends complete or failed, is on record once, and every token in it was said after exactly those before it."""
    random.seed(seed)

    class Failing(Fickle):
        async def step(self, turn: Turn) -> Observation:
            found = await super().step(turn)
            if len(self.heard) != at or way == "none" or way == "refuse":
                return found
            answers = {"flood": Observation((Message("tool", "x" * 80),)), "error": Observation(error="lost")}
            return await give({"raise": ValueError("boom"), "hang": hang, "nonsense": 42}.get(way, answers.get(way)))

    Failing.turns = turns
    fails = way != "none" and at <= turns and not (way == "refuse" and at == turns)

    class Refusing(Engine):
        async def generate(self, request: Request) -> Completion:
            if way == "refuse" and request.id.endswith(f"/{2 * at}"):
                raise RequestError("no")
            return await super().generate(request)

    async def one(journal: Journal | None, act: str, moment: int) -> Group | None:
        clock = Clock(moment)
        engine = Refusing(clock.tick)
        limits = EpisodeLimits(seconds=0.25 if way == "hang" else 30, tokens=50)
        episodes = talks(engine, lambda prompt: Failing(prompt, clock.tick), Recorder(), limits=limits)
        found = await interrupted(act, clock, episodes, 2, journal)
        check_requests(sorted(engine.requests, key=lambda r: r.id), engine.answers)
        assert episodes.running.episodes == {} == engine.flights
        return found

    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal.sqlite") if journalled else None
        group = None
        for act, moment in moments if journalled else ():
            group = group or asyncio.run(one(journal, act, moment))
        group = group or asyncio.run(one(journal, "none", 0))
        assert group is not None
        for rollout in group.rollouts:
            assert rollout.status == ("failed" if fails else "complete")
            check_tokens(rollout, seed_of(7, rollout.index))
            assert len(rollout.segments) == 2 * (min(at, turns) if fails else turns) - (way != "refuse" or not fails)
            assert rollout.score is not None and rollout.score.valid is not fails
            assert all(s.tokens[-1] == STOP for s in rollout.segments if s.source == "model")
        if journal is not None:
            assert [r.chains for r in journal.rollouts(7)] == [r.chains for r in group.rollouts]
            assert journal.counts()["suspended"] == 0
            journal.close()
