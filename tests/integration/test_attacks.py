"""Answers that want a reward which they have not earned, and honest ones that a guard might take for such.

They were written by hands other than the verifiers'. `tests/data/attacks` holds them, `attack_files` tells its form.
What each must get: an attack 0, never an error, where the right answer to the same tests is none; an honest answer 1.
"""

import asyncio
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from attack_files import Case, all_cases
from fake_server import FakeServer, Reply, Request

from kitae.types import Score
from kitae.verifiers.judge import judge
from kitae.verifiers.pool import VerifierPool
from kitae.verifiers.score_calls import call_score
from kitae.verifiers.verifier_registry import resolve

BY_KIND: dict[str, list[Case]] = defaultdict(list)
for found in all_cases():
    BY_KIND[found.kind].append(found)
OPEN = [case for cases in BY_KIND.values() for case in cases if case.open]
FEW = [kind for kind, cases in BY_KIND.items() if any(case.core and not case.open for case in cases)]
MANY = [kind for kind, cases in BY_KIND.items() if not all(case.core or case.open for case in cases)]
_HANGS = ("bombs", "JSON that costs much")  # kinds that a process must end


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def scores(cases: Sequence[Case]) -> list[Score]:
    """Of cases of one kind."""
    if cases[0].verifier == "code" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    if cases[0].verifier == "judge":
        return asyncio.run(_judged(cases))
    if cases[0].kind in _HANGS:
        return asyncio.run(_pooled(cases))
    with ThreadPoolExecutor(2 if cases[0].verifier == "code" else 1) as threads:
        return list(threads.map(_score, cases))


def _score(case: Case) -> Score:
    return call_score(resolve(case.verifier).score, case.response, case.reference, case.context, case.options)


async def _pooled(cases: Sequence[Case]) -> list[Score]:
    async with VerifierPool(cases[0].verifier, cases[0].options, workers=2, timeout=2) as pool:
        return list(await asyncio.gather(*(pool.score(case.response, case.reference) for case in cases)))


async def _judged(cases: Sequence[Case]) -> list[Score]:
    async def one(case: Case) -> Score:
        def answer(request: Request) -> Reply:
            told = "".join(message["content"] for message in request.body["messages"])
            mark = re.search(r"block RESPONSE ([0-9a-f]{16})", told)
            assert mark
            says = case.options["says"].replace("{mark}", mark[1]).replace("{seen}", "10" if case.name in told else "0")
            return Reply({"choices": [{"message": {"role": "assistant", "content": says}, "finish_reason": "stop"}]})

        async with FakeServer(answer) as server:
            options = {"base_url": server.url, "model": "stand-in", "retries": 0, "backoff": 0.01}
            return await judge(case.response, case.reference, case.context, **options)

    return [await one(case) for case in cases]


def problems(cases: Sequence[Case]) -> list[str]:
    """What is not as it should be, a line for each case."""
    said, found = [], scores(cases)
    held = {case.test for case, score in zip(cases, found, strict=True) if case.honest and score.outcome != "error"}
    for case, score in zip(cases, found, strict=True):
        low, high = case.want
        refused = case.refusable and (case.verifier != "code" or case.test not in held)
        right = refused if score.outcome == "error" else low <= score.value <= high
        if not right:
            verdict = "an error" if score.outcome == "error" else f"{score.value:g}"
            said.append(f"{case.name}: {verdict}, not {low:g} to {high:g} ({score.detail[:200]})")
    return said


@pytest.mark.sentinel(keep=1000)
@pytest.mark.parametrize("kind", FEW)
def test_only_what_is_right_pays(kind: str) -> None:
    cases = [case for case in BY_KIND[kind] if case.core and not case.open]
    assert not problems(cases)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MANY)
def test_only_what_is_right_pays_in_every_combination(kind: str) -> None:
    """Each test of a group of programs with each of its programs."""
    cases = [case for case in BY_KIND[kind] if not case.core and not case.open]
    assert not problems(cases)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{case.kind}: {case.name}", marks=pytest.mark.xfail(strict=True, reason=case.open))
        for case in OPEN
    ],
)
def test_what_is_not_held_yet(case: Case) -> None:
    assert not problems([case])


def test_there_are_many_attacks() -> None:
    attacks = [case for cases in BY_KIND.values() for case in cases if not case.honest]
    assert len(attacks) >= 300 and len({case.kind for case in attacks}) >= 60
    names = [(case.kind, case.name) for cases in BY_KIND.values() for case in cases]
    assert len(set(names)) == len(names)
