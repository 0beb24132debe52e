"""The size of a model, read from its folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

from kitae.study.shape import read_model


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_the_shape_is_that_of_the_model(family: str, tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder(family)
    found, config = read_model(str(folder)), AutoConfig.from_pretrained(folder)
    assert found is not None and found.kind == family
    assert (found.hidden, found.layers) == (config.hidden_size, config.num_hidden_layers)
    assert (found.heads, found.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    if family == "qwen3_moe":
        assert found.inner == config.moe_intermediate_size * config.num_experts_per_tok
        left_out = config.num_experts - config.num_experts_per_tok
        assert found.idle == left_out * 3 * config.hidden_size * config.moe_intermediate_size * config.num_hidden_layers
    else:
        assert found.active == found.parameters
