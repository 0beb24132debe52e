"""The pool and its workers, against score functions that do everything a score function should not."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kitae.errors import VerifierError
from kitae.types import Message, Prompt, Score
from kitae.verifiers.pool import VerifierPool, validate

pytestmark = pytest.mark.usefixtures("warm_verifiers")

T = TypeVar("T")

HOSTILE = r"""
import os, socket, subprocess, sys, time
import numpy as np
from kitae.types import Score

def score(response, reference, context, *, bonus=0.0):
    match response:
        case "hang":
            while True: pass
        case "busy":
            while time.process_time() < reference: pass
        case "sleep": time.sleep(60)
        case "child":
            with open(reference, "w") as file:
                file.write(str(subprocess.Popen(["sleep", "60"]).pid))
            time.sleep(60)
        case "daemon":
            subprocess.Popen(["sleep", "10"], start_new_session=True)
            time.sleep(60)
        case "exit": os._exit(3)
        case "last words":
            print("goodbye", file=sys.stderr, flush=True)
            os._exit(4)
        case "abort": os.abort()
        case "sys.exit": sys.exit(0)
        case "raise": raise ValueError(f"bad {reference}")
        case "interrupt": raise KeyboardInterrupt
        case "recurse": return score("recurse", reference, context)
        case "fork":
            os.fork()
            return 1.0
        case "print":
            print('{"id": 1, "value": 0}', flush=True)
            print("\ud800", "x" * 300_000)
            os.write(1, b"raw\n")
            subprocess.run(["echo", "from a child"])
        case "stdin": return 1.0 if sys.stdin.read() == "" else 0.0
        case "none": return None
        case "text": return "1.0"
        case "nan": return float("nan")
        case "inf": return Score(float("inf"))
        case "overflow": return 10**400
        case "bad component": return Score(1.0, {"style": float("nan")})
        case "bad value": return Score("1")
        case "bool": return True
        case "numpy": return np.float32(0.5)
        case "dict": return {"score": True, "fmt": np.float32(0.5), "why": "short", "strict": np.bool_(False)}
        case "value": return {"value": 2, "": 1}
        case "numpy bool": return np.bool_(True)
        case "tensor":
            import torch
            return {"score": torch.tensor(0.25), "fmt": torch.tensor(True)}
        case "no score": return {"fmt": 1.0, "style": 0}
        case "empty dict": return {}
        case "bad dict": return {"score": "high"}
        case "bad second": return {"score": 1, "value": float("nan")}
        case "huge": return 1e39
        case "huge component": return {"score": 1, "fmt": -1e16}
        case "vector": return np.ones(3)
        case "mute":
            class Mute(Exception):
                def __str__(self): raise ValueError
            raise Mute
        case "generator": yield_ = (x for x in "a"); return yield_
        case "long detail": return Score(1.0, detail="\ud800" + "x" * 50_000_000)
        case "group": raise BaseExceptionGroup("several", [ValueError("one"), SystemExit(2)])
        case "pid": return float(os.getpid())
        case "flood":
            for number in range(3, 64):
                try: socket.socket(fileno=os.dup(number)).sendall(b"x" * 2**25 + b"\n")
                except OSError: pass
        case "long name": return Score(1.0, {"k" * 2**25: 1.0})
        case "many parts": return Score(1.0, dict.fromkeys(map(str, range(2_000)), 1.0))
        case "odd outcome": return Score(1.0, outcome="maybe")
        case "no reason": return Score.error("")
        case "surrogates": return Score(1.0, {"\ud800": 1.0}, detail="\ud800")
        case "surrogate error": raise ValueError("\ud800")
        case "own error": return Score.error("cannot say")
        case "parts": return Score(0.75, {"style": 1, "facts": 0.5}, detail="x" * 5_000)
        case "echo": return Score(1.0, detail=repr(reference)[:100])
        case "context": return context["value"] + bonus
        case "length": return float(len(reference))
    return 1.0
