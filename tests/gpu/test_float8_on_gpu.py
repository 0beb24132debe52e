"""Products with weights in 8 bits: kernels against plain torch, the decoder against its formula, engines that use it.

Kernels and decoder without a GPU, where Triton is installed, in fp32 by its interpreter:

    TRITON_INTERPRET=1 python -m pytest tests/gpu/test_float8_on_gpu.py
"""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kitae.engines.base import Completion, Request, SamplingParams, WeightUpdate
from kitae.engines.native.engine import NativeEngine
from kitae.engines.native.gpu_decoder import GpuDecoder
from kitae.engines.native.page_cache import KVCache
from kitae.errors import EngineError
from kitae.kernels import float8
from kitae.kernels.devices import has_triton
from kitae.kernels.norms import Norm, NormRule
from kitae.models.attention_seam import SelfAttention
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy

sys.path.append(str(Path(__file__).parents[1] / "unit/engines"))
from test_native_engine import prompts, with_engine

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
pytestmark = [
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, about rows of a tile that belong to nobody
]
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=on_gpu)]
TinyFolder = Callable[[str], Path]


@pytest.fixture(autouse=True)
def right_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.6 loses what rounding to 8 bits carries: there, torch converts."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    kinds = {"fp8e4nv": float8.KIND, "fp16": torch.float16, "fp32": torch.float32}

    def convert(numbers: Any, old: Any, new: Any, rounding: Any) -> Any:
        given = torch.from_numpy(numbers.copy()).view(kinds[old.name])
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[kinds[new.name].itemsize]
        return given.to(kinds[new.name]).view(bits).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The same on any device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def as_float8(x: Tensor, unit: Tensor) -> Tensor:
    """What 8 bits keep of it."""
    return (x.float() / unit).clamp(-float8.LARGEST, float8.LARGEST).to(float8.KIND).float() * unit


