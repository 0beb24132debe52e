"""The process of a server."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from kitae.engines.servers.server import Program
from kitae.workers.process_status import family_of

HOLDS = (
    "import time; from multiprocessing.shared_memory import SharedMemory; m = SharedMemory(create=True, size=64); "
    "print('/dev/shm/' + m.name.lstrip('/'), flush=True); time.sleep(990)"
)


def test_the_memory_of_a_killed_server_is_given_back() -> None:
    async def body() -> None:
        program = await Program.start([sys.executable, "-c", HOLDS], {})
        while not program.words:
            await asyncio.sleep(0.05)
        path = Path(program.words.splitlines()[-1])
        assert path.exists()
        program.note_memory()
        for pid in reversed(family_of(program._process.pid)[1:]):
            os.kill(pid, signal.SIGKILL)
        await program.end()
        assert not path.exists()

    asyncio.run(body())