"""


def run(test: Callable[[VerifierPool], Awaitable[T]], name: str, **options: Any) -> tuple[T, VerifierPool]:
    async def body() -> tuple[T, VerifierPool]:
        async with VerifierPool(name, **options) as pool:
            return await test(pool), pool

    return asyncio.run(body())


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("verifiers") / "hostile.py"
    path.write_text(HOSTILE)
    return f"{path}:score"


def is_gone(pid: int, within: float = 5.0) -> bool:
    """Dead, or a zombie that nobody reaps."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_scores_in_parallel_and_in_order() -> None:
    async def test(pool: VerifierPool) -> list[Score]:
        return await asyncio.gather(*(pool.score(f"It is {i}", i if i % 3 else -1) for i in range(300)))

    scores, pool = run(test, "number", workers=3)
    assert [s.value for s in scores] == [float(i % 3 > 0) for i in range(300)]
    assert (pool.stats.checked, pool.stats.errors, pool.stats.restarts) == (300, 0, 0)


def test_what_a_function_may_return_and_do(hostile: str) -> None:
    cases: list[tuple[str, Any, Score]] = [
        ("bool", None, Score(1.0)),
        ("numpy", None, Score(0.5)),
        ("parts", None, Score(0.75, {"style": 1.0, "facts": 0.5}, detail="x" * 1000)),
        ("echo", {"a": [1, None, "\ud800é\n"]}, Score(1.0, detail=repr({"a": [1, None, "\ud800é\n"]}))),
        ("dict", None, Score(1.0, {"fmt": 0.5, "strict": 0.0})),
        ("value", None, Score(2.0, {"": 1.0})),
        ("numpy bool", None, Score(1.0)),
        ("tensor", None, Score(0.25, {"fmt": 1.0})),
        ("long detail", None, Score(1.0, detail="\\ud800" + "x" * 999)),
        ("surrogates", None, Score(1.0, {"\\ud800": 1.0}, detail="\\ud800")),
        ("print", None, Score(1.0)),
        ("stdin", None, Score(1.0)),
        ("\ud800 \x00 \u2028 é", None, Score(1.0)),
        ("context", None, Score(3.5)),
        ("length", "é" * 2_000_000, Score(2_000_000.0)),
        ("x" * 5_000_000, None, Score(1.0)),
    ]

    async def test(pool: VerifierPool) -> list[Score]:
        return [await pool.score(response, reference, {"value": 3}) for response, reference, _ in cases]

    scores, pool = run(test, hostile, params={"bonus": 0.5}, workers=1)
    assert scores == [score for _, _, score in cases]
    assert pool.stats.restarts == 0


def test_what_is_an_error_and_never_a_0(hostile: str) -> None:
    cases = {
        "raise": "ValueError: bad 7 (hostile.py:",
        "sys.exit": "SystemExit: 0",
        "interrupt": "KeyboardInterrupt",
        "recurse": "RecursionError",
        "none": "no reward applies to this answer, got None",
        "text": "got str",
        "vector": "got ndarray",
        "generator": "got generator",
        "no score": "a dict of a score function must have the key 'score', got the keys fmt, style",
        "empty dict": "must have the key 'score', got the keys none",
        "bad dict": "the value of a score must be a finite number, at most 1e+15 in size, got 'high'",
        "bad second": "the value of a score must be a finite number, at most 1e+15 in size, got nan",
        "nan": "the value of a score must be a finite number, at most 1e+15 in size, got nan",
        "inf": "got inf",
        "huge": "the value of a score must be a finite number, at most 1e+15 in size, got 1e+39",
        "huge component": "the fmt of a score must be a finite number, at most 1e+15 in size, got -1e+16",
        "overflow": "got 1000000",
        "bad component": "the style of a score must be a finite number, at most 1e+15 in size, got nan",
        "bad value": "must be a finite number, at most 1e+15 in size, got '1'",
        "long name": "a score must have at most 1000 components with names of at most 200 characters",
        "many parts": "a score must have at most 1000 components with names of at most 200 characters, got 2000",
        "odd outcome": "the outcome of a score must be 'scored' or 'error', got 'maybe'",
        "no reason": "without a reason",
        "surrogate error": "ValueError: \\ud800",
        "mute": "Mute: its message raised ValueError",
        "group": "BaseExceptionGroup: several",
        "own error": "cannot say",
        "context": "KeyError",
    }

    async def test(pool: VerifierPool) -> dict[str, Score]:
        scores = {response: await pool.score(response, 7) for response in cases}
        assert (await pool.score("", object())).detail.startswith("reference and context must be JSON values")
        return scores

    scores, pool = run(test, hostile, workers=1)
    for response, reason in cases.items():
        assert not scores[response].valid and reason in scores[response].detail
    assert (pool.stats.errors, pool.stats.restarts) == (len(cases) + 1, 0)


