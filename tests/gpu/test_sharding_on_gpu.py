"""One rank with NCCL on one GPU: kernels on shards, what is offloaded, checkpoints and exports from there."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kitae.kernels.adamw import whole
from kitae.models.written_folder import export_policy
from kitae.trainer.parallel.mesh import OFFLOADS, Offload, Parallel

sys.path.append(str(Path(__file__).parents[1] / "unit/trainer"))
from sharded import GRPO, SHAPES, Case, Crew, check, one_rank, rows_of, train
from test_gradient import make_samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
BACKEND, DEVICE = "cpu:gloo,cuda:nccl", "cuda"


@pytest.mark.parametrize("offload", OFFLOADS)
def test_one_rank_is_one_process(offload: Offload, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    rows = rows_of(make_samples(SHAPES, gaps=True), GRPO)
    case, folder = Case(rows, Parallel(offload=offload), model={"device": DEVICE}), str(tiny_folder("llama"))
    with one_rank(tmp_path, BACKEND):
        check(case, train(folder, case), folder, tolerance=1e-5)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_saved_and_exported(offload: Offload, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    rows = rows_of(make_samples(SHAPES, gaps=True), GRPO)
    settings = {"device": DEVICE, "dtype": "bfloat16"}
    case, folder = Case(rows, Parallel(offload=offload), model=settings), str(tiny_folder("llama"))
    with one_rank(tmp_path, BACKEND):
        crew = Crew.of(folder, case)
        crew.update(1)
        wait = crew.worker.begin_save(tmp_path)
        state = crew.state()
        crew.update(2)
        wait()
        export_policy(crew.worker.policy, tmp_path / "model")
    alone = Crew.of(folder, case.alone)
    alone.worker.load(tmp_path)
    found, expected = masters_whole(alone.state()), masters_whole(state)
    assert found.keys() == expected.keys() and "policy.master.model.norm.weight" in found
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert (tmp_path / "model" / "model.safetensors").is_file()


def masters_whole(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the host they are that anyway, beside parameters in bfloat16 only what those lack."""
    found = {name: tensor.cpu() for name, tensor in state.items()}
    for name in [name for name in found if ".rest." in name]:
        rest, upper = found.pop(name), found.pop(name.replace(".rest.", ".weight."))
        found[name.replace(".rest.", ".master.")] = whole(upper, rest.to(torch.int16))
    return found
