"""Real ranks over gloo: one function, here as rank 0 and in processes of their own as the others.

python processes.py RANK JOB     what the other processes run
"""

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


def on_ranks(folder: Path, function: Callable[..., T], *arguments: Any, size: int = 2) -> T:
    """What `function(*arguments)` returns on rank 0; all ranks call it inside a process group."""
    job, rendezvous = folder / "job", folder / "rendezvous"
    job.write_bytes(pickle.dumps((function, arguments, size, str(rendezvous))))
    others = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(job)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, size)
    ]
    try:
        found: T = _join(0, job)
        errors = [other.communicate(timeout=60)[1] for other in others]
    except BaseException:
        for other in others:
            other.kill()
            other.communicate()
        raise
    assert not any(other.returncode for other in others), "\n".join(errors)
    return found


def _join(rank: int, job: Path) -> Any:
    function, arguments, size, rendezvous = pickle.loads(job.read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", timedelta(seconds=240), world_size=size, rank=rank)
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _join(int(sys.argv[1]), Path(sys.argv[2]))