def test_a_worker_that_dies(hostile: str) -> None:
    cases = {
        "exit": "verifier worker died: exit status 3",
        "last words": "exit status 4; its stderr ends with:\ngoodbye",
        "abort": "killed by signal 6 (Aborted)",
        "flood": "broke the protocol",
    }

    async def test(pool: VerifierPool) -> None:
        for response, reason in cases.items():
            score = await pool.score(response, None)
            assert not score.valid and reason in score.detail
            assert await pool.score("fine", None) == Score(1.0)

    _, pool = run(test, hostile, workers=1)
    assert pool.stats.restarts == pool.stats.errors == len(cases)


def test_a_worker_that_is_killed_from_outside_costs_nothing(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import os\nfrom pathlib import Path\n"
        "def score(response, reference, context):\n"
        "    mark = Path(reference)\n"
        "    if response == 'always' or not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return 1.0\n"
    )

    async def test(pool: VerifierPool) -> list[Score]:
        return [await pool.score(response, str(tmp_path / "mark")) for response in ("once", "always")]

    (once, always), pool = run(test, f"{own}:score", workers=1)
    assert once == Score(1.0)
    assert not always.valid and "killed by signal 9" in always.detail
    assert (pool.stats.errors, pool.stats.restarts) == (1, 3)


def test_a_forked_worker_cannot_answer_for_another_job(hostile: str) -> None:
    async def test(pool: VerifierPool) -> list[Score]:
        return [await pool.score(response, None) for response in ("fork", "parts", "numpy", "numpy", "numpy")]

    scores, pool = run(test, hostile, workers=1)
    assert [score.value for score in scores] == [1.0, 0.75, 0.5, 0.5, 0.5]
    assert pool.stats.restarts == 0


def test_a_hang_is_killed_while_others_go_on(hostile: str) -> None:
    async def test(pool: VerifierPool) -> Score:
        hang = asyncio.create_task(pool.score("hang", None))
        scores = await asyncio.gather(*(pool.score("fine", None) for _ in range(50)))
        assert not hang.done() and all(s.value == 1 for s in scores)
        hung = await hang
        assert await asyncio.gather(*(pool.score("fine", None) for _ in range(4))) == [Score(1.0)] * 4
        return hung

    hung, pool = run(test, hostile, workers=2, timeout=0.7)
    assert not hung.valid and hung.detail == "timed out after 0.7 s"
    assert (pool.stats.timeouts, pool.stats.errors, pool.stats.restarts) == (1, 1, 1)


def test_a_symbolic_bomb_is_wrong() -> None:
    async def test(pool: VerifierPool) -> list[Score]:
        cases = [("9**9**9", "1"), (r"\boxed{9^{9^9}}", "1"), ("2/4", "1/2")]
        return [await pool.score(response, reference) for response, reference in cases]

    start = time.monotonic()
    scores, pool = run(test, "math", workers=1, timeout=1)
    assert time.monotonic() - start < 60
    assert scores[0].value == 0 and scores[0].valid
    assert scores[1].value == 0 and scores[1].valid
    assert scores[2] == Score(1.0)
    assert pool.stats.errors == 0


def test_starting_up_is_not_part_of_the_deadline() -> None:
    """Importing sympy takes longer than this limit."""
    score, _ = run(lambda pool: pool.score(r"\boxed{\frac{1}{2}}", "0.5"), "math", workers=1, timeout=0.3)
    assert score == Score(1.0)


def test_a_blocked_event_loop_is_not_held_against_the_response(hostile: str) -> None:
    async def test(pool: VerifierPool) -> Score:
        check = asyncio.create_task(pool.score("length", "x" * 3_000_000))
        await asyncio.sleep(0)
        time.sleep(1)
        return await check

    score, _ = run(test, hostile, workers=1, timeout=0.8)
    assert score == Score(3_000_000.0)


def test_a_timeout_kills_what_the_worker_started(hostile: str, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    run(lambda pool: pool.score("child", str(path)), hostile, workers=1, timeout=0.5)
    assert is_gone(int(path.read_text()))


def test_a_child_that_escapes_holds_nobody_up(hostile: str) -> None:
    async def test(pool: VerifierPool) -> float:
        start = time.monotonic()
        assert (await pool.score("daemon", None)).detail == "timed out after 0.5 s"
        assert await pool.score("fine", None) == Score(1.0)
        return start

    start, _ = run(test, hostile, workers=1, timeout=0.5)
    assert time.monotonic() - start < 30


def test_cancelling_a_check_frees_its_worker(hostile: str) -> None:
    async def test(pool: VerifierPool) -> Score:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.score("sleep", None), 0.2)
        return await pool.score("fine", None)

    score, pool = run(test, hostile, workers=1, timeout=30)
    assert score == Score(1.0) and pool.stats.restarts == 1


