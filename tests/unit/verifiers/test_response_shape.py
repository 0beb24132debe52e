import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.types import Score
from kitae.verifiers.plain_text import inside_tag
from kitae.verifiers.response_shape import json_schema, language, length, repetition, tags

GOOD = "<think>because</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    "response", [GOOD, f"\n{GOOD}\n", GOOD.replace("\n", ""), "<think>a < b</think><answer>東京</answer>"]
)
def test_tags_right(response: str) -> None:
    assert tags(response, None, {}) == Score(1.0, {"once": 1.0, "order": 1.0, "filled": 1.0, "alone": 1.0})


@pytest.mark.parametrize(
    ("response", "once", "order", "filled", "alone"),
    [
        ("", 0, 0, 0, 0),
        ("just text", 0, 0, 0, 0),
        ("<answer>4</answer>", 0.5, 0, 0.5, 1),
        ("<think>a</think><answer>4", 0.5, 0, 0.5, 0),
        ("<answer>4</answer><think>a</think>", 1, 0, 1, 1),
        ("<think>a<answer>4</answer></think>", 1, 0, 1, 1),
        ("<think>a<answer>4</think></answer>", 1, 0, 1, 1),
        ("<think>a</think><answer> \n</answer>", 1, 1, 0.5, 1),
        ("<think></think><answer></answer>", 1, 1, 0, 1),
        ("<think>a</think>x<answer>4</answer>", 1, 1, 1, 0),
        ("Hi <think>a</think><answer>4</answer>", 1, 1, 1, 0),
        ("<think>a</think><answer>4</answer> bye", 1, 1, 1, 0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0.5, 0, 0.5, 0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.5, 0, 0.5, 0),
        ("</think>a<think><answer>4</answer>", 0.5, 0, 0.5, 0),
        ("<Think>a</Think><answer>4</answer>", 0.5, 0, 0.5, 0),
        ("<think >a</think><answer>4</answer>", 0.5, 0, 0.5, 0),
    ],
)
def test_tags_wrong(response: str, once: float, order: float, filled: float, alone: float) -> None:
    score = tags(response, None, {})
    assert score.value == 0 and score.detail.startswith("wrong: ")
    assert score.components == {"once": once, "order": order, "filled": filled, "alone": alone}
    assert tags(response, None, {}, partial=True).value == (once + order + filled + alone) / 4


@pytest.mark.parametrize(
    ("response", "options", "value"),
    [
        ("because</think><answer>4</answer>", {"prefix": "<think>"}, 1),
        (GOOD, {"prefix": "<think>"}, 0),
        ("Hello <think>a</think> so <answer>4</answer>!", {"outside": True}, 1),
        ("<answer>4</answer>", {"names": "answer"}, 1),
        ("<a>1</a><b>2</b><c-1>3</c-1>", {"names": "a b c-1"}, 1),
        ("<a>1</a><c>2</c><b>3</b>", {"names": "a b c"}, 0),
    ],
)
def test_tags_options(response: str, options: dict[str, Any], value: float) -> None:
    assert tags(response, None, {}, **options).value == value


@pytest.mark.parametrize("names", ["", "  ", "a a", "1", "a b>", "<a>"])
def test_tags_refuses_names(names: str) -> None:
    score = tags(GOOD, None, {}, names=names)
    assert not score.valid and "must be different tag names" in score.detail


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("<a>1</a>", "1"),
        ("<a>1</a><a> 2 </a>", "2"),
        ("<a>1</a><a>2", "1"),
        ("<a><a>2</a>", "2"),
        ("<a>", None),
        ("</a><a>", None),
        ("", None),
        ("<a></a>", ""),
    ],
)
def test_inside_tag(text: str, inside: str | None) -> None:
    assert inside_tag(text, "a") == inside


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "response",
    [
        '{"name": "Ada"}',
        ' {"name": "Ada", "age": 36}\n',
        '```json\n{"name": "Ada"}\n```',
        'Sure!\n```json\n{"name": "Ada"}\n```\nAnything else?',
        '```\n{"name": "Ada"}\n```',
        'Here it is: {"name": "Ada", "age": 3} as you asked.',
        'First {"nome": 1}, better {"name": "Ada"}.',
        'I use {curly} braces [sometimes]. {"name": "Ada"}',
        '{"name": "Ada"}\n\n[1] A footnote.',
        '<think>{"nome": 1}</think>{"name": "Ada"}',
        '```python\nprint({})\n```\n```json\n{"name": "東京 \\u00e9 }{"}\n```',
    ],
)
def test_json_schema_right(response: str) -> None:
    assert json_schema(response, SCHEMA, {}) == Score(1.0, {"parsed": 1.0, "valid": 1.0})
    assert json_schema(response, json.dumps(SCHEMA), {}).value == 1
    assert json_schema(response, "not used", {}, schema=json.dumps(SCHEMA)).value == 1


