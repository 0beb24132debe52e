"""What cannot be seen is nothing, wherever the shape of a response is judged."""

import json
import time

import pytest

from kitae.verifiers.instructions.instruction_verifier import instructions
from kitae.verifiers.plain_text import final_number
from kitae.verifiers.response_shape import json_schema, language, length, repetition, tags
from kitae.verifiers.visible_text import has_content, said_words, visible

UNSEEN = (
    "\u200b",
    "\u2060",
    "\ufeff",
    "\u00ad",
    "\u2800",
    "\u3164",
    "\ufe0f",
    "\U000e0020",
    "\u202e",
    "\u0301",
    "\x00",
    "\x08",
)


@pytest.mark.parametrize("unseen", UNSEEN)
def test_the_unseen_is_nothing(unseen: str) -> None:
    assert visible(f"a{unseen}") in ("a", "á") and not has_content(unseen)
    assert tags(f"<think>{unseen}</think><answer>4</answer>", None, {}).value == 0
    assert length(f"{unseen} " * 50, None, {}, at_least=10).components["length"] == 0
    assert length(unseen.join(["word"] * 100), None, {}, unit="chars").components["length"] == pytest.approx(
        400, abs=99
    )
    no_comma = {"instructions": [{"id": "punctuation:no_comma", "kwargs": {}}]}
    assert instructions(unseen, no_comma, {}).value == 0
    assert final_number(f"It is 1{unseen}2.") is None or unseen == "\u0301"


def test_joined_words_are_words() -> None:
    assert said_words("a well-known, state-of-the-art text") == ["a", "well-known", "state-of-the-art", "text"]
    assert len(said_words("_".join(["word"] * 100))) == len(said_words("".join(["Word"] * 100))) == 100
    assert repetition(" ".join(f"the{sign} dog ran off" for sign in ".,;:!?" * 5), None, {}).value < 0.5


@pytest.mark.parametrize(
    "frame", ["```\n{}\n```", "`{}`", "${}$", "https://{}", "$\\text{{{}}}$", "```python\n# {}\n```"]
)
def test_prose_cannot_hide_from_the_language(frame: str) -> None:
    assert language(frame.format("今天天气很好我们一起去公园散步吧"), None, {}).value < 0.5
    assert language("Plain words, `code` and $x^2$.", None, {}).value == 1


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ('{"a": 1, "a": 2}', {"type": "object"}),
        ("[1e999]", {"type": "array"}),
        ('{"a": "ann\\n"}', {"properties": {"a": {"pattern": "^[a-z]+$"}}}),
        ('{"ann\\n": 1}', {"patternProperties": {"^ann$": True}, "additionalProperties": False}),
        ("[1, 1.0]", {"uniqueItems": True}),
        (json.dumps("a" * 40 + "!"), {"pattern": "^(a+)+$"}),
    ],
)
def test_json_that_does_not_fit(text: str, schema: dict[str, object]) -> None:
    score = json_schema(text, schema, {})
    assert score.value == 0 and score.valid


def test_schemas_cost_little() -> None:
    start = time.process_time()
    assert json_schema(json.dumps([{"a": i} for i in range(4_000)]), {"uniqueItems": True}, {}).value == 1
    deep = {"anyOf": [{"items": {"$ref": "#"}, "minItems": 1}, {"items": {"$ref": "#"}, "minItems": 2}]}
    assert json_schema("[" * 60 + "1" + "]" * 60, deep, {}).valid
    assert time.process_time() - start < 20