def test_closing_ends_what_runs_and_what_waits(hostile: str) -> None:
    async def body() -> list[Score]:
        pool = VerifierPool(hostile, workers=1, timeout=30)
        with pytest.raises(VerifierError, match="between start"):
            await pool.score("fine", None)
        await pool.start()
        checks = [asyncio.create_task(pool.score("sleep", None)) for _ in range(3)]
        await asyncio.sleep(0.1)
        await pool.close()
        with pytest.raises(VerifierError, match="between start"):
            await pool.score("fine", None)
        scores = await asyncio.wait_for(asyncio.gather(*checks), 5)
        async with pool:
            assert await asyncio.gather(*(pool.score("numpy", None) for _ in range(5))) == [Score(0.5)] * 5
        return scores

    assert not any(score.valid for score in asyncio.run(body()))


@pytest.mark.slow  # it keeps all processors busy
def test_a_pool_can_be_closed_as_soon_as_it_is_open(hostile: str) -> None:
    """Workers are killed, not waited for, even those that have not had a moment of the processor yet."""

    async def test() -> None:
        for _ in range(10):
            async with asyncio.timeout(30), VerifierPool(hostile, workers=4):
                pass

    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        asyncio.run(test())
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def test_a_template_that_does_not_answer_is_replaced(hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All waits have a deadline, those for the template too."""

    async def test(pool: VerifierPool) -> float:
        worker = int((await pool.score("pid", None)).value)
        template = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(template, signal.SIGSTOP)
        assert not (await pool.score("exit", None)).valid
        assert await pool.score("fine", None) == Score(1.0)
        return template

    monkeypatch.setattr("kitae.workers.templates.template._ANSWER_LIMIT", 0.5)
    template, _ = run(test, hostile, workers=1)
    assert is_gone(int(template))


def test_a_template_that_cannot_come_back_is_an_error_until_it_can(tmp_path: Path) -> None:
    path = tmp_path / "fickle.py"
    source = (
        "import os, signal\ndef score(response, reference, context):\n"
        "    if response == 'end': os.kill(os.getppid(), signal.SIGKILL)\n"
        "    return os._exit(1) if response == 'exit' else 1.0\n"
    )
    path.write_text(source)

    async def test(pool: VerifierPool) -> None:
        path.unlink()
        assert "exit status 1" in (await pool.score("exit", None)).detail
        assert await pool.score("fine", None) == Score(1.0), "a fork needs no file"
        await pool.score("end", None)  # the answer may come before the end
        while not (score := await pool.score("fine", None)).detail:
            pass
        assert "its template ended" in score.detail or "must exist" in score.detail
        assert "must exist" in (await pool.score("fine", None)).detail
        path.write_text(source)
        await pool.score("fine", None)  # may still meet the restart that failed
        assert await pool.score("fine", None) == Score(1.0)

    run(test, f"{path}:score", workers=1)


@pytest.mark.thorough
def test_long_checks_do_not_hold_up_short_ones(hostile: str) -> None:
    """Both workers of the pool hang: short checks go on, because others take their place."""

    async def test(pool: VerifierPool) -> None:
        await pool.score("fine", None)  # now the pool knows how long a first check takes
        hanging = [asyncio.create_task(pool.score(kind, None)) for kind in ("hang", "sleep", "hang")]
        await asyncio.sleep(0.05)
        scores = await asyncio.gather(*(pool.score("fine", None) for _ in range(20)))
        assert all(score.valid for score in scores) and not any(task.done() for task in hanging)
        assert not any(score.valid for score in await asyncio.gather(*hanging))

    run(test, hostile, workers=2, timeout=3)


@pytest.mark.slow  # it keeps all processors busy
def test_time_without_a_processor_is_not_held_against_the_response(hostile: str) -> None:
    """A check that was set aside waits behind everything else, but the time it waits does not count."""

    async def test(pool: VerifierPool) -> list[Score]:
        return [await pool.score("busy", 1.5), await pool.score("busy", 60.0)]

    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        (good, bad), pool = run(test, hostile, workers=1, timeout=2)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert good == Score(1.0) and not bad.valid and pool.stats.timeouts == 1


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("exakt", {}, "did you mean 'exact'"),
        ("exact", {"ignorecase": True}, "it takes ignore_case"),
        ("number", {"tolerance": "much"}, "got 'much'"),
        ("number", {"tolerance": -1}, "must score its example"),
        ("{folder}/crash.py:score", {}, "could not start: exit status 7; its stderr ends with:\nno licence"),
        ("{folder}/none.py:score", {}, "must exist"),
    ],
)
def test_a_pool_that_cannot_start(tmp_path: Path, name: str, params: dict[str, Any], message: str) -> None:
    (tmp_path / "crash.py").write_text("import os\nos.write(2, b'no licence')\nos._exit(7)")

    async def body() -> None:
        await VerifierPool(name.format(folder=tmp_path), params, workers=1).start()

    with pytest.raises(VerifierError) as caught:
        asyncio.run(body())
    assert message in str(caught.value)


def test_validate() -> None:
    def prompt(reference: Any) -> Prompt:
        return Prompt(str(reference), (Message("user", "?"),), reference)

    prompts = [prompt(reference) for reference in (12, "1,234", "many", "#### 5", 0.5)]
    bad, _ = run(lambda pool: validate(pool, prompts), "number")
    assert [p.reference for p, _ in bad] == ["many"] and not bad[0][1].valid
    solved = [Prompt(gold, (), "56", gold=gold) for gold in ("It is 56", "It is 57")]
    assert [p.id for p, _ in run(lambda pool: validate(pool, solved), "number")[0]] == ["It is 57"]
    rules = [prompt(reference) for reference in ('{"required": ["age"]}', "{", {"required": ["age"]})]
    bad, _ = run(lambda pool: validate(pool, rules), "json_schema")
    assert [p.reference for p, _ in bad] == ["{"], "a rule is no answer, but it must be readable"
    golds = [
        "x^2+1",
        "(1,2)",
        r"2\pi/3",
        r"\text{Monday}",
        "no solution",
        "x=5",
        "sqrt(2)",
        "$12$",
        r"\boxed{3}",
        "A",
        7,
    ]
    assert run(lambda pool: validate(pool, map(prompt, golds)), "math", workers=1)[0] == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs PDEATHSIG")
@pytest.mark.parametrize("response", ["hang", "fine"])
def test_workers_die_with_their_parent(hostile: str, response: str) -> None:
    code = f"""
import asyncio
from kitae.verifiers.pool import VerifierPool
async def main():
    async with VerifierPool({hostile!r}, workers=1, timeout=60) as pool:
        print(int((await pool.score("pid", None)).value), flush=True)
        await pool.score({response!r}, None)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    assert is_gone(worker)


def test_what_a_verifier_warns_of_is_seen(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Even though what workers print is not."""

    async def test(pool: VerifierPool) -> Score:
        return await pool.score("```python\ndef f(): return 1\n```", reference)

    reference = {"tests": {"kind": "asserts", "asserts": ["assert f() == 1"]}}
    score, _ = run(test, "code", params={"sandbox": "none"}, workers=1)
    assert score.value == 1 and capfd.readouterr().err.startswith('warning: sandbox = "none" runs code of the model')
    run(test, "code", workers=1)
    assert capfd.readouterr().err == ""


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs a sandbox")
def test_a_program_that_was_paused_is_judged_by_its_own_time() -> None:
    """Programs that take a while pass, however long they pause for the many short ones that are in the queue."""
    slow = "import time\nbegan = time.process_time()\nwhile time.process_time() < began + 0.4: pass\ndef f(): return 1"

    async def test(pool: VerifierPool) -> list[Score]:
        reference = {"tests": {"kind": "asserts", "asserts": ["assert f() == 1"]}}
        short = [pool.score("def f(): return 1", reference) for _ in range(80)]
        return await asyncio.gather(*short[:10], pool.score(slow, reference), pool.score(slow, reference), *short[10:])

    scores, pool = run(test, "code", workers=1, params={"time_limit": 1.2, "total_limit": 2.0}, timeout=2.5)
    assert {score.value for score in scores} == {1.0} and pool.stats.timeouts == 0
