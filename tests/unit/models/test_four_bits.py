"""Frozen weights in 4 bits: the numbers of bitsandbytes, and the gradient that whole weights would have."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from kitae.config.recipe import model_settings
from kitae.errors import ConfigError
from kitae.models.config import ModelConfig
from kitae.models.four_bits import BLOCK, BYTES, NF4, FourBitLinear, dequantise, quantise
from kitae.models.load import load_policy
from kitae.models.lora import merged_state
from kitae.models.policy import Policy
from kitae.models.written_folder import export_policy

SHAPE = (32, 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_scales_and_numbers_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    weight = (torch.randn(SHAPE) * 0.05).to(dtype)
    assert tuple(theirs.get_4bit_type("nf4", device="cpu").tolist()) == NF4
    codes, state = theirs.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    ours, scales = quantise(weight)
    assert torch.equal(codes.view(-1), ours) and torch.equal(state.absmax, scales)
    assert torch.equal(theirs.dequantize_4bit(codes, state), dequantise(ours, scales, SHAPE, dtype))


def test_every_weight_is_the_nearest_of_sixteen() -> None:
    weight = torch.linspace(-2, 2, 32 * 128).view(SHAPE)
    weight[3] = 0  # a block without a scale
    found = dequantise(*quantise(weight), SHAPE, torch.float32)
    scales = weight.view(-1, BLOCK).abs().amax(1, keepdim=True)
    table = torch.tensor(NF4) * scales[:, :, None]
    gaps = (weight.view(-1, BLOCK)[:, :, None] - table).abs().amin(-1)
    torch.testing.assert_close((weight - found).view(-1, BLOCK).abs(), gaps)
    codes, scales = quantise(weight)
    assert codes.nbytes + scales.nbytes == weight.numel() * BYTES


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_has_the_gradient_of_its_numbers(bias: bool) -> None:
    torch.manual_seed(0)
    layer = FourBitLinear(nn.Linear(128, 32, bias=bias).requires_grad_(False))
    x, dy = torch.randn(5, 128, requires_grad=True), torch.randn(5, 32)
    wanted = torch.autograd.grad(linear(x, layer.weight, layer.bias), x, dy)
    y = layer(x)
    torch.testing.assert_close(y, linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(torch.autograd.grad(y, x, dy), wanted)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert all(t.shape != SHAPE for t in kept), "the whole weight is not kept for the gradient"


@pytest.fixture
def policy(tiny_folder: Callable[[str], Path]) -> Policy:
    pytest.importorskip("peft")
    folder = str(tiny_folder("qwen2"))
    made = load_policy(ModelConfig(path=folder, lora_rank=4, lora_base="nf4", dtype="float32", device="cpu"))
    for name, parameter in made.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2)
    return made


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_exports_hold_what_the_adapters_were_trained_on(policy: Policy, tmp_path: Path) -> None:
    layers = [m for m in policy.model.modules() if isinstance(m, FourBitLinear)]
    assert len(layers) == 2 * 7 and type(policy.head) is nn.Linear
    assert all(p.dtype == torch.float32 for p in policy.model.parameters() if p.requires_grad)
    tokens = torch.arange(3, 20)
    export_policy(policy, tmp_path / "model")
    plain = load_policy(ModelConfig(path=str(tmp_path / "model"), dtype="float32", device="cpu"))
    torch.testing.assert_close(plain.score(tokens), policy.score(tokens), atol=1e-4, rtol=1e-4)
    names = merged_state(policy).keys()
    assert names == AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict().keys()
    adapted = ModelConfig(
        path=str(policy.source), adapter=str(tmp_path / "model/adapter"), lora_base="nf4", dtype="float32", device="cpu"
    )
    assert torch.equal(load_policy(adapted).score(tokens), policy.score(tokens)), "unmerged, on the same 4 bits"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_reference_shares_the_codes(policy: Policy) -> None:
    kept = {id(p): p for p in policy.model.parameters() if not p.requires_grad}
    model = copy.deepcopy(policy.model, kept)
    assert all(
        a.codes is b.codes and a.scales is b.scales
        for a, b in zip(model.modules(), policy.model.modules(), strict=True)
        if isinstance(a, FourBitLinear) and isinstance(b, FourBitLinear)
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "needs adapters, which learn instead of the weights"),
        (["model.lora_rank=4", "model.exact=true"], "needs model.exact = false"),
        (["model.lora_rank=4", "engine.kind=process", "engine.weights_dtype=float8"], "the same 4 bits"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_settings("tiny", ["model.lora_base=nf4", *overrides])
