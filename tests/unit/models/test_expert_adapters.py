"""LoRA on a mixture of experts: its linear layers get adapters, its experts do not, and it can be exported."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kitae.errors import ModelError
from kitae.models.config import ModelConfig
from kitae.models.load import export_policy, load_policy
from kitae.models.policy import Policy


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


@pytest.mark.parametrize("targets", ["gate_up_proj", "q_proj, down_proj"])
def test_experts_cannot_be_named(targets: str, tiny_policy: Callable[..., Policy]) -> None:
    with pytest.raises(ModelError, match=r"model\.lora_targets"):
        tiny_policy("qwen3_moe", lora_rank=4, lora_targets=targets)
