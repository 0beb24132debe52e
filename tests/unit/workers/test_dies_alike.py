"""What ends three times by the same error is not started a fourth time; the error is found in what it wrote."""

import asyncio

import pytest

from kitae.clock import VirtualLoop
from kitae.errors import KitaeError
from kitae.workers.pool import WorkerPool
from kitae.workers.process_status import SHOWN, cause_of, ending

NOISE = "(APIServer pid=7) INFO it_for_response " + "x" * 200 + "\n"
CAUSE = "RuntimeError: CPU Generator does not use offset"
WRITTEN = f"""{NOISE}(EngineCore pid=9) ERROR [core.py:1] Traceback (most recent call last):
(EngineCore pid=9) ERROR [core.py:1]   File "sampler.py", line 3, in forward
(EngineCore pid=9) ERROR [core.py:1] {CAUSE}
(APIServer pid=7) ERROR [async_llm.py:2] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
{NOISE * 40}"""


def test_the_error_that_others_noticed_is_the_cause() -> None:
    assert cause_of(WRITTEN) == CAUSE
    assert CAUSE not in WRITTEN[-SHOWN:] and ending(WRITTEN).startswith(f"{CAUSE}\n…\n")
    assert cause_of("Killed\n") == "" and ending(" no error \n") == "no error"
    assert ending("ValueError: short") == "ValueError: short"


class Mortal:
    def __init__(self) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        pass


def deaths(*words: str, pause: float = 1.0) -> tuple[int, list[str]]:
    """How many members there were in one place, each of which ended with these words; what was said."""

    async def body() -> tuple[int, list[str]]:
        made: list[Mortal] = []
        said: list[str] = []

        async def make(number: int) -> Mortal:
            made.append(Mortal())
            return made[-1]

        pool = WorkerPool(make, 1, note=said.append)
        await pool.start()
        for each in words:
            made[-1].lost.set_result(f"exit status 1; its last words were:\n{each}")
            await asyncio.sleep(pause)
            if made[-1].lost.done():
                break
        await pool.close()
        return len(made), said

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(body())


@pytest.mark.parametrize(
    ("words", "pause", "members"),
    [
        ([CAUSE] * 5, 1.0, 3),
        (["KeyError: 'a'", CAUSE, CAUSE, CAUSE, CAUSE], 1.0, 4),
        ([CAUSE, "KeyError: 'a'"] * 3, 1.0, 7),
        (["no memory"] * 5, 1.0, 6),
        ([CAUSE] * 5, 1000.0, 6),
    ],
)
def test_three_alike_are_enough(words: list[str], pause: float, members: int) -> None:
    made, said = deaths(*words, pause=pause)
    assert made == members
    assert any("is not replaced" in note and CAUSE in note for note in said) == (members < len(words) + 1)


def test_work_is_refused_with_the_cause() -> None:
    async def body() -> None:
        made: list[Mortal] = []

        async def make(number: int) -> Mortal:
            made.append(Mortal())
            return made[-1]

        pool = WorkerPool(make, 1)
        await pool.start()
        for _ in range(3):
            made[-1].lost.set_result(CAUSE)
            await asyncio.sleep(1)
        with pytest.raises(KitaeError, match=f"worker 0 was lost 3 times by the same error: {CAUSE}"):
            await pool.some()
        await pool.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(body())
