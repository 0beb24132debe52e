"""Copies of weights that adapters are merged into: what the fused decoder of a GPU reads of a policy with LoRA."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitae.engines.native.decoder_layers import is_known
from kitae.engines.native.fused_decoder import FusedDecoder
from kitae.engines.native.page_cache import KVCache
from kitae.models.attention_seam import SelfAttention
from kitae.models.layer_kinds import is_llama_layer
from kitae.models.lora import import_peft, merged_state, plain_part
from kitae.models.policy import Policy

TinyPolicy = Callable[..., Policy]


def decoder_of(policy: Policy) -> FusedDecoder:
    """Without its probe, which needs the kernels of a GPU."""
    positions = torch.arange(4)
    recorder = SelfAttention(positions)
    with torch.no_grad():
        policy.hidden(torch.tensor([5, 6, 7, 8]), positions, recorder)
    return FusedDecoder(policy, KVCache(policy, 0.01, 16), recorder.calls)


def change(policy: Policy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2, generator=generator)


def read(decoder: FusedDecoder, policy: Policy) -> list[tuple[Tensor, Tensor]]:
    """What the decoder reads, and what an export would write."""
    state, found = merged_state(policy), []
    for i, layer in enumerate(decoder.layers):
        names = {
            "self_attn.q_proj,self_attn.k_proj,self_attn.v_proj": layer.qkv,
            "self_attn.o_proj": layer.out,
            "mlp.gate_proj,mlp.up_proj": layer.gate_up,
            "mlp.down_proj": layer.down,
        }
        for parts, got in names.items():
            whole = torch.cat([state[f"model.layers.{i}.{part}.weight"] for part in parts.split(",")])
            found.append((got.detach(), whole))
    return found


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj", "down_proj"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_they_follow_the_adapters(architecture: str, targets: str, tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(architecture, lora_rank=4, lora_targets=targets)
    assert is_known(policy)
    change(policy, 0)
    decoder = decoder_of(policy)
    places = [got.data_ptr() for got, _ in read(decoder, policy)]
    for seed in (1, 2):
        change(policy, seed)
        assert not all(torch.equal(got, whole) for got, whole in read(decoder, policy)), (
            "copies do not move by themselves"
        )
        decoder.refresh()
        for got, whole in read(decoder, policy):
            torch.testing.assert_close(got, whole, rtol=1e-6, atol=1e-6)
    assert places == [got.data_ptr() for got, _ in read(decoder, policy)], "graphs read them where they are"


def test_without_adapters_nothing_is_copied(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama")
    decoder = decoder_of(policy)
    own: Any = policy.decoder.layers[0]  # type: ignore[index, union-attr]
    assert decoder.layers[0].down.data_ptr() == own.mlp.down_proj.weight.data_ptr()
    assert decoder.layers[0].qkv.data_ptr() == own.self_attn.q_proj.weight.data_ptr()
    assert not decoder._merged._parts


def test_the_trainer_does_not_take_adapted_layers_for_plain_ones(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama", lora_rank=4)
    layer: Any = policy.decoder.layers[0]  # type: ignore[index, union-attr]
    assert is_llama_layer(layer, adapted=True) and not is_llama_layer(layer)


def test_adapters_that_do_more_than_add_are_left_to_their_modules() -> None:
    peft = import_peft()

    def adapted(**settings: Any) -> Any:
        model = nn.Sequential(nn.Linear(6, 6, bias=True))
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"], **settings)).base_model.model[0]

    plain = nn.Linear(3, 3)
    assert plain_part(plain) is plain and plain_part(nn.LayerNorm(3)) is None
    assert plain_part(adapted()) is not None
    assert plain_part(adapted(use_dora=True)) is None and plain_part(adapted(lora_bias=True)) is None
    off = adapted()
    off.enable_adapters(False)
    assert plain_part(off) is None
