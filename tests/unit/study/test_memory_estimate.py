"""The memory of a run: what it grows with, against what runs have taken, and what is said where it does not fit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kitae.config.recipe import override_config, parse_config
from kitae.config.root import RLConfig
from kitae.models.policy import Policy
from kitae.study import memory_estimate as module
from kitae.study.memory_estimate import Footprint, footprint, hold, trained_parameters
from kitae.study.model_shape import ModelShape, read_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMOLLM2 = ModelShape(134_515_008, 576, 1536, 30, 49152, 9, 3, 64, "llama")
QWEN = ModelShape(1_543_714_304, 1536, 8960, 28, 151_936, 12, 2, 128, "qwen2")
UPCYCLED = ModelShape(
    373_462_848, 576, 3072, 30, 49152, 9, 3, 64, "mixtral", idle=159_252_480, mixture=True
)  # SmolLM2-135M with 4 experts, 2 for each token
GIB = 2.0**30


def config(*settings: str) -> RLConfig:
    values: dict[str, Any] = {"data": {"task": "sort"}, "model": {"device": "cpu"}, "sampling": {"max_tokens": 16}}
    parsed = parse_config(values)
    assert isinstance(parsed, RLConfig)
    return override_config(parsed, settings)


def size(c: RLConfig, tokens: float = 4000, model: ModelShape = SMOLLM2, dtype: torch.dtype = torch.float32) -> float:
    return sum(hold(c, model, CPU, dtype, tokens).values())


@pytest.fixture(autouse=True)
def _no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every machine: a compiler, and no AMX."""
    monkeypatch.setattr("kitae.kernels.cpu.packed.available", lambda dtype: dtype == torch.float32)


WHOLE = 2.0  # bytes a weight that masters took more when all below was measured in bfloat16

_MOVING = (
    "algorithm.reference=ema",
    "algorithm.reference.every=1",
    "algorithm.reference.mix=0.1",
    "algorithm.kl.coef=0.1",
)
MEASURED = {
    # settings, tokens of a batch, dtype: GiB at the peak of `python benchmarks/memory.py` on a CPU without AMX
    "plain": (("training.token_budget=1024",), torch.float32, 3.72),
    "longer rows": (("training.token_budget=2048", "training.prompts_per_step=32"), torch.float32, 4.74),
    "bf16": (("training.token_budget=1024",), torch.bfloat16, 3.52),
    "moments in 16 bits": (("training.token_budget=1024", "training.moments=bfloat16"), torch.float32, 3.26),
    "activations again": (
        ("training.token_budget=2048", "training.prompts_per_step=32", "training.checkpoint_activations=true"),
        torch.float32,
        3.67,
    ),
}


@pytest.mark.parametrize("name", MEASURED)
def test_near_what_runs_have_taken(name: str) -> None:
    settings, dtype, measured = MEASURED[name]
    c = config("training.prompts_per_step=16", "training.group_size=8", *settings)
    less = WHOLE * SMOLLM2.parameters / GIB if dtype == torch.bfloat16 else 0.0
    assert size(c, dtype=dtype) / GIB == pytest.approx(measured - less, rel=0.1)


