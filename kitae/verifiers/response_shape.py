r"""Verifiers of the form of a response: its tags, JSON, length, repetition and language.

Each gives 1 to a response that is as required and less the further it deviates, so a penalty is a positive weight in a
composition. Only some use the reference, as their docstrings say. None of them checks whether the answer is right.
"""

import json
import math
import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from kitae.types import Score
from kitae.verifiers.bounded_schema import TooMuchToCheck, bounded, limited_work
from kitae.verifiers.plain_text import after_thought
from kitae.verifiers.visible_text import has_content, said_words, visible

_TAG_NAME_RE = re.compile(r"[A-Za-z_][\w.-]*")
_FENCE_RE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_OPENING_RE = re.compile(r"[{\[]")
_JSON_EFFORT = 4_000_000  # characters to read in the search for JSON, because nested brackets would make it quadratic
_NOT_PROSE_RE = re.compile(r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|https?://\S+|</?[A-Za-z_]\w*>", re.DOTALL)
_TAG_RE = re.compile(r"</?[A-Za-z]\w{0,30}>")
_COMMAND_RE = re.compile(r"\\[A-Za-z]+|^`{1,3}\w*\n")
_SENTENCE_RE = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)?(?:[ \t,.;:!?'’-]+[^\W\d_]+){4,}")  # five words or more
_FOREIGN_RE = re.compile(r"[^\W\d_a-zA-Z\u00c0-\u024f\u0370-\u03ff]+")  # in letters that code and formulas do not use
_FEW_LETTERS = 20  # with fewer, a guess of the language is unreliable


def tags(
    response: str,
    reference: Any,
    context: Mapping[str, Any],
    *,
    names: str = "think answer",
    partial: bool = False,
    outside: bool = False,
    prefix: str = "",
) -> Score:
    """1 where the response is `<think>…</think><answer>…</answer>`: each tag once, in order, filled, and nothing else.

    `names` are the tags in their order. With `partial` the value is the mean of the components: once (share of tags
    opened and closed exactly once), order (0 or 1, where all are there once), filled (share with text inside) and
    alone (no text outside). `outside` allows text around the tags. `prefix` is what the chat template has already
    written of the response, such as "<think>". Tags have no attributes; upper and lower case differ. What cannot be
    seen is no text, be it spaces without width, entities or empty markup.
    """
    wanted = names.split()
    if not wanted or len(set(wanted)) < len(wanted) or not all(map(_TAG_NAME_RE.fullmatch, wanted)):
        return Score.error(f"names must be different tag names separated by spaces, got {names!r}")
    text = prefix + response
    spans = {name: _span(text, name) for name in wanted}
    found = [span for span in spans.values() if span is not None]
    borders = [position for span in found for position in span]
    filled = [span for span in found if has_content(text[span[1] : span[2]])]
    ordered = len(found) == len(wanted) and borders == sorted(borders)
    alone = outside or not visible(_around(text, found)).strip()
    components = {
        "once": len(found) / len(wanted),
        "order": float(ordered),
        "filled": len(filled) / len(wanted),
        "alone": float(alone and bool(found)),
    }
    value = sum(components.values()) / len(components)
    wrong = ", ".join(name for name, component in components.items() if component < 1)
    return Score(value if partial else float(value == 1), components, detail=f"wrong: {wrong}" if wrong else "")


def json_schema(
    response: str, reference: Any, context: Mapping[str, Any], *, schema: str = "", strict: bool = False
) -> Score:
    """1 where the JSON in the response fits the schema: the option, or else the reference (a mapping or JSON text).

    The JSON is all that comes after `</think>`, or the last fenced block that parses, or the last object or array in
    the prose, but a footnote mark such as [1]; with `strict` it must be the whole response. Standard JSON only: no NaN,
    comments or trailing commas. Components: parsed and valid. Every draft that `jsonschema` knows is checked, 2020-12
    where the schema names none; `format` is not asserted and references to other documents are not fetched, but are an
    error.
    """
    loaded = _schema(schema or (reference if isinstance(reference, str) else json.dumps(reference)))
    if isinstance(loaded, str):
        return Score.error(loaded)
    found = _whole_json(response) if strict else _find_json(after_thought(response))
    if found is None:
        return Score(0.0, {"parsed": 0.0, "valid": 0.0}, detail="no JSON in the response")
    try:
        with limited_work():
            problem = next(iter(loaded.iter_errors(found[0])), None)
    except RecursionError:
        return Score(0.0, {"parsed": 1.0, "valid": 0.0}, detail="the JSON is nested too deeply")
    except TooMuchToCheck as error:
        return Score(0.0, {"parsed": 1.0, "valid": 0.0}, detail=f"the JSON takes too long to check: {error}")
    except Exception as error:  # jsonschema has no common base for references that lead nowhere
        return Score.error(f"the schema of 'json_schema' cannot be applied: {type(error).__name__}: {error}")
    if problem is not None:
        where = "/".join(map(str, problem.absolute_path)) or "the whole"
        return Score(0.0, {"parsed": 1.0, "valid": 0.0}, detail=f"{where}: {problem.message}"[:500])
    return Score(1.0, {"parsed": 1.0, "valid": 1.0})


def length(
    response: str,
    reference: Any,
    context: Mapping[str, Any],
    *,
    at_most: int = 1000,
    limit: int = 0,
    at_least: int = 0,
    unit: Literal["words", "chars", "tokens"] = "words",
    shape: Literal["linear", "cosine"] = "linear",
    tokenizer: str = "",
) -> Score:
    """1 from `at_least` to `at_most` units; falling to 0 at `limit` (by default twice `at_most`) and towards 0 units.

    `shape` says how: along a line, or along half a cosine, which is gentle at both ends. Only what can be seen
    counts. Words have a letter or a digit and stand between spaces (more than four joined by other signs are
    several), and single characters of scripts without spaces are words. Several spaces are one character. Tokens
    are those of `tokenizer`: a tokenizer.json or the folder that holds one. The component is the length itself.
    """
    end = limit or 2 * at_most
    if not (0 <= at_least <= at_most < end):
        return Score.error(f"0 <= at_least <= at_most < limit must hold, got {at_least}, {at_most} and {end}")
    if shape not in ("linear", "cosine"):
        return Score.error(f"shape must be 'linear' or 'cosine', got {shape!r}")
    if unit not in ("words", "chars", "tokens"):
        return Score.error(f"unit must be 'words', 'chars' or 'tokens', got {unit!r}")
    try:
        size = _size(response, unit, tokenizer)
    except Exception as error:  # the library of tokenizers raises bare Exceptions
        return Score.error(f"tokenizer must be a tokenizer.json or its folder, got {tokenizer!r}: {error}")
    short, long = max(0, at_least - size), max(0, size - at_most)
    excess = short / at_least if short else min(1.0, long / (end - at_most))
    value = 1 - excess if shape == "linear" else (1 + math.cos(math.pi * excess)) / 2
    return Score(value, {"length": float(size)}, detail="" if value == 1 else f"{size} {unit}")


def repetition(response: str, reference: Any, context: Mapping[str, Any], *, n: int = 4, allowed: float = 0.0) -> Score:
    """1 less the share of word n-grams that the response has already said before; up to `allowed` is free.

    Words are lower-cased and without markup, accents and the marks around them; in scripts without spaces, and in
    "words" of more than 32 letters, each character is one. A response too short for two n-grams repeats nothing.
    The component is the share.
    """
    if n < 1 or not 0 <= allowed < 1:
        return Score.error(f"n must be at least 1 and allowed from 0 to below 1, got {n} and {allowed}")
    words = said_words(visible(_TAG_RE.sub(" ", response)).casefold())
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    share = 1 - len(set(grams)) / len(grams) if grams else 0.0
    return Score(1 - max(0.0, share - allowed) / (1 - allowed), {"repeated": share})


def language(
    response: str,
    reference: Any,
    context: Mapping[str, Any],
    *,
    script: str = "latin",
    language: str = "",
    threshold: float = 0.0,
) -> Score:
    """The share of letters that are in the expected script; with `language`, times how likely it is that.

    `script` is the first word of a character's Unicode name: latin, cyrillic, greek, arabic, hebrew, devanagari,
    cjk, hiragana, katakana, hangul, thai …; several separated by spaces. `language` ("de", "zh-cn") is guessed by
    the optional `langdetect` where there are at least 20 letters. With a `threshold` the value is 1 from there on
    and 0 below. Code in backticks, formulas in $…$, links and tags do not count, but letters of other scripts than
    Latin and Greek count everywhere, and so does what is prose rather than code. A response without letters scores
    1.
    """
    expected = frozenset(script.upper().split())
    if not expected or not 0 <= threshold <= 1:
        return Score.error(f"script must name one and threshold be from 0 to 1, got {script!r} and {threshold}")
    prose = _NOT_PROSE_RE.sub(_prose_within, visible(response))
    letters = [c for c in prose if c.isalpha()]
    share = sum(_script(c) in expected for c in letters) / len(letters) if letters else 1.0
    components = {"script": share}
    if language and len(letters) >= _FEW_LETTERS:
        likely = _likelihood(_encodable(prose), language)
        if likely is None:
            return Score.error("the option language of 'language' needs langdetect: pip install langdetect")
        components["language"] = likely
        share *= likely
    return Score(float(share >= threshold) if threshold else share, components)


def _prose_within(match: re.Match[str]) -> str:
    """What is prose of code, a formula or a link: what is in other letters, and all if most of it is sentences."""
    inside = _COMMAND_RE.sub(" ", match[0])
    sentences = " ".join(_SENTENCE_RE.findall(inside))
    if 2 * len(sentences) > len(inside.strip()):
        return f" {inside} "
    return f" {' '.join(_FOREIGN_RE.findall(inside))} "


def _span(text: str, name: str) -> tuple[int, int, int, int] | None:
    """The positions where a tag opens, its contents begin and end, and it closes; None if it does not occur once."""
    opening, closing = f"<{name}>", f"</{name}>"
    start, end = text.find(opening), text.find(closing)
    if text.count(opening) != 1 or text.count(closing) != 1 or end < start:
        return None
    return start, start + len(opening), end, end + len(closing)


def _around(text: str, spans: list[tuple[int, int, int, int]]) -> str:
    rest, position = "", 0
    for start, _, _, end in sorted(spans):
        rest += text[position:start]
        position = max(position, end)
    return rest + text[position:]


@lru_cache(maxsize=64)
def _schema(text: str) -> Any:
    """A validator of the schema, or what is wrong with it."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"the schema of 'json_schema' must be JSON, got {text[:100]!r}: {error}"
    if not isinstance(schema, dict | bool):
        return f"the schema of 'json_schema' must be a JSON object, got {text[:100]!r}"
    try:
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import Draft202012Validator, validator_for
        from referencing import Registry
    except ImportError:
        return "the verifier 'json_schema' needs jsonschema: pip install jsonschema"
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        return f"the schema of 'json_schema' must be valid: {error.message}"[:500]
    return bounded(kind)(schema, registry=Registry())  # an empty registry: nothing is fetched from the network


def _find_json(text: str) -> tuple[Any] | None:
    whole = _whole_json(text)
    if whole is not None:
        return whole
    for block in reversed(_FENCE_RE.findall(text)):
        fenced = _whole_json(block)
        if fenced is not None:
            return fenced
    return _last_json(text)


def _whole_json(text: str) -> tuple[Any] | None:
    try:
        return (_DECODER.decode(text),)
    except (ValueError, RecursionError):
        return None


def _last_json(text: str) -> tuple[Any] | None:
    """The last object or array in a text that is not within another; one like [1] only if there is no other."""
    last: tuple[Any] | None = None
    footnote: tuple[Any] | None = None
    position, effort = 0, 0
    while effort < _JSON_EFFORT and (opening := _OPENING_RE.search(text, position)):
        start = opening.start()
        try:
            value, position = _DECODER.raw_decode(text, start)
            if type(value) is list and len(value) == 1 and type(value[0]) is int:
                footnote = (value,)
            else:
                last = (value,)
        except json.JSONDecodeError as error:
            position = start + 1
            effort += 1 + error.pos - start + error.pos // 16  # the exception counts the lines before it
        except (ValueError, RecursionError):  # a constant such as NaN, too many digits, too many brackets
            position = start + 1
            effort += 10_000
    return last or footnote


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _finite(literal: str) -> float:
    value = float(literal)
    return value if math.isfinite(value) else _refuse(literal)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _refuse("an object that has a name twice")


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_mapping)


def _size(text: str, unit: str, tokenizer: str) -> int:
    if unit == "tokens":
        return len(_tokenizer(tokenizer).encode(_encodable(text), add_special_tokens=False).ids)
    return len(said_words(text)) if unit == "words" else len(" ".join(visible(text).split()))


@lru_cache(maxsize=4)
def _tokenizer(path: str) -> Any:
    from tokenizers import Tokenizer

    file = Path(path).expanduser()
    return Tokenizer.from_file(str(file / "tokenizer.json" if file.is_dir() else file))


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates have no UTF-8


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0].partition("-")[0]


def _likelihood(text: str, language: str) -> float | None:
    """The probability that `langdetect` gives to the language; None if it is not installed."""
    try:
        from langdetect import DetectorFactory, LangDetectException, detect_langs
    except ImportError:
        return None
    DetectorFactory.seed = 0  # it is random, and the same text must get the same score
    try:
        guesses = detect_langs(text[:20_000])
    except LangDetectException:  # no features in the text
        return 0.0
    return float(sum(guess.prob for guess in guesses if guess.lang == language))
