"""What a step says of itself where episodes have several turns, several chains, or have failed."""

from dataclasses import replace

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.group_stages import GroupStages
from kitae.observe.step_report import Generation, Lap, StepReport, Talks
from kitae.rl.buffer import SlotResult
from kitae.rl.reporting import sampled, staleness
from kitae.types import Chain, Group, Message, Prompt, Rollout, Score, Segment, ToolCall

PROMPT = Prompt("p", (Message("user", "2 + 2"),), "4")


def said(count: int, version: int) -> Segment:
    return Segment("model", (5,) * count, (-1.0,) * count, (version,) * count)


def talk(index: int, score: Score, version: int = 3) -> Rollout:
    """Nine tokens of the model and a hundred of others."""
    segments = (said(4, version), Segment.observed((7,) * 100), said(5, version))
    return Rollout.of(0, index, (1, 2), segments, "stop", "", score)


def failed(index: int, version: int = 3) -> Rollout:
    chains = (Chain((1, 2), (said(3, version),)),)
    return Rollout(0, index, chains, "stop", "", Score.error("environment: boom"), "failed")


def forked(index: int, version: int) -> Rollout:
    """Its context was rewritten on the way: two chains."""
    chains = (Chain((1, 2), (said(2, version),)), Chain((1, 9), (Segment.observed((8,)), said(4, version + 1))))
    return Rollout(0, index, chains, "stop", "", Score(1.0))


def test_failed_episodes_are_counted_and_their_group_goes_on() -> None:
    group = Group(0, PROMPT, (talk(0, Score(1.0)), failed(1), talk(2, Score(0.0)), failed(3)))
    found = sampled([SlotResult(group, ())])
    assert (found.errors, found.error_share, found.first_error) == (2, 0.5, "environment: boom")
    assert (found.rollouts, found.reward, found.groups_with_signal) == (4, 0.5, 1)
    assert found.length == (9 + 3 + 9 + 3) / 4 and found.length_max == 9, "observations do not count"
    objective = GroupStages(AlgorithmConfig(), max_tokens=16)
    assert objective.drop_reason(group) is None
    samples = objective.candidates([group])
    assert [s.index for s in samples] == [0, 2] and [s.loss_tokens for s in samples] == [9, 9]
    assert objective.drop_reason(Group(0, PROMPT, (failed(0), failed(1)))) == "errors"


def test_a_failed_greedy_episode_is_an_error() -> None:
    group = Group(0, PROMPT, (talk(0, Score(1.0)), talk(1, Score(0.0))), greedy=failed(-1))
    assert sampled([SlotResult(group, ())]).error_share == 1 / 3


def test_the_age_of_tokens_is_that_of_all_chains_and_of_nothing_that_failed() -> None:
    group = Group(0, PROMPT, (forked(0, version=2), failed(1, version=0)))
    ages = staleness([SlotResult(group, ())], version=4, bound=2)
    assert (ages.oldest, ages.shares) == (2, {1: 4 / 6, 2: 2 / 6})
    assert sampled([SlotResult(group, ())]).length_max == 6


def test_the_parts_of_a_step_add_up() -> None:
    parts = {"wait": 1.0, "annotate": 0.5, "train": 2.0, "hold": 0.25, "update": 0.5, "sync": 0.25}
    found = sampled([SlotResult(Group(0, PROMPT, (talk(0, Score(1.0)),)), ())])
    ages = staleness([], version=1, bound=1)
    made = StepReport(
        1, found, ages, Generation(2.5, 100, 0), Lap(5.0, parts), 0, 0, 1, 1, 0, {"train_tokens": 50.0}, {}
    )
    row = made.row()
    seconds = {key: value for key, value in row.items() if key.endswith("_seconds")}
    assert seconds.pop("step_seconds") == 5.0 and seconds.pop("generate_seconds") == 2.5
    assert sum(seconds.values()) == 5.0 and seconds["other_seconds"] == 0.5
    assert row["trainer_idle"] == 0.4 and row["engine_idle"] == 0.5 and row["train_tokens_per_second"] == 25.0


def test_turns_and_calls_are_counted_without_those_that_the_prompt_shows() -> None:
    call = (ToolCall("add", {}),)
    shown = (Message("assistant", calls=call), Message("tool", "3"), *PROMPT.messages)
    good = replace(
        talk(0, Score(1.0)), transcript=(*shown, Message("assistant", calls=call), Message("assistant", "4"))
    )
    bad = replace(talk(1, Score(0.0)), transcript=(*shown, Message("assistant", "{", problem="no JSON"), *shown[:1]))
    found = sampled([SlotResult(Group(0, PROMPT, (good, bad, failed(2))), ())])
    assert found.talks == Talks(turns=2.0, chains=1.0, calls=1.0, bad_calls=0.5)
    assert found.row()["bad_calls"] == 0.5 and "talks" not in found.row()
    assert sampled([SlotResult(Group(0, PROMPT, (talk(0, Score(1.0)),)), ())]).talks is None