@pytest.mark.parametrize(("settings", "measured"), [((), 7.63), (("model.lora_rank=16",), 4.21)])
def test_near_what_runs_of_a_mixture_have_taken(settings: tuple[str, ...], measured: float) -> None:
    """With adapters the mean of two runs, 4.04 and 4.38."""
    batch = "training.token_budget=1024", "training.prompts_per_step=16", "training.group_size=8"
    assert size(config(*batch, *settings), model=UPCYCLED) / GIB == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("tokens", "budget", "chunk", "measured"),
    [
        (16_341, 16_384, 8192, 45.0),
        (16_341, 16_384, 16384, 47.1),
        (32_695, 32_768, 32768, 72.7),
        (65_385, 16_384, 16384, 48.6),
        (65_385, 13_100, 8192, 47.7),
        (65_385, 8_000, 4096, 39.2),
        (61_440, 6_100, 3072, 36.2),
    ],
)
def test_near_what_a_gpu_has_taken(
    tokens: int, budget: int, chunk: int, measured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of training alone, moments and all, as docs/performance.md has them: so without cache and libraries."""
    monkeypatch.setattr(module, "logit_chunk", lambda training, device: chunk)
    c = config(f"training.token_budget={budget}")
    parts = hold(c, QWEN, CUDA, torch.bfloat16, tokens)
    less = WHOLE * QWEN.parameters / GIB
    assert (sum(parts.values()) - parts["cache"] - parts["libraries"]) / GIB == pytest.approx(measured - less, rel=0.1)


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        (("algorithm.preset=ppo",), SMOLLM2.parameters * 20),  # and the reference of its KL term
        (("algorithm.reference=frozen", "algorithm.kl.coef=0.1"), SMOLLM2.parameters * 4),
        (_MOVING, SMOLLM2.parameters * 8),  # an average in fp32, whatever the model is in
        (("training.moments=bfloat16",), -SMOLLM2.parameters * 4),
    ],
)
def test_what_is_held_counts(settings: tuple[str, ...], more: float) -> None:
    assert size(config(*settings)) - size(config()) == pytest.approx(more, rel=0.01)


def test_what_enters_norms_of_queries_and_keys_is_kept_too() -> None:
    c = config("training.token_budget=1000")
    normed, plain = (hold(c, replace(QWEN, kind=kind), CUDA, torch.bfloat16, 4000) for kind in ("qwen3", "qwen2"))
    assert normed["activations"] - plain["activations"] == pytest.approx(1000 * 28 * (12 + 2) * 128 * 2)


def test_adapters_are_counted_as_they_are() -> None:
    """As PEFT counts them for SmolLM2: rank 16, all seven maps of a layer, or those that are named."""
    assert trained_parameters(config("model.lora_rank=16"), SMOLLM2) == 4_884_480
    some = config("model.lora_rank=16", "model.lora_targets=q_proj,v_proj")
    assert trained_parameters(some, SMOLLM2) == 16 * 30 * (1152 + 768)


@pytest.mark.parametrize("kind", [("=frozen",), ("=reset", ".every=2")])
def test_a_reference_of_adapters_is_adapters(kind: tuple[str, ...]) -> None:
    settings = [f"algorithm.reference{x}" for x in kind]
    parts = hold(config("model.lora_rank=16", "algorithm.kl.coef=0.1", *settings), SMOLLM2, CPU, torch.bfloat16, 4000)
    assert parts["reference"] == 4 * 4_884_480


def test_a_name_is_not_a_part_of_another() -> None:
    """`qkv_proj` ends as `v_proj` does, and `gate_up_proj` as `up_proj`."""
    assert trained_parameters(config("model.lora_rank=16", "model.lora_targets=qkv_proj,gate_up_proj"), SMOLLM2) == 0


def test_masters_of_weights_in_bfloat16_take_two_bytes() -> None:
    parts = {dtype: hold(config(), SMOLLM2, CPU, dtype, 4000) for dtype in (torch.float32, torch.bfloat16)}
    assert parts[torch.float32]["masters"] == 0
    assert parts[torch.bfloat16]["masters"] == 2 * SMOLLM2.parameters
    adapted = hold(config("model.lora_rank=16"), SMOLLM2, CPU, torch.bfloat16, 4000)
    assert adapted["adapters"] == 4 * 4_884_480 and "masters" not in adapted  # in fp32 whatever the model is in
    critic = hold(config("algorithm.preset=ppo"), SMOLLM2, CPU, torch.bfloat16, 4000)["critic"]
    assert critic == (2 + 2 + 4 + 8) * SMOLLM2.parameters


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral"])
def test_adapters_are_those_that_the_model_gets(
    family: str, tiny_policy: Callable[..., Policy], tiny_folder: Callable[[str], Path]
) -> None:
    """Experts get none."""
    model = read_model(str(tiny_folder(family)))
    assert model is not None
    trained = [p.numel() for p in tiny_policy(family, lora_rank=4).model.parameters() if p.requires_grad]
    assert trained_parameters(config("model.lora_rank=4"), model) == sum(trained)


def test_engines_of_their_own_have_weights_of_their_own() -> None:
    """And packed copies, and read what is published once for all of them."""
    weights, two = SMOLLM2.parameters * 4, config("engine.kind=process", "engine.count=2")
    assert size(two) - size(config("pipeline.max_staleness=1")) == pytest.approx(4 * weights + 2 * 0.75e9, rel=0.01)
    adapted = (override_config(c, ["model.lora_rank=4"]) for c in (config(), two))
    one, both = (hold(c, SMOLLM2, CUDA, torch.bfloat16, 4000) for c in adapted)
    assert all(both[name] == 2 * one[name] > 0 for name in ("cache", "merged weights"))


SERVED = ("engine.kind=vllm", "engine.urls=['http://127.0.0.1:8000']")


@pytest.mark.parametrize(
    ("settings", "copied"),
    [
        ((), 2 * 30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536)),
        (("model.lora_targets=q_proj",), 2 * 30 * 576 * (576 + 2 * 192)),  # of one product with keys and values
        (("model.lora_targets=o_proj,down_proj",), 2 * 30 * 576 * (576 + 1536)),
        (("model.exact=true",), 0),
        (("model.plain=true",), 0),
        (SERVED, 0),
    ],
)
def test_what_adapters_are_merged_into(settings: tuple[str, ...], copied: int) -> None:
    parts = hold(config("model.lora_rank=4", *settings), SMOLLM2, CUDA, torch.bfloat16, 4000)
    assert parts.get("merged weights", 0) == copied


@pytest.mark.parametrize(("settings", "engines"), [((), 1), (("engine.kind=process", "engine.count=2"), 2)])
def test_copies_in_8_bits(settings: tuple[str, ...], engines: int) -> None:
    """Of q, k, v and the MLP, a byte each; a CPU has its packed copies anyway."""
    chosen = config("engine.weights_dtype=float8", *settings)
    copied = engines * 30 * 576 * (576 + 2 * 192 + 3 * 1536)
    assert hold(chosen, SMOLLM2, CUDA, torch.bfloat16, 4000)["weights in 8 bits"] == copied
    plain = config(*settings)
    assert hold(chosen, SMOLLM2, CPU, torch.float32, 4000) == hold(plain, SMOLLM2, CPU, torch.float32, 4000)
    assert "weights in 8 bits" not in hold(plain, SMOLLM2, CUDA, torch.bfloat16, 4000)


def test_exact_engines_and_servers_pack_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitae.kernels.cpu.packed.available", lambda dtype: True)
    without = (("model.exact=true",), ("model.plain=true",), ("engine.cache_dtype=int8",), SERVED)
    for dtype in (torch.float32, torch.bfloat16):
        for settings in ((), *without):
            parts = hold(config("pipeline.max_staleness=1", *settings), SMOLLM2, CPU, dtype, 4000)
            assert parts.get("packed weights", 0) == (0 if settings else dtype.itemsize * SMOLLM2.parameters)


def test_a_cpu_packs_what_it_has_merged() -> None:
    parts = hold(config("model.lora_rank=4"), SMOLLM2, CPU, torch.float32, 4000)
    assert {"merged weights", "packed weights"} <= parts.keys()


def test_adapters_are_merged_where_half_of_what_is_left_is_enough() -> None:
    chosen = config("model.lora_rank=4")
    parts = hold(chosen, SMOLLM2, CUDA, torch.bfloat16, 4000)
    needed = parts["weights"] + parts["cache"] + 2 * parts["merged weights"]
    for free, merged in ((needed + 1, True), (needed - 1, False)):
        assert ("merged weights" in hold(chosen, SMOLLM2, CUDA, torch.bfloat16, 4000, free)) == merged


def test_what_an_engine_gives_back_counts_where_both_work_at_once() -> None:
    """Or where it is more than gradients and activations, in whose place it is."""
    ahead = ("pipeline.max_staleness=1",)
    packed = 4 * SMOLLM2.parameters
    assert size(config(*ahead)) - size(config()) == packed
    assert size(config("engine.keep_cache=false")) == size(config(*ahead, "engine.keep_cache=false"))
    cache = hold(config(), SMOLLM2, CPU, torch.float32, 4000)["cache"]
    assert size(config()) - size(config("engine.keep_cache=false")) == cache
    few = ("model.lora_rank=4", "training.token_budget=16", "sampling.max_tokens=1")
    beside, turns = (hold(config(*few, *more), SMOLLM2, CPU, torch.float32, 100) for more in (ahead, ()))
    engine, trainer = (("packed weights", "merged weights"), ("gradients", "activations"))
    assert sum(map(turns.__getitem__, (*engine, *trainer))) == pytest.approx(sum(map(beside.__getitem__, engine)))


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_the_cache_of_a_server_is_its_own(device: torch.device) -> None:
    assert hold(config(*SERVED), SMOLLM2, device, torch.float32, 4000)["cache"] == 0


def test_what_waits_beside_a_cache_counts_where_it_is_the_same_memory() -> None:
    full = config("engine.memory_gb=0.01", "sampling.max_tokens=4096", "engine.max_batch=64", "engine.host_memory_gb=1")
    assert hold(full, SMOLLM2, CPU, torch.float32, 4000)["cache"] == pytest.approx(1.01 * GIB)
    assert hold(full, SMOLLM2, CUDA, torch.float32, 4000)["cache"] == pytest.approx(0.01 * GIB)


def test_numbers_of_8_bits_have_their_scales() -> None:
    chosen = config("engine.cache_dtype=model"), config("engine.cache_dtype=int8")
    plain, small = (hold(c, SMOLLM2, CPU, torch.float32, 4000)["cache"] for c in chosen)
    assert small / plain == 68 / 256


@pytest.mark.parametrize(
    ("free", "relief"),
    [
        (9.9, ()),
        (3.6, ("training.moments=bfloat16",)),
        (3.0, ("training.moments=bfloat16", "training.token_budget=1024")),
        (2.7, ("training.moments=bfloat16", "training.token_budget=512")),
        (1.4, None),
        (0.5, ()),
    ],
)
def test_what_would_fit_is_named(free: float, relief: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least change first; nothing, where it fits or nothing helps."""
    monkeypatch.setattr(module, "room", lambda _: free * GIB)
    c = config("training.prompts_per_step=64")
    found = footprint(c, SMOLLM2, CPU, torch.bfloat16, 9000)
    assert found.fits == (free > 9)
    if relief is not None:
        assert found.relief == relief
        return
    assert "model.lora_rank=16" in found.relief
    assert size(override_config(c, found.relief), 9000, dtype=torch.bfloat16) <= free * GIB


def test_a_footprint_adds_up() -> None:
    assert Footprint({"weights": 2.0, "cache": 1.0}, 3.0).fits and not Footprint({"weights": 2.0}, 1.9).fits
