"""Real ranks over gloo: one function in several processes. All are new: torch remembers groups that are gone.

They are forked from a process that has the imports done, which take longer than what they compute.
"""

import pickle
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from warm_starts import as_rank, context

T = TypeVar("T")
LIMIT = timedelta(minutes=4)  # for one rank to wait for another, on a busy machine


def on_ranks(folder: Path, function: Callable[..., T], *arguments: Any, size: int = 2, backend: str = "gloo") -> T:
    """What `function(*arguments)` returns on rank 0; all ranks call it inside a process group of that backend."""
    job, rendezvous, found = folder / "job", folder / "rendezvous", folder / "found"
    rendezvous.unlink(missing_ok=True)
    job.write_bytes(pickle.dumps((function, arguments, size, backend, str(rendezvous), str(found))))
    ranks = [_start(rank, job, folder / f"stderr-{rank}") for rank in range(size)]
    try:
        while (alive := [rank for rank in ranks if rank.is_alive()]) and not any(rank.exitcode for rank in ranks):
            wait([rank.sentinel for rank in alive])
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    errors = [(folder / f"stderr-{i}").read_text() for i, rank in enumerate(ranks) if (rank.exitcode or 0) > 0]
    assert not errors, "\n".join(errors)
    result: T = pickle.loads(found.read_bytes())
    return result


def _start(rank: int, job: Path, errors: Path) -> BaseProcess:
    process = context().Process(target=_join, args=(rank, job, errors))
    process.start()
    return process


def _join(rank: int, job: Path, errors: Path) -> None:
    torch.set_num_threads(1)
    with as_rank(errors):
        _work(rank, job)


def _work(rank: int, job: Path) -> None:
    function, arguments, size, backend, rendezvous, found = pickle.loads(job.read_bytes())
    dist.init_process_group(backend, f"file://{rendezvous}", LIMIT, world_size=size, rank=rank)
    try:
        result = function(*arguments)
        if rank == 0:
            Path(found).write_bytes(pickle.dumps(result))
    finally:
        dist.destroy_process_group()