def near(got: Tensor, expected: Tensor, most: float) -> None:
    apart = float((got.float() - expected.float()).norm() / expected.float().norm())
    assert apart < most, apart


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(48, 32), (176, 80)])
def test_weights_are_kept_as_the_plain_code_rounds_them(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    from kitae.kernels.cuda import float8_products

    weight = made(*shape, dtype=dtype)
    kept = float8_products.room_for(weight)
    float8_products.store(weight, kept)
    assert torch.equal((kept.numbers.float() * kept.unit).to(dtype), float8.rounded(weight))
    float8_products.store(weight.zero_(), kept)
    assert not kept.numbers.float().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", list(NormRule))
def test_a_norm_in_8_bits_after_rows_with_units(dtype: torch.dtype, rule: NormRule) -> None:
    from kitae.kernels.cuda import decoding

    x, y, units = made(5, 96, dtype=dtype), made(5, 96, dtype=dtype, seed=1), made(5, seed=2).abs()
    norm = Norm(made(96, dtype=dtype, seed=3), 1e-6, rule)
    unit = float8.unit_of_normed(norm)
    total, eight = decoding.add_and_norm(x, y, None, norm, units=units, unit=unit)
    scaled = (y.float() * units[:, None]).to(torch.float32)
    expected_total, expected = decoding.add_and_norm(x, scaled.to(dtype), None, norm)
    near(total, expected_total, 1e-6 if dtype == torch.float32 else 5e-3)
    assert eight.dtype == float8.KIND
    near(eight.float() * unit, expected, 0.05)
    assert (eight.float() * unit - expected.float()).abs().max() <= 0.0626 * expected.float().abs().max()


def test_no_normed_row_overflows() -> None:
    """Not the one that has all of its mean square in the column of the largest gain."""
    from kitae.kernels.cuda import decoding

    for rule in NormRule:
        norm = Norm(made(64), 1e-6, rule)
        worst = (norm.weight + (rule == NormRule.LATE_PLUS_ONE)).abs().argmax()
        x = torch.zeros(2, 64, device=DEVICE)
        x[0, worst], x[1, worst] = 1e4, -1e4
        unit = float8.unit_of_normed(norm)
        _, eight = decoding.add_and_norm(x, None, None, norm, unit=unit)
        _, plain = decoding.add_and_norm(x, None, None, norm)
        assert plain.abs().max() <= unit * float8.LARGEST * 1.0001 and plain.abs().max() > 0.99 * unit * float8.LARGEST
        near(eight.float() * unit, plain, 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_rows_have_units_of_their_own(dtype: torch.dtype, gelu: bool) -> None:
    from kitae.kernels.cuda import decoding, float8_products

    both = made(6, 2 * 144, dtype=dtype)
    both[1] *= 100
    both[2] = 0
    eight, units = float8_products.gate(both, gelu=gelu)
    plain = decoding.swiglu(both, gelu=gelu)
    torch.testing.assert_close(units[:2], plain[:2].float().abs().amax(1) / float8.LARGEST, rtol=1e-5, atol=0)
    for row in range(6):
        kept = eight[row].float() * units[row]
        assert torch.equal(kept, as_float8(plain[row], units[row]))
        assert (kept - plain[row].float()).norm() <= 0.04 * plain[row].float().norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_in_8_bits(dtype: torch.dtype) -> None:
    from kitae.kernels.cuda import float8_products

    rows, weight = made(7, 64, dtype=dtype), made(48, 64, dtype=dtype, seed=1)
    unit, kept = float8.unit_of(rows), float8_products.room_for(weight)
    float8_products.store(weight, kept)
    got = float8_products.product((rows.float() / unit).to(float8.KIND), unit, kept, dtype)
    assert got.dtype == dtype
    near(got, as_float8(rows, unit) @ float8.rounded(weight.float()).t(), 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width", "n"), [(1, 64, 96), (3, 192, 48), (16, 128, 80)])
def test_kernels_for_a_few(dtype: torch.dtype, count: int, width: int, n: int) -> None:
    from kitae.kernels.cuda import float8_products, small_batch

    x, gain = 3 * made(count, width, dtype=dtype), made(width, dtype=dtype, seed=1).abs() + 0.1
    squares = (x.float() ** 2).view(count, -1, 64).sum(-1)
    zeros = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
    stream = small_batch.Stream(x.clone(), x * gain, squares, zeros)
    unit = float8.unit_of_normed(Norm(gain, 1e-6))
    rows = as_float8((x * gain).float() * torch.rsqrt(squares.sum(1) / width + 1e-6)[:, None], unit)

    for gated in (False, True):
        weight = made(2 * n if gated else n, width, dtype=dtype, seed=2)
        kept = float8_products.room_for(weight)
        float8_products.store(weight, kept)
        expected = rows @ (kept.numbers.float() * kept.unit).t()
        if gated:
            gate, up = expected.chunk(2, 1)
            expected = torch.nn.functional.silu(gate) * up
        near(small_batch.normed_product(stream, 1e-6, kept, gated=gated, unit=unit), expected, 0.02)

    inner = 1024  # in two parts
    act, down = made(count, inner, dtype=dtype, seed=3), made(width, inner, dtype=dtype, seed=4)
    act[0] *= 1000
    kept = float8_products.room_for(down)
    float8_products.store(down, kept)
    small_batch.add_product(stream, act, kept, gain)
    added = act.float() @ (kept.numbers.float() * kept.unit).t()
    near(stream.rows.float() - x.float(), added, 0.04)
    near(stream.gained, stream.rows.float() * gain.float(), 5e-3)
    near(stream.squares.sum(1), stream.rows.float().square().sum(1), 1e-3)
    assert not zeros.any()


def rounding(policy: Policy) -> None:
    """Weights that 8 bits keep as they are, in place."""
    for layer in policy.decoder.layers:  # type: ignore[attr-defined,union-attr]
        attn, mlp = layer.self_attn, layer.mlp
        for modules in ([attn.q_proj, attn.k_proj, attn.v_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]):
            whole = float8.rounded(torch.cat([m.weight for m in modules]))
            for module, part in zip(modules, whole.split([len(m.weight) for m in modules]), strict=True):
                module.weight.data.copy_(part)


def tiny(folder: Path, **settings: Any) -> Policy:
    values = {"dtype": "float32", "device": DEVICE.type, "path": str(folder), **settings}
    return load_policy(ModelConfig.model_validate(values))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_the_decoder_with_weights_in_8_bits(
    architecture: str, tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the modules with weights that were rounded: rows are in 8 bits besides."""
    if INTERPRETED:
        monkeypatch.setattr(float8, "has_products", lambda device: True)
    policy = tiny(tiny_folder(architecture))
    cache = KVCache(policy, 0.01, 16)
    found = GpuDecoder.of(policy, cache)
    assert found is not None
    found.use_float8(policy)
    tokens, positions = torch.arange(3, 23, device=DEVICE), torch.arange(20, device=DEVICE)
    slots = torch.full_like(positions, cache.pages * cache.page_size)
    with torch.inference_mode():
        got = found.hidden(tokens, positions, slots, SelfAttention(positions))
        plain = policy.hidden(tokens, positions, SelfAttention(positions))
        rounding(policy)
        rounded = policy.hidden(tokens, positions, SelfAttention(positions))
    near(got, rounded, 0.1)
    assert (got - plain).norm() > (got - rounded).norm()
    if architecture != "gemma3":
        assert found.small_batch_rows == (0 if DEVICE.type == "cpu" and not INTERPRETED else 16)


def answers(policy: Policy, tokens: int = 24, count: int = 24, **settings: Any) -> list[Completion]:
    requests = [Request(str(i), p, SamplingParams(max_tokens=tokens), i) for i, p in enumerate(prompts(count))]
    done = with_engine(policy, lambda e: asyncio.gather(*(e.generate(r) for r in requests)), **settings)
    assert isinstance(done, list)
    return done


def gap(policy: Policy, done: list[Completion]) -> float:
    """Of log-probs, mean: what the engine says and what the modules say of the same tokens."""
    found = []
    for prompt, completion in zip(prompts(len(done)), done, strict=True):
        row = torch.tensor(prompt + completion.tokens[:-1], device=policy.device)
        with torch.inference_mode():
            states = policy.hidden(
                row,
                torch.arange(len(row), device=policy.device),
                SelfAttention(torch.arange(len(row), device=policy.device)),
            )
            logp = torch.log_softmax(policy.logits(states[len(prompt) - 1 :]).float(), -1)
        expected = logp.gather(1, torch.tensor(completion.tokens, device=policy.device)[:, None])[:, 0].cpu()
        found.append((expected - torch.tensor(completion.logprobs)).abs())
    return torch.cat(found).mean().item()


@on_gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "settings", [{}, {"max_batch": 64, "draft_tokens": 0}, {"max_batch": 4}, {"cache_dtype": "int8"}]
)
def test_an_engine_samples_near_the_model(architecture: str, settings: dict[str, Any], tiny_folder: TinyFolder) -> None:
    policy = tiny(tiny_folder(architecture), dtype="bfloat16")
    exact, eight = answers(policy, **settings), answers(policy, weights_dtype="float8", **settings)
    assert [len(c.tokens) for c in eight] == [24] * 24
    assert gap(policy, exact) < gap(policy, eight) < 0.3


@on_gpu
@pytest.mark.parametrize("lora", [0, 4])
def test_new_weights_reach_the_copies(lora: int, tiny_folder: TinyFolder) -> None:
    """Updated in place, with adapters or without, the engine samples as one that starts with them."""
    policy = tiny(tiny_folder("llama"), lora_rank=lora)

    def change() -> None:
        torch.manual_seed(3)
        for name, parameter in policy.model.named_parameters():
            if parameter.requires_grad and "norm" not in name:
                parameter.data.add_(0.05 * torch.randn_like(parameter))
            elif parameter.requires_grad:
                parameter.data.mul_(1.5)

    async def use(engine: NativeEngine) -> list[Completion]:
        asked = [Request(f"a{i}", p, SamplingParams(max_tokens=12), i) for i, p in enumerate(prompts(20))]
        await asyncio.gather(*(engine.generate(r) for r in asked))
        change()
        await engine.update_weights(WeightUpdate(1))
        again = [Request(str(i), p, SamplingParams(max_tokens=24), i) for i, p in enumerate(prompts(24))]
        return list(await asyncio.gather(*(engine.generate(r) for r in again)))

    updated = with_engine(policy, use, weights_dtype="float8")
    assert [c.tokens for c in updated] == [c.tokens for c in answers(policy, weights_dtype="float8")]


@on_gpu
def test_a_row_does_not_depend_on_its_neighbours(tiny_folder: TinyFolder) -> None:
    """Whoever else has huge numbers: 40 sequences together, and in another company."""
    policy = tiny(tiny_folder("llama"))
    few = answers(policy, count=40, weights_dtype="float8", draft_tokens=0)
    many = answers(policy, count=80, weights_dtype="float8", draft_tokens=0)
    same = sum(a.tokens == b.tokens for a, b in zip(few, many, strict=False))
    assert same >= 38, same


def test_models_without_kernels_for_8_bits_are_refused(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(architecture: str, **change: Any) -> str:
        policy = tiny(tiny_folder(architecture))
        found = GpuDecoder.of(policy, KVCache(policy, 0.01, 16))
        assert found is not None
        found.layers[-1] = replace(found.layers[-1], **change)
        with pytest.raises(EngineError, match=r"engine.weights_dtype = 'float8'") as caught:
            found.use_float8(policy)
        assert not found.float8
        return str(caught.value)

    monkeypatch.setattr(float8, "has_products", lambda device: True)
    assert "experts have no kernels" in refused("qwen3_moe")
    assert "no norm before" in refused("llama", second=None)
    assert "multiples of 16, got 72" in refused("llama", down=torch.zeros(64, 72))
    monkeypatch.setattr(float8, "has_products", lambda device: False)
    assert "Hopper" in refused("llama")