@pytest.mark.parametrize(
    ("response", "parsed", "detail"),
    [
        ("", 0, "no JSON"),
        ("no braces", 0, "no JSON"),
        ('{"name": "Ada"', 0, "no JSON"),
        ("{'name': 'Ada'}", 0, "no JSON"),
        ('{"name": "Ada",}', 0, "no JSON"),
        ('{"name": NaN}', 0, "no JSON"),
        ('{"age": 3}', 1, "'name' is a required property"),
        ('{"name": 3}', 1, "name: 3 is not of type 'string'"),
        ('{"name": "Ada", "age": -1}', 1, "age: -1 is less than the minimum"),
        ('{"name": "Ada", "x": 1}', 1, "Additional properties"),
        ('{"name": "Ada"} or rather {"age": 3}', 1, "required"),
        ("[]", 1, "is not of type 'object'"),
        ("As said in [1].", 1, "is not of type 'object'"),
        ('<think>{"name": "Ada"}</think>Sorry.', 0, "no JSON"),
        ('<think>{"name": "Ada"}', 0, "no JSON"),
        ("3", 1, "is not of type 'object'"),
    ],
)
def test_json_schema_wrong(response: str, parsed: float, detail: str) -> None:
    score = json_schema(response, SCHEMA, {})
    assert score.value == 0 and score.valid and detail in score.detail
    assert score.components == {"parsed": parsed, "valid": 0.0}


def test_json_schema_strict_takes_nothing_but_json() -> None:
    assert json_schema('{"name": "Ada"}', SCHEMA, {}, strict=True).value == 1
    assert json_schema('```json\n{"name": "Ada"}\n```', SCHEMA, {}, strict=True).value == 0
    assert json_schema('So {"name": "Ada"}', SCHEMA, {}, strict=True).value == 0


@pytest.mark.parametrize(
    ("response", "schema", "value"),
    [
        ("42", {"type": "integer"}, 1),
        ("42.5", {"type": "integer"}, 0),
        ("true", {"type": "integer"}, 0),
        ("[1, 2]", {"type": "array", "items": {"type": "integer"}, "minItems": 2}, 1),
        ("[1, 1]", {"type": "array", "uniqueItems": True}, 0),
        ('"red"', {"enum": ["red", "green"]}, 1),
        ('{"a": 1}', {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, 1),
        ('{"a": {"b": 1}}', {"$defs": {"n": {"type": "object"}}, "properties": {"a": {"$ref": "#/$defs/n"}}}, 1),
        ('{"a": 1}', {"$schema": "http://json-schema.org/draft-07/schema#", "required": ["b"]}, 0),
        ("{}", True, 1),
        ("{}", False, 0),
        ("{}", {}, 1),
    ],
)
def test_json_schema_keywords(response: str, schema: Any, value: float) -> None:
    assert json_schema(response, schema, {}).value == value


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "must be JSON"),
        ("3", "must be a JSON object, got '3'"),
        (None, "must be a JSON object"),
        ({"type": "objekt"}, "must be valid"),
        ({"$ref": "http://localhost:1/nowhere.json"}, "cannot be applied"),
    ],
)
def test_json_schema_refuses_a_schema_that_is_none(schema: Any, message: str) -> None:
    score = json_schema("{}", schema, {})
    assert not score.valid and message in score.detail


def test_json_schema_says_how_to_install_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema.exceptions", None)
    assert "pip install jsonschema" in json_schema("{}", {"title": "not in the cache"}, {}).detail


@pytest.mark.parametrize(
    ("words", "options", "value"),
    [
        (0, {}, 1),
        (1000, {}, 1),
        (1500, {}, 0.5),
        (2000, {}, 0),
        (5000, {}, 0),
        (10, {"at_most": 10}, 1),
        (12, {"at_most": 10, "limit": 14}, 0.5),
        (11, {"at_most": 10, "limit": 14, "shape": "cosine"}, (1 + math.cos(math.pi / 4)) / 2),
        (12, {"at_most": 10, "limit": 14, "shape": "cosine"}, 0.5),
        (14, {"at_most": 10, "limit": 14, "shape": "cosine"}, 0),
        (5, {"at_least": 10}, 0.5),
        (0, {"at_least": 10}, 0),
        (10, {"at_least": 10}, 1),
        (1, {"at_most": 0, "limit": 2}, 0.5),
    ],
)
def test_length(words: int, options: dict[str, Any], value: float) -> None:
    score = length("word " * words, None, {}, **options)
    assert score.value == pytest.approx(value) and score.components == {"length": words}


@pytest.mark.parametrize(
    ("text", "unit", "size"),
    [("a b", "chars", 3), ("two words", "words", 2), ("東京タワー", "words", 5), ("", "words", 0)],
)
def test_length_units(text: str, unit: Any, size: float) -> None:
    assert length(text, None, {}, unit=unit).components == {"length": size}


