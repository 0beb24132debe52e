"""Which backend ranks choose, and that moving tensors through host memory changes no number."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import on_ranks
from sharded import GRPO, SHAPES, Case, Result, check, rows_of, train
from test_gradient import make_samples

from kitae.trainer.parallel.meeting import HostGroup, choose, interface_of
from kitae.trainer.parallel.mesh import Parallel


@pytest.mark.parametrize(
    ("devices", "wanted", "chosen"),
    [
        (["a", "b"], "auto", "cpu:gloo,cuda:nccl"),
        (["a", "a"], "auto", "host"),
        (["a", "b"], "gloo", "host"),
        (["", ""], "auto", "gloo"),
        (["", ""], "gloo", "gloo"),
        (["", "b"], "auto", "!all ranks must have a GPU or none, got 1 of 2 without: rank 0"),
        (["a", "a"], "nccl", "!cluster.collectives = 'nccl' needs a GPU for each rank, got 1 for 2 ranks"),
        (["", ""], "nccl", "!cluster.collectives = 'nccl' needs a GPU for each rank, got none"),
    ],
)
def test_the_backend_follows_from_the_devices_of_all(devices: list[str], wanted: str, chosen: str) -> None:
    assert choose(devices, wanted) == chosen


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") in [name for _, name in socket.if_nameindex()]
    assert interface_of("203.0.113.9") == ""


def through_copies(folder: str, cases: list[Case]) -> list[Result]:
    """As on a GPU that ranks share: gloo gets copies of all tensors."""
    HostGroup.resident = ()
    return [train(folder, case) for case in cases]


def test_ranks_that_move_tensors_through_copies_are_one_process(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, plain = str(tiny_folder("llama")), rows_of(make_samples(SHAPES), GRPO)
    cases = [Case(plain, Parallel(ranks=2, **how)) for how in ({}, {"tensor": 2}, {"sequence": 2})]
    for case, result in zip(cases, on_ranks(tmp_path, through_copies, folder, cases, backend="host"), strict=True):
        check(case, result, folder)
