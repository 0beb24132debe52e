"""Which answers become rows, and that stages can read them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kitae.data.config import ExamplesConfig
from kitae.data.examples import Shape, open_examples
from kitae.errors import ConfigError
from kitae.offline.answer_selection import KEEPS, Selection
from kitae.types import Chain, FinishReason, Group, Message, Prompt, Rollout, Score, Segment

PROMPT = Prompt("task/3", (Message("system", "Be brief."), Message("user", "Reverse 1, 2")), "2, 1")


def rollout(
    index: int, text: str, score: float | None, finish: FinishReason = "stop", length: int = 1, **more: Any
) -> Rollout:
    segment = Segment("model", (7,) * length, (0.0,) * length, (0,) * length)
    verdict = Score.error("it broke") if score is None else Score(score)
    made = Rollout.of(0, index, (1,), (segment,), finish, text, verdict)
    return Rollout(**{name: getattr(made, name) for name in made.__slots__} | more)


def group(*rollouts: Rollout) -> Group:
    return Group(0, PROMPT, rollouts)


MIXED = group(
    rollout(0, "1, 2", 0.0),
    rollout(1, "2, 1", 1.0),
    rollout(2, "2, 1", 1.0),
    rollout(3, "2; 1", 1.0, length=4),
    rollout(4, "2, 1 and more", 1.0, "length"),
    rollout(5, "boom", None),
    rollout(6, "  ", 0.0),
    rollout(7, "half", 0.5),
)


def answers(rows: list[dict[str, Any]]) -> list[str]:
    return [row["completion"] for row in rows]


def test_the_best_answer_is_the_first_of_those_with_the_highest_score() -> None:
    (row,) = Selection("best").rows(MIXED)
    assert row == {
        "id": "task/3",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Reverse 1, 2"}],
        "completion": "2, 1",
        "score": 1.0,
    }


def test_correct_answers_are_each_there_once() -> None:
    assert answers(Selection("correct").rows(MIXED)) == ["2, 1", "2; 1"]
    assert answers(Selection("correct", truncated=True).rows(MIXED)) == ["2, 1", "2; 1", "2, 1 and more"]
    assert answers(Selection("correct", min_score=0.5).rows(MIXED)) == ["2, 1", "2; 1", "half"]


def test_all_answers_have_a_label_and_what_was_not_judged_has_no_row() -> None:
    rows = Selection("all").rows(MIXED)
    assert answers(rows) == ["1, 2", "2, 1", "2, 1", "2; 1", "2, 1 and more", "half"]
    assert [row["label"] for row in rows] == [False, True, True, True, False, False]


def test_a_pair_is_the_best_and_the_worst_answer() -> None:
    (row,) = Selection("pairs").rows(MIXED)
    assert (row["chosen"], row["rejected"]) == ("2, 1", "1, 2")
    assert (row["margin"], row["score_chosen"], row["score_rejected"]) == (1.0, 1.0, 0.0)


def test_pairs_of_similar_length() -> None:
    made = group(
        rollout(0, "short", 1.0, length=2),
        rollout(1, "a long one", 1.0, length=9),
        rollout(2, "long and wrong", 0.0, length=8),
    )
    assert Selection("pairs").rows(made)[0]["chosen"] == "short"
    assert Selection("pairs", match_lengths=True).rows(made)[0]["chosen"] == "a long one"


@pytest.mark.parametrize(
    ("made", "select"),
    [
        (group(rollout(0, "a", 1.0), rollout(1, "b", 1.0)), Selection("pairs")),
        (group(rollout(0, "a", 1.0), rollout(1, "b", None)), Selection("pairs")),
        (group(rollout(0, "a", 0.6), rollout(1, "b", 0.4)), Selection("pairs", min_margin=0.5)),
        (group(rollout(0, "a", 1.0, "length"), rollout(1, "b", 0.0)), Selection("pairs")),
        (group(rollout(0, "a", None)), Selection("all")),
        (group(rollout(0, "a", 0.9)), Selection("correct")),
        (group(), Selection("best")),
    ],
    ids=["tie", "error", "margin", "cut off", "not judged", "not right", "impossible"],
)
def test_what_leaves_nothing_to_keep(made: Group, select: Selection) -> None:
    assert select.rows(made) == []


SAID = Segment("model", (7,), (0.0,), (0,))
HEARD = Segment.observed((8,))
GAME = (Message("user", "Guess!"), Message("assistant", "1"), Message("user", "Right! Guess my number."))


def test_several_turns_are_kept_as_messages() -> None:
    talk = (*PROMPT.messages, Message("assistant", "2?"), Message("user", "Go on"), Message("assistant", "2, 1"))
    chains = (Chain((1,), (SAID, HEARD, SAID)),)
    made = group(rollout(0, "2?\n\n2, 1", 1.0, transcript=(*talk, Message("user", "Bye")), chains=chains))
    (row,) = Selection("best").rows(made)
    assert [turn["content"] for turn in row["prompt"]] == ["Be brief.", "Reverse 1, 2"]
    assert [turn["content"] for turn in row["completion"]] == ["2?", "Go on", "2, 1"]


def test_the_prompt_is_what_the_model_read_and_not_what_the_data_says() -> None:
    """A game says how it begins, here with an example: its answers are not the model's."""
    chains = (Chain((1,), (SAID, HEARD, SAID)),)
    won = (
        *GAME,
        Message("assistant", "5"),
        Message("user", "Low."),
        Message("assistant", "6"),
        Message("user", "Yes!"),
    )
    lost = (*GAME, Message("assistant", "9"), Message("user", "High."), Message("assistant", "8"))
    made = group(
        rollout(0, "5\n\n6", 1.0, transcript=won, chains=chains),
        rollout(1, "9\n\n8", 0.0, transcript=lost, chains=chains),
    )
    (row,) = Selection("best").rows(made)
    assert [turn["content"] for turn in row["prompt"]] == ["Guess!", "1", "Right! Guess my number."]
    assert [turn["content"] for turn in row["completion"]] == ["5", "Low.", "6"]
    (pair,) = Selection("pairs").rows(made)
    assert pair["prompt"] == row["prompt"] and [turn["content"] for turn in pair["rejected"]] == ["9", "High.", "8"]


