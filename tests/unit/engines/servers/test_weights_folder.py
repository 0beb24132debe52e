"""What servers read: names, values and checksums of a checkpoint, for every way a model is trained."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kitae.engines.servers.model_folder import WeightsFolder, checkpoint
from kitae.engines.servers.tensor_files import SUMS, WEIGHTS, Written, write_tensors
from kitae.errors import EngineError, WeightsDamaged
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.weights.base import Manifest
from kitae.weights.probe import score_probe
from kitae.weights.shared_memory import MemoryPublisher

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    "odd": torch.tensor([7], dtype=torch.int8),
    "none": torch.empty(0, 4),
    "c": torch.randn(1000),
}


def test_it_is_plain_safetensors(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    for found in (load_file(tmp_path / WEIGHTS), dict(Written(tmp_path).tensors())):
        assert found.keys() == TENSORS.keys()
        assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in TENSORS.items())
    assert Written(tmp_path).damaged() == []


@pytest.mark.parametrize("where", [-1, -2000, -4001])
def test_a_flipped_bit_is_found(tmp_path: Path, where: int) -> None:
    write_tensors(tmp_path, TENSORS)
    data = bytearray((tmp_path / WEIGHTS).read_bytes())
    data[where] ^= 1
    (tmp_path / WEIGHTS).write_bytes(data)
    assert len(Written(tmp_path).damaged()) == 1


def test_what_is_cut_off_or_missing_is_found(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[:-100])
    assert Written(tmp_path).damaged() == ["c"]
    write_tensors(tmp_path, {name: t for name, t in TENSORS.items() if name != "a"})
    sums = (tmp_path / SUMS).read_text()
    (tmp_path / SUMS).write_text(sums.replace('{"b"', '{"a": 1, "b"'))
    assert Written(tmp_path).damaged() == ["a"]


def test_who_has_mapped_a_file_keeps_what_it_was(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    before = dict(Written(tmp_path).tensors())
    write_tensors(tmp_path, {name: t + 1 for name, t in TENSORS.items()})
    assert torch.equal(before["c"], TENSORS["c"])


def published(policy: Policy, publisher: MemoryPublisher, version: int) -> Manifest:
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape) * 0.05)
    return publisher.publish(version, {n: p.detach() for n, p in policy.model.named_parameters() if p.requires_grad})


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}, {"architecture": "qwen3"}])
def test_a_version_loads_as_an_ordinary_model(
    tiny_policy: Callable[..., Policy], settings: dict[str, object], tmp_path: Path
) -> None:
    """Adapters are merged, and a tied head is there once."""
    policy, copy = tiny_policy(**settings), tiny_policy(**settings)
    publisher = MemoryPublisher()
    folder = WeightsFolder(copy, publisher.address, 3, str(tmp_path))
    names = load_file(folder.start / WEIGHTS).keys()
    assert "lm_head.weight" not in names and not [n for n in names if "lora" in n or "base_layer" in n]
    assert folder.probe.version == 3 and folder.current == folder.start
    for version in (4, 5, 6):
        folder.take(published(policy, publisher, version))
        assert folder.probe.version == version and folder.probe.gap(score_probe(policy)) < 1e-5
        loaded = load_policy(policy_config(folder.current))
        assert folder.probe.gap(score_probe(loaded)) < 1e-4
        assert load_file(folder.current / WEIGHTS).keys() == names
    assert checkpoint(copy).keys() == names
    folder.close()
    publisher.close()
    assert not list(tmp_path.iterdir())


def policy_config(folder: Path) -> "object":
    from kitae.models.config import ModelConfig

    return ModelConfig(path=str(folder), dtype="float32", device="cpu")


def test_what_does_not_fit_or_is_damaged_is_refused(tiny_policy: Callable[..., Policy], tmp_path: Path) -> None:
    policy, publisher = tiny_policy(), MemoryPublisher()
    folder = WeightsFolder(tiny_policy(), publisher.address, 0, str(tmp_path))
    other = MemoryPublisher()
    with pytest.raises(EngineError, match="names an unknown parameter 'x'"):
        folder.take(other.publish(1, {"x": torch.zeros(3)}))
    assert folder.current == folder.start
    manifest = published(policy, publisher, 1)
    image = publisher.address.descriptors[0]
    os.pwrite(image, bytes([os.pread(image, 1, 100)[0] ^ 1]), 100)
    with pytest.raises(WeightsDamaged, match="version 1 did not arrive whole"):
        folder.take(manifest)
    folder.take(published(policy, publisher, 2))
    assert folder.probe.gap(score_probe(policy)) < 1e-5
    for each in (folder, publisher, other):
        each.close()