def test_length_in_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert length("a b!\ud800", None, {}, unit="tokens", tokenizer=str(path)).components["length"] >= 3
    missing = length("a b", None, {}, unit="tokens", tokenizer=str(tmp_path / "none.json"))
    assert not missing.valid and "must be a tokenizer.json or its folder" in missing.detail


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at_most": 10, "limit": 10}, "got 0, 10 and 10"),
        ({"at_most": 10, "at_least": 11}, "must hold, got 11, 10 and 20"),
        ({"at_most": 0}, "must hold"),
        ({"shape": "round"}, "shape must be 'linear' or 'cosine', got 'round'"),
        ({"unit": "lines"}, "unit must be 'words', 'chars' or 'tokens', got 'lines'"),
    ],
)
def test_length_refuses_options(options: dict[str, Any], message: str) -> None:
    score = length("a", None, {}, **options)
    assert not score.valid and message in score.detail


@pytest.mark.parametrize(
    ("text", "options", "value"),
    [
        ("", {}, 1),
        ("one two three", {}, 1),
        ("the quick brown fox jumps over the lazy dog", {}, 1),
        ("a b c d a b c d", {}, 4 / 5),
        ("A B C D a b c d", {}, 4 / 5),
        ("a a a a a", {"n": 1}, 1 / 5),
        ("a a a a a", {"n": 2}, 1 / 4),
        ("a b c d a b c d", {"allowed": 0.2}, 1),
        ("a b c d a b c d", {"allowed": 0.1}, 1 - 0.1 / 0.9),
        ("哈哈哈哈哈哈哈哈", {}, 1 / 5),
        ("x" * 43, {}, 1 / 40),
    ],
)
def test_repetition(text: str, options: dict[str, Any], value: float) -> None:
    score = repetition(text, None, {}, **options)
    assert score.value == pytest.approx(value)


@pytest.mark.parametrize("options", [{"n": 0}, {"allowed": 1}, {"allowed": -0.1}])
def test_repetition_refuses_options(options: dict[str, Any]) -> None:
    assert not repetition("a", None, {}, **options).valid


@pytest.mark.parametrize(
    ("text", "options", "value"),
    [
        ("hello", {}, 1),
        ("héllo wörld ñ", {}, 1),
        ("привет", {}, 0),
        ("abпр", {}, 0.5),
        ("привет", {"script": "cyrillic"}, 1),
        ("東京タワーはここ", {"script": "cjk hiragana katakana"}, 1),
        ("안녕", {"script": "Hangul"}, 1),
        ("שלום", {"script": "hebrew"}, 1),
        ("नमस्ते", {"script": "devanagari"}, 1),
        ("ﾊﾛｰ", {"script": "katakana"}, 1),
        ("12 + 3 = 15", {"script": "cyrillic"}, 1),
        ("", {"script": "cyrillic"}, 1),
        ("привет `code here` and $x + y$", {"script": "cyrillic"}, 6 / 9),
        ("привет\n```python\nprint('hello')\n```", {"script": "cyrillic"}, 1),
        ("<think>привет</think> https://example.org/a/b", {"script": "cyrillic"}, 1),
        ("abпр", {"threshold": 0.5}, 1),
        ("abпр", {"threshold": 0.6}, 0),
    ],
)
def test_language_by_script(text: str, options: dict[str, Any], value: float) -> None:
    assert language(text, None, {}, **options).value == pytest.approx(value)


def test_language_by_guess() -> None:
    pytest.importorskip("langdetect")
    german = "Das ist ein ganz gewöhnlicher deutscher Satz mit vielen Wörtern."
    assert language(german, None, {}, language="de").value > 0.99
    assert language(german, None, {}, language="en").value < 0.01
    assert language(german, None, {}, language="de") == language(german, None, {}, language="de")
    assert language("kurz", None, {}, language="de").components == {"script": 1.0}


def test_language_says_how_to_install_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    assert "pip install langdetect" in language("long enough to be guessed at", None, {}, language="en").detail


@pytest.mark.parametrize("options", [{"script": ""}, {"threshold": 2}])
def test_language_refuses_options(options: dict[str, Any]) -> None:
    assert not language("a", None, {}, **options).valid


_TEXT = st.text() | st.text('<>/thinkanswer{}[]":,0 `\n$') | st.text(st.characters(categories=["Cs", "Lo", "Mn"]))


@settings(max_examples=300, deadline=None)
@given(response=_TEXT, flag=st.booleans())
def test_never_raises(response: str, flag: bool) -> None:
    for score in (
        tags(response, None, {}, partial=flag, outside=flag),
        json_schema(response, SCHEMA, {}, strict=flag),
        length(response, None, {}, at_most=3, shape="cosine" if flag else "linear"),
        repetition(response, None, {}, n=2),
        language(response, None, {}, script="cjk" if flag else "latin"),
    ):
        assert score.valid and 0 <= score.value <= 1
    json_schema("{}", response, {})


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    "unit",
    ["[", "[1,", '{"a":', '["', "```\n", "<think>", "a ", "a", "$", "`", "漢", "\x00", "{} ", "[1,1,1,1,1,1,1,1,"],
)
def test_time_is_bounded(unit: str) -> None:
    response = unit * (100_000 // len(unit))
    start = time.process_time()
    json_schema(response, SCHEMA, {})
    for verifier in (tags, length, repetition, language):
        verifier(response, None, {})
    assert time.process_time() - start < 20
