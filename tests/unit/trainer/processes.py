"""Real ranks over gloo: one function in several processes. All are new: torch remembers groups that are gone.

python processes.py RANK JOB     what they run
"""

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
LIMIT = timedelta(minutes=4)  # for one rank to wait for another, on a busy machine


def on_ranks(folder: Path, function: Callable[..., T], *arguments: Any, size: int = 2) -> T:
    """What `function(*arguments)` returns on rank 0; all ranks call it inside a process group."""
    job, rendezvous, found = folder / "job", folder / "rendezvous", folder / "found"
    rendezvous.unlink(missing_ok=True)
    job.write_bytes(pickle.dumps((function, arguments, size, str(rendezvous), str(found))))
    ranks = [_start(rank, job, folder / f"stderr-{rank}") for rank in range(size)]
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            _wait_for_one(ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    errors = [(folder / f"stderr-{i}").read_text() for i, rank in enumerate(ranks) if rank.returncode > 0]
    assert not errors, "\n".join(errors)
    result: T = pickle.loads(found.read_bytes())
    return result


def _start(rank: int, job: Path, errors: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, str(rank), str(job)]
    with errors.open("w") as stderr:
        return subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, stderr=stderr
        )


def _wait_for_one(ranks: list[subprocess.Popen[bytes]]) -> None:
    running = next((rank for rank in ranks if rank.poll() is None), ranks[0])
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.wait(timeout=1)


def _join(rank: int, job: Path) -> None:
    function, arguments, size, rendezvous, found = pickle.loads(job.read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", LIMIT, world_size=size, rank=rank)
    try:
        result = function(*arguments)
        if rank == 0:
            Path(found).write_bytes(pickle.dumps(result))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _join(int(sys.argv[1]), Path(sys.argv[2]))
