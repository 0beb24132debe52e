"""Models that would compute something else with the attention of Kitae, and how they are found out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kitae.errors import ModelError
from kitae.models import attention_seam
from kitae.models.agreement import check_attention


@pytest.fixture
def loaded(tiny_folder: Callable[[str], Path]) -> Callable[..., Any]:
    """`loaded("qwen2", sliding_window=64)`: a tiny model with other settings and random weights."""

    def load(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
        attention_seam.register()
        config = AutoConfig.from_pretrained(tiny_folder(family), **settings)
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention_seam.NAME, dtype=dtype).eval()

    return load


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen2"])
def test_models_that_agree_stay_as_they_are(family: str, dtype: torch.dtype, loaded: Callable[..., Any]) -> None:
    model = loaded(family, dtype)
    check_attention(model, family)
    assert model.config._attn_implementation == attention_seam.NAME


def test_every_layer_with_a_window_must_hand_it_on(loaded: Callable[..., Any]) -> None:
    """One that does is not enough: the window is longer than what is tried."""
    model = loaded("qwen2", use_sliding_window=True, sliding_window=64, layer_types=["sliding_attention"] * 2)
    check_attention(model, "qwen2")
    model.model.layers[1].self_attn.sliding_window = None
    with pytest.raises(ModelError, match="a sliding_window of 64 that layer 1 does not hand on"):
        check_attention(model, "qwen2")


def test_a_layer_attends_once(loaded: Callable[..., Any]) -> None:
    model = loaded("llama")
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(ModelError, match="must attend once in a layer, got 2 times"):
        check_attention(model, "llama")
