import subprocess
import sys
from pathlib import Path

import pytest

from kitae.errors import VerifierError
from kitae.types import Score
from kitae.verifiers.base import Verifier
from kitae.verifiers.score_calls import call_score, check_params
from kitae.verifiers.verifier_registry import VERIFIERS, resolve

USER_FILE = """
from dataclasses import dataclass

@dataclass
class Weight:
    of_length: float = 0.5

def length(response, reference, context):
    return Weight().of_length * len(response)

def weighted(response, reference, context, *, weight, bonus=0.0):
    return weight

def nothing():
    return 1.0

NOT_A_FUNCTION = 3
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return path


@pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS)
def test_every_example_scores_1(verifier: Verifier) -> None:
    assert resolve(verifier.name) is verifier
    example = verifier.example_for({})
    if example is None:
        return
    score = call_score(verifier.score, *example, {}, {})
    if verifier.name == "code" and "sandbox" in score.detail:
        pytest.skip(score.detail)
    assert score.value == 1


def test_import_is_cheap() -> None:
    heavy = "{'sympy', 'math_verify', 'torch', 'pydantic'}"
    code = f"import sys, kitae.verifiers.verifier_registry, kitae.verifiers.pool; print({heavy} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_a_worker_for_a_function_of_a_file_imports_no_built_in_check(user_file: Path) -> None:
    code = (
        "import sys; from kitae.verifiers.child_main import load; "
        f"greeting, _ = load({{'name': '{user_file}:length', 'params': {{}}, 'held': {{}}}}); "
        "print(greeting['on_timeout'], 'kitae.verifiers.verifier_registry' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["error", "False"]


def test_function_of_a_file(user_file: Path) -> None:
    verifier = resolve(f"{user_file}:length")
    assert verifier.on_timeout == "error"
    assert call_score(verifier.score, "abcd", None, {}, {}) == Score(2.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exakt", "got 'exakt'; did you mean 'exact'?"),
        ("", "or file.py:function, got ''"),
        ("mine.py", "file.py:function, got 'mine.py'"),
        ("nowhere/mine.py:length", "must exist, got 'nowhere/mine.py'"),
        ("{file}:lenght", "needs a function 'lenght' in {file}; did you mean 'length'?"),
        ("{file}:NOT_A_FUNCTION", "needs a function 'NOT_A_FUNCTION'"),
        ("{file}:", "needs a function ''"),
        ("{file}:nothing", "must take (response), got nothing()"),
    ],
)
def test_bad_names(user_file: Path, name: str, message: str) -> None:
    with pytest.raises(VerifierError) as caught:
        resolve(name.format(file=user_file))
    assert message.format(file=user_file) in str(caught.value)


@pytest.mark.parametrize(("source", "message"), [("import nowhere", "ModuleNotFoundError"), ("def (", "SyntaxError")])
def test_a_file_that_does_not_import(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(VerifierError, match=message):
        resolve(f"{path}:score")


def test_params(user_file: Path) -> None:
    check_params(resolve("number"), {"strict": True, "tolerance": 0.1})
    with pytest.raises(VerifierError, match=r"unexpected keyword argument 'ignorecase'; it takes ignore_case; did you"):
        check_params(resolve("exact"), {"ignorecase": True})
    with pytest.raises(VerifierError, match="it takes none"):
        check_params(resolve(f"{user_file}:length"), {"strict": True})
    weighted = resolve(f"{user_file}:weighted")
    check_params(weighted, {"weight": 2})
    with pytest.raises(VerifierError, match=r"missing a required .*'weight'; it takes weight, bonus; .* are given"):
        check_params(weighted, {})


def test_every_response_scores_nothing_and_no_reference_is_held_against_it() -> None:
    verifier = resolve("none")
    assert verifier.score("42", "42", {}) == verifier.score("", None, {}) == Score(0.0)
    assert not verifier.gold, "references need not score 1"
