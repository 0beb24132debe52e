"""Verifiers by name: the built-in ones, and any function in a file of the user's own.

Importing this module is cheap: what a verifier needs (sympy, for one) is imported by its first check.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kitae.errors import ConfigError, VerifierError
from kitae.plugins import is_plugin, nearest
from kitae.types import Score
from kitae.verifiers.base import ScoredPair, Verifier, user_verifier, verifier_of
from kitae.verifiers.code.code_verifier import code
from kitae.verifiers.code.executor import remote_code
from kitae.verifiers.compose import Composition
from kitae.verifiers.given_functions import check_given, is_given, load_given
from kitae.verifiers.gym_scores import gym
from kitae.verifiers.instructions.instruction_verifier import instructions
from kitae.verifiers.judge import judge, judge_pairs, reward_model
from kitae.verifiers.math import math
from kitae.verifiers.plain_text import choice, exact, f1, normalised, number, regex
from kitae.verifiers.puzzle_checks import countdown, knights_knaves
from kitae.verifiers.response_shape import json_schema, language, length, repetition, tags
from kitae.verifiers.reward_model_verifier import prepare as prepare_reward
from kitae.verifiers.reward_styles import openrlhf, prepare_openrlhf, prepare_trl, prepare_verl, trl, verl
from kitae.verifiers.score_calls import check_params

_PYTHON = (
    "```python\ndef double(x):\n    return 2 * x\n```",
    {"tests": {"kind": "asserts", "asserts": ["assert double(4) == 8"], "setup": ""}},
)
_PRINTS_1 = {
    "bash": "echo 1",
    "javascript": "console.log(1)",
    "ruby": "puts 1",
    "perl": "print 1",
    "php": "<?php echo 1;",
    "lua": "print(1)",
    "c": '#include <stdio.h>\nint main(void) { puts("1"); return 0; }',
    "cpp": "#include <iostream>\nint main() { std::cout << 1; }",
    "java": "public class Main { public static void main(String[] args) { System.out.println(1); } }",
    "go": 'package main\nimport "fmt"\nfunc main() { fmt.Println(1) }',
    "rust": 'fn main() { println!("1"); }',
}
_PUZZLE = {"numbers": [3, 7, 25], "target": 46}
_FOLLOWED = (  # two of these load a language detector and one a table of verbs, both of which are large
    "use the plain words of the english language",
    {
        "instructions": [
            {"id": "language:response_language", "kwargs": {"language": "en"}},
            {"id": "change_case:english_lowercase", "kwargs": {}},
            {"id": "words:start_verb", "kwargs": {}},
            {"id": "punctuation:no_comma", "kwargs": {}},
        ]
    },
)


def nothing(response: str, reference: Any, context: Any) -> Score:
    """0 for every response, for runs that do not learn from rewards."""
    return Score(0.0)


def _program(language: str = "python", **_: Any) -> ScoredPair:
    if language not in _PRINTS_1:
        return _PYTHON
    tests = {"kind": "stdio", "cases": [{"stdin": "", "stdout": "1"}]}
    return f"```{language}\n{_PRINTS_1[language]}\n```", {"tests": tests}


def _choice(letters: str = "ABCD", **_: Any) -> ScoredPair:
    letter = str(letters)[-1:].upper()
    return f"The answer is ({letter}).", letter


def resolve(name: str) -> Verifier:
    """The verifier called `name`: a key of `VERIFIERS`, `path/to/file.py:function`, or a function given from Python.

    This executes the user's file, so call it only in a worker process of the pool or another process that may do so.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]
    if is_given(name):
        return verifier_of(name, load_given(name))
    if not is_plugin(name):
        hint = nearest(name, VERIFIERS)
        raise VerifierError(f"a verifier is one of {', '.join(VERIFIERS)} or file.py:function, got {name!r}{hint}")
    return user_verifier(name)


def check_named(name: str, params: Mapping[str, Any]) -> None:
    """Whether there is such a verifier and it takes these params, as far as that is known without executing a file of
    the user's: that is left to a worker process."""
    check_given(name, params)
    if is_given(name):
        return
    if ":" not in name:
        check_params(resolve(name), params)
    elif not Path(name.rpartition(":")[0]).expanduser().is_file():
        raise ConfigError(f"verifier.name must be a known name or file.py:function, got {name!r}: no such file")


_composition = Composition(resolve)

VERIFIERS: dict[str, Verifier] = {
    verifier.name: verifier
    for verifier in (
        Verifier("exact", exact, "wrong", ("56, 34, 12\n", "56, 34, 12"), repeatable=True),
        Verifier("normalised", normalised, "wrong", ("The Eiffel Tower.", "eiffel tower"), repeatable=True),
        Verifier("number", number, "wrong", ("$1,234.00", "1234"), repeatable=True),
        Verifier("math", math, "wrong", (r"So it is $\boxed{\int_0^1 x\,dx}$.", "1/2"), repeatable=True),
        Verifier("code", code, "error", _program, gold=False),
        Verifier("remote_code", remote_code, "error", gold=False),
        Verifier("f1", f1, "wrong", ("the cat sat", "A cat sat."), repeatable=True),
        Verifier("regex", regex, "wrong", ("Order 66", "[0-9]+"), gold=False, repeatable=True),
        Verifier("choice", choice, "wrong", _choice, repeatable=True),
        Verifier("json_schema", json_schema, "wrong", ('So: {"age": 36}', '{"required": ["age"]}'), gold=False),
        Verifier("instructions", instructions, "wrong", _FOLLOWED, gold=False, repeatable=True),
        Verifier("tags", tags, "wrong", ("<think>2 + 2</think><answer>4</answer>", ""), gold=False, repeatable=True),
        Verifier("length", length, "wrong", ("short", ""), gold=False, repeatable=True),
        Verifier("repetition", repetition, "wrong", ("no word comes twice here", ""), gold=False, repeatable=True),
        Verifier("language", language, "wrong", ("plain words in the English language", ""), gold=False),
        Verifier(
            "knights_knaves",
            knights_knaves,
            "wrong",
            ("Alice is a knight, Bob is a knave.", {"Alice": "knight", "Bob": "knave"}),
            repeatable=True,
        ),
        Verifier("countdown", countdown, "wrong", ("25 + 3 × 7 = 46", _PUZZLE), repeatable=True),
        Verifier("gym", gym, "wrong"),
        Verifier("none", nothing, "wrong", gold=False, repeatable=True),
        Verifier("judge", judge, "error", gold=False),
        Verifier("judge_pairs", judge_pairs, "error", gold=False, batched=True, right_is_one=False),
        Verifier("reward_model", reward_model, "error", gold=False, prepare=prepare_reward, right_is_one=False),
        Verifier("trl", trl, "error", gold=False, prepare=prepare_trl, right_is_one=False),
        Verifier("verl", verl, "error", gold=False, prepare=prepare_verl, right_is_one=False),
        Verifier("openrlhf", openrlhf, "error", gold=False, prepare=prepare_openrlhf, right_is_one=False),
        Verifier("compose", _composition, "error", gold=False, prepare=_composition.prepare),
    )
}
