"""LoRA on a mixture of experts: its linear layers get adapters, its experts do not, and it can be exported."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kitae.errors import ModelError
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.written_folder import export_policy


def test_linear_layers_alone_are_adapted_and_exported(tiny_policy: Callable[..., Policy], tmp_path: Path) -> None:
    policy = tiny_policy("qwen3_moe", lora_rank=4)
    adapted = {
        name.split(".lora_")[0].rpartition(".")[2] for name, p in policy.model.named_parameters() if "lora_" in name
    }
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
        tokens = torch.arange(5, 25)
        found, plain = policy.score(tokens), tiny_policy("qwen3_moe").score(tokens)
        export_policy(policy, tmp_path / "model")
        again = load_policy(ModelConfig(path=str(tmp_path / "model"), dtype="float32", device="cpu")).score(tokens)
    torch.testing.assert_close(again, found, atol=1e-4, rtol=0)
    assert (found - plain).abs().max() > 1e-3


@pytest.mark.parametrize("targets", ["all-linear", "q_proj, gate_proj, up_proj, down_proj"])
def test_a_dense_block_between_others_is_adapted(
    targets: str, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its layers have the names that experts had once."""
    folder = tiny_folder("qwen3_moe")
    config = AutoConfig.from_pretrained(folder, mlp_only_layers=[0])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    settings = ModelConfig(path=str(tmp_path), dtype="float32", device="cpu", lora_rank=4, lora_targets=targets)
    policy = load_policy(settings)
    adapted = {name.split(".lora_")[0] for name, _ in policy.base.named_parameters() if "lora_" in name}
    dense = {f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")}
    assert dense < adapted and not any(name.startswith("model.layers.1.mlp") for name in adapted)
    assert policy.base.config.model_type == "qwen3_moe"


@pytest.mark.parametrize(
    ("targets", "named"),
    [("gate_up_proj", "gate_up_proj"), ("q_proj, down_proj", "down_proj"), ("gate", "gate"), ("q_proj,mlp", "mlp")],
)
def test_experts_and_routers_cannot_be_named(targets: str, named: str, tiny_policy: Callable[..., Policy]) -> None:
    message = rf"model\.lora_targets must name linear layers, which experts and routers are not, got '{named}'"
    with pytest.raises(ModelError, match=message):
        tiny_policy("qwen3_moe", lora_rank=4, lora_targets=targets)
