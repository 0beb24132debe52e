r"""A verifier of your own: does the answer hold the right fields as JSON, and nothing else?

Data, one JSON object per line. The reference is itself a JSON text, so that it would score 1 as an answer; Kitae
checks that before it trains:

    {"question": "Ada Byron was born in London in 1815.", "answer": "{\"name\": \"Ada Byron\", \"born\": 1815}"}

Recipe (people.toml); paths are relative to the folder in which `kitae` is called:

    [data]
    path = "people.jsonl"
    eval_path = "people_test.jsonl"
    instruction = "Give the name and the year of birth as JSON with the keys name and born.\n{question}"

    [verifier]
    name = "examples/custom_verifier.py:score"
    params = { max_chars = 200 }

Check it with `kitae train people.toml --dry-run`, then train without `--dry-run`. Any recipe takes it from the command
line too: `verifier.name=examples/custom_verifier.py:score verifier.params.max_chars=200`.

A score function runs in a worker process that is killed after `verifier.timeout` seconds. It may raise: the answer is
then counted as an error and left out of training. A wrong answer is not an error: return 0 for it.
"""

import json
from collections.abc import Mapping
from typing import Any

from kitae.types import Score


def score(response: str, reference: Any, context: Mapping[str, Any], *, max_chars: int = 400) -> Score:
    """The share of fields that are right; keys that are missing and keys too many both count against it.

    `context` holds the other columns of the data row; this function needs none. Components are averaged into
    metrics.jsonl as `reward/format` and `reward/fields`.
    """
    wanted = _read_object(str(reference))
    if wanted is None:  # bad data, and not the model's fault
        return Score.error(f"the reference must be a JSON object with at least one key, got {str(reference)[:80]!r}")
    if len(response) > max_chars:
        return _wrong(f"longer than {max_chars} characters")
    got = _read_object(response)
    if got is None:
        return _wrong("not a JSON object")
    keys = wanted.keys() | got.keys()
    wrong = sorted(key for key in keys if not (key in wanted and key in got and _same(wanted[key], got[key])))
    share = (len(keys) - len(wrong)) / len(keys)
    return Score(share, {"format": 1.0, "fields": share}, detail=f"wrong: {', '.join(wrong)}" if wrong else "")


def _wrong(reason: str) -> Score:
    return Score(0.0, {"format": 0.0, "fields": 0.0}, detail=reason)


def _read_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text consists of, with or without a Markdown fence around it."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text.strip("`").removeprefix("json")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: thousands of opening brackets
        return None
    return found if isinstance(found, dict) and found else None


def _same(want: Any, got: Any) -> bool:
    """Equal values; text without regard to case and outer spaces, and `true` is not the number 1."""
    if isinstance(want, str) and isinstance(got, str):
        return want.strip().casefold() == got.strip().casefold()
    return isinstance(want, bool) == isinstance(got, bool) and bool(want == got)
