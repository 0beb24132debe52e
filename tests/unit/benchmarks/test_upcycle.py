"""A mixture made of a dense model computes what that does, as long as its experts are alike."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmark_scripts import load_script
from transformers import AutoModelForCausalLM

from kitae.errors import ModelError
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.routing import RouterLoad, record_routing

script = load_script("upcycle")
main, upcycle = script.main, script.upcycle

TinyFolder = Callable[[str], Path]
TOKENS = torch.arange(5, 45)


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.as_tensor(model(TOKENS[None]).logits)


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (3, 3), (5, 1)])
def test_experts_that_are_alike_compute_what_the_dense_model_does(
    experts: int, top_k: int, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    made = upcycle(str(tiny_folder("llama")), tmp_path / "mixture", experts=experts, top_k=top_k)
    torch.testing.assert_close(logits(made), logits(tiny_folder("llama")), atol=1e-5, rtol=1e-5)


def test_with_noise_they_differ_and_the_same_seed_repeats(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    dense = str(tiny_folder("llama"))
    one, same, other = (
        logits(upcycle(dense, tmp_path / str(n), noise=0.5, seed=seed)) for n, seed in enumerate((1, 1, 2))
    )
    assert torch.equal(one, same) and not torch.allclose(one, other, atol=1e-3)


def test_it_is_a_policy_that_mixes_experts(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    made = upcycle(str(tiny_folder("llama")), tmp_path / "mixture", noise=0.05)
    policy = load_policy(ModelConfig(path=str(made), dtype="float32", device="cpu"))
    with torch.no_grad(), record_routing(policy.model) as record:
        policy.score(TOKENS)
    assert record.experts_TLK.shape == (len(TOKENS), policy.layers, 2)
    assert len(record.experts_TLK.unique()) == 4, "all of them are used"


def test_routers_with_nothing_to_choose_are_measured_too(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    made = upcycle(str(tiny_folder("llama")), tmp_path / "mixture", experts=1, top_k=1)
    policy, load = load_policy(ModelConfig(path=str(made), dtype="float32", device="cpu")), RouterLoad()
    with torch.no_grad(), load.watch(policy.model):
        policy.score(TOKENS)
    assert {name: value.item() for name, value in load.numbers().items()} == {
        "router_entropy": 0, "expert_load": 1, "experts_idle": 0,
    }  # fmt: skip


def test_what_cannot_be_made_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    dense = str(tiny_folder("llama"))
    with pytest.raises(ModelError, match="top_k must be from 1 to the number of experts, 4, got 5"):
        upcycle(dense, tmp_path / "a", top_k=5)
    for noise in (-1, math.nan, math.inf):
        with pytest.raises(ModelError, match=f"noise must be a finite number of at least 0, got {noise:g}"):
            upcycle(dense, tmp_path / "b", noise=noise)
    with pytest.raises(ModelError, match=r"only a Llama without biases can be upcycled, got .* \(qwen2\)"):
        upcycle(str(tiny_folder("qwen2")), tmp_path / "c")
    assert not any(tmp_path.iterdir())


def test_what_somebody_keeps_in_a_folder_stays(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "notes.txt"):
        monkeypatch.setattr("sys.argv", ["upcycle", str(tiny_folder("llama")), str(folder)])
        with pytest.raises(SystemExit, match=f"error: the mixture must go into a new or empty folder, got {folder}"):
            main()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