def test_of_several_conversations_the_last_answer_is_kept() -> None:
    chains = (Chain((1,), (SAID, HEARD, SAID)), Chain((2,), (SAID,)))
    ways = [(Message("user", f"In short: {word}"), Message("assistant", word)) for word in ("2, 1", "1, 2")]
    good, bad = (
        rollout(n, f"a\n\nb\n\n{way[1].content}", 1.0 - n, transcript=way, chains=chains) for n, way in enumerate(ways)
    )
    (row,) = Selection("best").rows(group(good, bad))
    assert ([turn["content"] for turn in row["prompt"]], row["completion"]) == (["In short: 2, 1"], "2, 1")
    assert Selection("pairs").rows(group(good, bad)) == [], "they answer different questions"


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("shape", ["demonstration", "labelled", "preference"])
def test_stages_can_read_what_serves_them(tmp_path: Path, keep: Any, shape: Shape) -> None:
    select = Selection(keep)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in select.rows(MIXED)))

    def read() -> Any:
        return open_examples(ExamplesConfig(path=str(path)), 0, shape)

    check: Callable[[], Any] = read
    if select.serves(shape):
        assert check().size >= 1
    else:
        with pytest.raises(Exception, match="this stage needs rows with"):
            check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": "worst"}, "keep must be one of best, correct, all, pairs, got 'worst'"),
        ({"keep": "best", "min_margin": 0.1}, "min_margin and match_lengths are for keep = 'pairs', got keep = 'best'"),
        ({"keep": "pairs", "min_margin": -1}, "min_margin must be at least 0, got -1"),
    ],
)
def test_selections_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Selection(**settings)
