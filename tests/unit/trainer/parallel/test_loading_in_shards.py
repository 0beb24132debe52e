"""Models that no process holds whole: what each rank reads, and how much memory it takes; the values are those of one
process."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks
from safetensors.torch import load_file, save_file
from sharded import one_rank
from torch.distributed.tensor import DTensor

from kitae.errors import ModelError
from kitae.kernels.allocation import return_freed_memory
from kitae.models import load_in_shards
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.load_in_shards import empty_policy
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.models.stored_tensors import StoredTensor, stored_tensors
from kitae.models.tiny import make_tiny
from kitae.models.whole import whole
from kitae.trainer.parallel.mesh import Mesh, Parallel
from kitae.trainer.parallel.sharding import shard

TinyFolder = Callable[[str], Path]
CPU = torch.device("cpu")
TOKENS = torch.arange(12) * 7


def settings(folder: Path, **choices: Any) -> ModelConfig:
    return ModelConfig.model_validate({"path": str(folder), "dtype": "float32", "device": "cpu", **choices})


def sharded(config: ModelConfig, parallel: Parallel) -> Policy:
    policy = empty_policy(config)
    shard(policy, Mesh(parallel, CPU))
    return policy


def of_process(name: str, file: str = "status") -> int:
    """A number that Linux tells of this process."""
    found = next(line for line in Path(f"/proc/self/{file}").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(found.split()[1])


@contextmanager
def measured(found: dict[str, int]) -> Iterator[None]:
    """The bytes that were read meanwhile, and by how much the memory of this process grew at most."""
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")
    read, memory = of_process("rchar", "io"), of_process("VmRSS")
    yield
    found |= {"read": of_process("rchar", "io") - read, "memory": (of_process("VmHWM") - memory) * 1024}


def load_large(folder: Path) -> list[list[dict[str, int]]]:
    """Of each rank, for a policy with adapters and for a critic: bytes of the shard, and what loading took.

    The checks that follow gather a layer at a time, as training does, and the C library keeps what they free: they are
    left out.
    """
    sharded(settings(folder.with_name("small"), lora_rank=8), Parallel(4))  # imports and the like are not measured
    load_in_shards._check = lambda *_, **__: None
    found = []
    for critic in (False, True):
        took: dict[str, int] = {}
        with measured(took):
            policy = empty_policy(settings(folder, lora_rank=0 if critic else 8))
            model = ScalarModel(policy) if critic else policy
            shard(model, Mesh(Parallel(4), CPU))
        parameters = [p for p in model.parameters() if isinstance(p, DTensor)]
        largest = max(p.numel() * p.element_size() for p in parameters)
        found.append({**took, "shard": sum(p.to_local().nbytes for p in parameters), "tensor": largest})
        del policy, model, parameters
    gathered: list[Any] = [None] * 4
    torch.distributed.all_gather_object(gathered, found)
    return gathered


@pytest.mark.slow
def test_a_rank_reads_its_part_and_holds_no_more(tmp_path: Path) -> None:
    make_tiny(tmp_path / "small")
    folder = make_tiny(tmp_path / "large", hidden=512, layers=32)
    size = (folder / "model.safetensors").stat().st_size
    assert size > 3e8
    for rank in on_ranks(tmp_path, load_large, folder, size=4):
        for took in rank:
            assert took["shard"] < 0.27 * size
            assert took["read"] < 1.1 * took["shard"]
            assert took["memory"] < 1.5 * took["shard"] + took["tensor"], took


@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        ("llama", {}),
        ("llama", {"lora_rank": 4}),
        ("qwen3_moe", {"lora_rank": 4, "lora_targets": "q_proj"}),
        ("gemma3", {}),
        ("qwen3_5", {}),
        ("llama", {"exact": True}),
    ],
)
def test_values_and_modules_are_those_of_one_process(
    kind: str, choices: dict[str, Any], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """The same bits, adapters too, and the same modules through compiled kernels: in a world of one rank."""
    config = settings(tiny_folder(kind), **choices)
    alone = load_policy(config)
    with one_rank(tmp_path):
        policy = sharded(config, Parallel())
        found, expected = dict(policy.model.named_parameters()), dict(alone.model.named_parameters())
        assert found.keys() == expected.keys()
        for name, parameter in expected.items():
            assert torch.equal(whole(found[name]), parameter), name
            assert found[name].requires_grad == parameter.requires_grad, name
        assert fused(policy) == fused(alone)
        torch.testing.assert_close(policy.score(TOKENS), alone.score(TOKENS), rtol=0, atol=1e-5)
        assert (
            policy.head.weight is policy.base.get_input_embeddings().weight
        ) == policy.base.config.tie_word_embeddings


def fused(policy: Policy) -> set[str]:
    return {name for name, module in policy.base.named_modules() if "forward" in vars(module)}


def test_experts_are_read_one_by_one(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """A rank that has some of the experts reads theirs alone."""
    stored = stored_tensors(tiny_folder("qwen3_moe"))
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in stored, "the files must hold experts one by one"
    read = on_ranks(tmp_path, experts_read, tiny_folder("qwen3_moe"))
    assert {name.split(".")[5] for name in read} == {"0", "1"}  # of four, on the first of two ranks
    assert len(read) == 2 * 2 * 3  # layers, experts, matrices


def experts_read(folder: Path) -> list[str]:
    places = {each.start: name for name, each in stored_tensors(folder).items()}
    names: list[str] = []
    plain = StoredTensor.read

    def read(self: StoredTensor, place: Any = None) -> torch.Tensor:
        names.append(places[self.start])
        return plain(self, place)

    StoredTensor.read = read  # type: ignore[method-assign]
    sharded(settings(folder), Parallel(2))
    return [name for name in names if ".experts." in name]


def test_missing_weights_are_named(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("llama"), folder)
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with one_rank(tmp_path), pytest.raises(ModelError, match=r"but lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        sharded(settings(folder), Parallel())
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="must be in safetensors files, got none in"):
        stored_tensors(folder)


def test_any_block_of_a_stored_tensor_can_be_read(tmp_path: Path) -> None:
    values = {"a": torch.randn(7, 5, 3), "b": torch.tensor(2.5), "c": torch.arange(6).to(torch.bfloat16)}
    save_file(values, tmp_path / "model.safetensors")
    stored = stored_tensors(tmp_path)
    for name, value in values.items():
        assert torch.equal(stored[name].read(), value)
    for place in ((slice(2, 5), slice(0, 5), slice(0, 3)), (slice(1, 6), slice(2, 4), slice(1, 3))):
        assert torch.equal(stored["a"].read(place), values["a"][place])
    assert stored["a"].read((slice(7, 7), slice(0, 5), slice(0, 3))).shape == (0, 5, 3)
