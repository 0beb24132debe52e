"""The example that proves a verifier fits its params, so that every choice of them can be used through the pool."""

import asyncio
import datetime
import shutil
from typing import Any

import pytest

from kitae.errors import VerifierError
from kitae.types import Score
from kitae.verifiers.code.languages import LANGUAGES
from kitae.verifiers.pool import VerifierPool
from kitae.verifiers.verifier_registry import VERIFIERS

needs_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs a sandbox")


def through_pool(name: str, params: dict[str, Any], *cases: tuple[str, Any]) -> list[Score]:
    async def body() -> list[Score]:
        async with VerifierPool(name, params, workers=1, timeout=30) as pool:
            return [await pool.score(*case) for case in cases]

    return asyncio.run(body())


@pytest.mark.thorough(keep=1)
@needs_sandbox
@pytest.mark.parametrize(
    ("language", "program", "right", "wrong"),
    [
        ("bash", "bash", "read a b; echo $((a + b))", "echo 4"),
        ("javascript", "node", "const s = require('fs').readFileSync(0, 'utf8').split(' ');\n"
         "console.log(Number(s[0]) + Number(s[1]))", "console.log(4)"),
        ("cpp", "g++", "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }",
         "int main() {}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("composed", [False, True])
def test_code_in_other_languages(language: str, program: str, right: str, wrong: str, composed: bool) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    if composed and language != "bash":
        pytest.skip("one language shows it")
    reference = {"tests": {"kind": "stdio", "cases": [{"stdin": "1 2\n", "stdout": "3\n"}]}}
    name, params = "code", {"language": language}
    if composed:
        name, params = "compose", {"parts": [{"name": "code", "params": params}]}
    fence = f"```{language}\n{{}}\n```"
    scores = through_pool(name, params, (fence.format(right), reference), (fence.format(wrong), reference))
    assert [score.value for score in scores] == [1.0, 0.0]


def test_there_is_an_example_for_every_language() -> None:
    responses = set()
    for language in LANGUAGES:
        found = VERIFIERS["code"].example_for({"language": language})
        assert found is not None
        responses.add(found[0])
    assert len(responses) == len(LANGUAGES)


@pytest.mark.thorough(keep=1)
@needs_sandbox
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"language": "cobol"}, "'cobol'"),
        ({"language": "bash", "time_limit": 1e-9}, "must score its example"),
        ({"language": "bash", "reward": "some"}, "got 'some'"),
    ],
)
def test_code_that_cannot_work_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(VerifierError) as caught:
        through_pool("code", params)
    assert message in str(caught.value)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("letters", ["PQRS", "wxyz", "C"])
def test_choice_with_other_letters(letters: str) -> None:
    last = letters[-1].upper()
    cases = (f"The answer is ({last}).", letters[-1]), ("The answer is (K).", letters[0])
    assert [score.value for score in through_pool("choice", {"letters": letters}, *cases)] == [1.0, 0.0]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("letters", ["", "12", 5])
def test_letters_that_are_none(letters: Any) -> None:
    with pytest.raises(VerifierError, match="verifier 'choice' must score its example"):
        through_pool("choice", {"letters": letters})


def test_params_that_cannot_travel(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text("def score(response, reference, context, **options): return len(options['text'])")
    name = f"{tmp_path / 'mine.py'}:score"
    with pytest.raises(VerifierError, match=r"params of verifier .* must be JSON values, got .*date"):
        through_pool(name, {"day": datetime.date(2024, 1, 1)})
    assert through_pool(name, {"text": "x" * 100_000}, ("", None)) == [Score(100_000.0)]


def test_an_error_or_warning_longer_than_a_message(tmp_path: Any) -> None:
    (tmp_path / "long.py").write_text("raise ValueError('é' * 1_000_000)")
    with pytest.raises(VerifierError, match="ééé"):
        through_pool(f"{tmp_path / 'long.py'}:score", {})
