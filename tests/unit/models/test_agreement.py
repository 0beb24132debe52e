"""Models that would compute something else with the attention of Kitae, and how they are found out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import load_script
from transformers import AutoConfig, AutoModelForCausalLM

from kitae.errors import ModelError
from kitae.models import attention_seam
from kitae.models.agreement import check_attention, own_states
from kitae.models.attention_seam import SelfAttention
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.masks import find_windows
from kitae.trainer.forward import recompute_layers

make_small = load_script("small_models").make_small


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
    check_attention(model, family, own_states(model))
    assert model.config._attn_implementation == attention_seam.NAME


def test_every_layer_with_a_window_must_hand_it_on(loaded: Callable[..., Any]) -> None:
    """One that does is not enough: the window is longer than what is tried."""
    model = loaded("qwen2", use_sliding_window=True, sliding_window=64, layer_types=["sliding_attention"] * 2)
    check_attention(model, "qwen2", own_states(model))
    model.model.layers[1].self_attn.sliding_window = None
    with pytest.raises(ModelError, match="a sliding_window of 64 that layer 1 does not hand on"):
        check_attention(model, "qwen2", own_states(model))


def test_a_window_that_is_in_the_mask_alone_is_found(loaded: Callable[..., Any]) -> None:
    model = loaded("qwen2", use_sliding_window=True, sliding_window=64, layer_types=["sliding_attention"] * 2)
    model.model.layers[1].self_attn.sliding_window = None
    assert find_windows(model, "qwen2")
    assert [getattr(layer.self_attn, attention_seam.WINDOW, None) for layer in model.model.layers] == [None, 64]
    context = SelfAttention(torch.arange(2))
    model(**attention_seam.keywords(context, torch.arange(2), torch.arange(2)))
    assert [call.window for call in context.calls] == [64, 64]


def test_a_window_must_be_that_of_the_mask(loaded: Callable[..., Any]) -> None:
    model = loaded("qwen2", use_sliding_window=True, sliding_window=64, layer_types=["sliding_attention"] * 2)
    model.model.layers[1].self_attn.sliding_window = 63
    with pytest.raises(ModelError, match=r"layer 1 .* got a window of 63 and a mask of 64"):
        find_windows(model, "qwen2")


def test_tokens_must_not_see_later_ones(loaded: Callable[..., Any]) -> None:
    model = loaded("llama")
    model.config.is_causal = False
    with pytest.raises(ModelError, match=r"layer 0 .* got a mask of tokens that see later ones"):
        find_windows(model, "llama")


@pytest.mark.parametrize("token", [0, 23])
def test_no_token_may_be_far_off(token: int, loaded: Callable[..., Any]) -> None:
    """The median of all tokens once hid what was wrong in the first ones."""
    model = loaded("llama")
    own = own_states(model)
    assert own is not None
    own[1][token] *= 1.01
    with pytest.raises(ModelError, match="must give the same"):
        check_attention(model, "llama", own)


@pytest.mark.parametrize(
    "family", ["granite_swa", "glm4_moe", "phimoe", "nemotron", "gpt_neo", "glm_moe_dsa", "xglm", "modernbert-decoder"]
)
def test_kernels_and_settings_keep_what_a_family_computes(family: str, tmp_path: Path) -> None:
    """Sinks that fused attention left out, angles for a part of a head, noise that routers read without training,
    attention to which no keyword comes, attention in a method of its own with local windows, an index of tokens."""
    make_small(family, tmp_path)
    policy = load_policy(ModelConfig(path=str(tmp_path), dtype="float32", device="cpu"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    row = torch.arange(5, 45)
    with torch.no_grad():
        expected = plain(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
    torch.testing.assert_close(policy.score(row), expected, atol=1e-4, rtol=0)


def test_an_index_of_tokens_bounds_the_context(tmp_path: Path) -> None:
    make_small("deepseek_v32", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, index_topk=50)
    config.save_pretrained(tmp_path)
    assert load_policy(ModelConfig(path=str(tmp_path), dtype="float32", device="cpu")).max_context == 50


@pytest.mark.parametrize("family", ["gpt_neo", "jamba"])
def test_activations_are_computed_again_where_no_keyword_comes(family: str, tmp_path: Path) -> None:
    make_small(family, tmp_path)
    policy = load_policy(ModelConfig(path=str(tmp_path), dtype="float32", device="cpu"))
    row, found = torch.arange(12), []
    for again in (False, True):
        if again:
            recompute_layers(policy.model)
            policy.model.train()
        policy.model.zero_grad()
        policy.hidden(row, row, SelfAttention(row)).square().sum().backward()
        found.append([p.grad.clone() for p in policy.model.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
