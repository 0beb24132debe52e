"""The compiled decoder on packed weights against the model's own modules, under pressure and after weight updates."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from kitae.engines.base import Completion, Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.native.cpu_runner import CpuRunner, PackedDecoder
from kitae.engines.native.engine import NativeEngine
from kitae.engines.native.page_cache import KVCache
from kitae.engines.native.runner import ModelRunner
from kitae.errors import EngineError
from kitae.kernels import float8
from kitae.kernels.cpu import packed
from kitae.models.agreement import gap
from kitae.models.attention_seam import SelfAttention
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.lora import merged_state
from kitae.models.policy import Policy
from kitae.models.routing import record_routing
from kitae.models.tiny import ARCHITECTURES, MIXTURES, make_tiny

pytestmark = pytest.mark.skipif(not packed.available(torch.float32), reason="no C++ compiler")
DTYPES = [
    pytest.param(name, marks=pytest.mark.skipif(not packed.available(getattr(torch, name)), reason="no AMX"), id=name)
    for name in ("float32", "bfloat16")
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
Load = Callable[..., Policy]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = tmp_path_factory.mktemp("packed")

    def get(architecture: str, dtype: str = "float32", hidden: int = 128, **settings: object) -> Policy:
        path = Path(folder / f"{architecture}-{hidden}")
        if not path.exists():
            make_tiny(path, architecture, hidden=hidden)
        return load_policy(ModelConfig.model_validate({"path": str(path), "dtype": dtype, "device": "cpu", **settings}))

    return get


def decoder_of(policy: Policy) -> PackedDecoder:
    decoder = PackedDecoder.of(policy, KVCache(policy, 0.02, 16))
    assert decoder is not None
    return decoder


def own_states(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(tokens))
    with torch.inference_mode():
        return policy.hidden(tokens, positions, SelfAttention(positions)).float()


@torch.inference_mode()
def in_rows(decoder: PackedDecoder, tokens: torch.Tensor, steps: int) -> torch.Tensor:
    """The last `steps` tokens one by one, the others before them at once, on pages in disorder."""
    pages = torch.tensor([[5, 2, 9, 0, 7, 3]], dtype=torch.int32)
    positions = torch.arange(len(tokens))
    slots = pages[0, positions // 16].long() * 16 + positions % 16
    parts = [range(len(tokens) - steps), *([t] for t in range(len(tokens) - steps, len(tokens)))]
    rows = [torch.tensor(list(part)) for part in parts]
    return torch.cat(
        [decoder.rows(tokens[r], positions[r], slots[r], torch.zeros(len(r), dtype=torch.int64), pages) for r in rows]
    ).float()


def some_tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("hidden", [64, 128, 256])
@pytest.mark.parametrize("architecture", ARCHITECTURES + MIXTURES)
def test_it_is_the_modules_but_for_rounding_in_float32(architecture: str, hidden: int, load: Load) -> None:
    policy, tokens = load(architecture, hidden=hidden), some_tokens(70)
    torch.testing.assert_close(
        in_rows(decoder_of(policy), tokens, 20), own_states(policy, tokens), rtol=1e-5, atol=1e-5
    )


@pytest.mark.skipif(not packed.available(torch.bfloat16), reason="no AMX")
@pytest.mark.parametrize("hidden", [64, 128, 256])
@pytest.mark.parametrize("architecture", ARCHITECTURES + MIXTURES)
def test_it_is_as_close_to_fp32_as_the_modules_are(architecture: str, hidden: int, load: Load) -> None:
    policy, tokens = load(architecture, "bfloat16", hidden=hidden), some_tokens(70)
    exact = load(architecture, "float32", hidden=hidden)
    with torch.no_grad():
        for p, q in zip(exact.model.parameters(), policy.model.parameters(), strict=True):
            p.copy_(q)
    truth, plain, got = own_states(exact, tokens), own_states(policy, tokens), in_rows(decoder_of(policy), tokens, 20)
    if architecture in MIXTURES:  # where rounding moves some tokens to another expert
        assert gap(got, truth) < 1.2 * gap(plain, truth) + 1e-3
    else:
        assert (got - truth).norm() < 1.2 * (plain - truth).norm() + 1e-3 * truth.norm()


@each_dtype
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_long_prompts_go_layer_by_layer(architecture: str, dtype: str, load: Load) -> None:
    decoder = decoder_of(load(architecture, dtype))
    tokens, positions = some_tokens(70, 2), torch.arange(70)
    with torch.inference_mode():
        got = decoder.hidden(tokens, positions, positions, SelfAttention(positions)).float()
    rows = in_rows(decoder, tokens, 1)
    if dtype == "bfloat16":
        assert gap(got, rows) < 0.03
    else:
        torch.testing.assert_close(got, rows, rtol=1e-5, atol=1e-5)


@each_dtype
@pytest.mark.parametrize("kind", ["window", "softcap", "sinks"])
def test_kinds_of_attention(kind: str, dtype: str, load: Load) -> None:
    """Those of layers that no small dense model here has."""
    policy, positions, tokens = load("llama", dtype), torch.arange(70), some_tokens(70)
    recorder = SelfAttention(positions)
    with torch.inference_mode():
        policy.hidden(tokens, positions, recorder)
    sinks = torch.randn(policy.heads, generator=torch.Generator().manual_seed(0)).to(policy.dtype)
    value = {"window": 9, "softcap": 0.5, "sinks": sinks}[kind]
    asked = [replace(call, **{kind: value}) for call in recorder.calls]  # type: ignore[arg-type]
    decoder = PackedDecoder(policy, KVCache(policy, 0.02, 16), asked)
    with torch.inference_mode():
        expected = decoder.hidden(tokens, positions, positions, SelfAttention(positions)).float()
    tolerance = {"rtol": 0.1, "atol": 0.15} if dtype == "bfloat16" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(in_rows(decoder, tokens, 20), expected, **tolerance)
    assert (expected - own_states(policy, tokens)).abs().max() > 1e-2, "it makes no difference"


def mixture(folder: Path, **settings: Any) -> Policy:
    """A random Qwen3-MoE of another shape than the tiny one."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 3}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=259, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=512, initializer_range=0.1, eos_token_id=2, pad_token_id=0, **{**sizes, **settings},
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tiny(folder / "tokens", "llama")
    AutoTokenizer.from_pretrained(folder / "tokens").save_pretrained(folder)
    return load_policy(ModelConfig(path=str(folder), dtype="float32", device="cpu"))


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    "settings",
    [
        {"num_experts": 130, "num_experts_per_tok": 7, "moe_intermediate_size": 16},
        {"num_experts": 3, "num_experts_per_tok": 3, "norm_topk_prob": True},
        {"num_experts": 5, "num_experts_per_tok": 1, "moe_intermediate_size": 80},
        {"mlp_only_layers": [0, 2]},
        {"mlp_only_layers": [1], "moe_intermediate_size": 16},
    ],
    ids=["many experts", "all of them", "one of five", "dense ones around", "a dense one between"],
)
def test_mixtures_of_other_shapes(settings: dict[str, Any], tmp_path: Path) -> None:
    """Experts of no row and of all, fewer than a panel has columns, layers that are wider than their experts."""
    policy, tokens, positions = mixture(tmp_path, **settings), some_tokens(70), torch.arange(70)
    decoder, found = decoder_of(policy), dict[int, torch.Tensor]()
    with torch.inference_mode(), record_routing(policy.model) as record:
        expected = policy.hidden(tokens, positions, SelfAttention(positions))
    torch.testing.assert_close(in_rows(decoder, tokens, 20), expected, rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        decoder.hidden(
            tokens, positions, positions, SelfAttention(positions), lambda i, e: found.update({i: e.clone()})
        )
    told_TLK = torch.stack([found[i] for i in range(len(found))], 1)
    assert torch.equal(told_TLK.sort(-1).values, record.experts_TLK.int().sort(-1).values)


@each_dtype
def test_of_experts_that_are_as_good_the_first_are_taken(dtype: str, load: Load) -> None:
    """Each once, whatever the logits are."""
    policy, positions = load("mixtral", dtype), torch.arange(9)
    decoder, heard = decoder_of(policy), list[list[list[int]]]()
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "mlp.gate." in name:
                weight.zero_()
    decoder.pack()

    def hear(_: int, experts_TK: torch.Tensor) -> None:
        heard.append(experts_TK.tolist())

    with torch.inference_mode():
        decoder.hidden(some_tokens(9), positions, positions, SelfAttention(positions), hear)
    assert heard == [[[0, 1]] * 9] * policy.layers


@each_dtype
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
@pytest.mark.parametrize("pages", [2, 22])
def test_a_cache_with_less_room_than_the_probe(pages: int, architecture: str, dtype: str, load: Load) -> None:
    """Positions that no sequence can have are not read from memory that nobody wrote."""
    policy = load(architecture, dtype)
    page = 2 * policy.layers * policy.kv_heads * policy.head_dim * policy.dtype.itemsize
    cache = KVCache(policy, (pages + 0.01) * page / 2**30, 1)
    assert cache.pages == pages and PackedDecoder.of(policy, cache) is not None


def test_what_it_does_not_cover_runs_its_own_modules(load: Load) -> None:
    policy = load("llama", hidden=80)
    runner = CpuRunner(policy, KVCache(policy, 0.02, 16))
    assert runner.decoder is None
    assert generate(policy, requests("a"))[0].tokens


@pytest.mark.parametrize(
    ("model", "engine"),
    [({"exact": True}, {}), ({}, {"cache_dtype": "int8"}), ({"plain": True}, {})],
    ids=["exact", "8 bits", "not fast"],
)
def test_who_has_kernels_of_another_kind_or_none_gets_no_packed_copies(
    model: dict[str, Any], engine: dict[str, Any], load: Load
) -> None:
    async def kind() -> type[ModelRunner]:
        made = NativeEngine(load("llama", **model), EngineConfig(memory_gb=0.02, **engine))
        await made.close()
        return type(made.runner)

    assert asyncio.run(kind()) is ModelRunner


def generate(policy: Policy, asked: list[Request], **settings: Any) -> list[Completion]:
    return asyncio.run(_generate(policy, asked, **settings))[0]


async def _generate(policy: Policy, asked: list[Request], **settings: Any) -> tuple[list[Completion], int]:
    own = {name: settings.pop(name) for name in ("plain", "page_size") if name in settings}
    engine = NativeEngine(policy, EngineConfig(**{"memory_gb": 0.02, **settings}), **own)
    found = await asyncio.gather(*(engine.generate(r) for r in asked))
    preempted = engine.stats().preemptions
    await engine.close()
    return found, preempted


def requests(name: str, tokens: int = 12) -> list[Request]:
    """Three pairs that share a prompt, of lengths around the border of a page."""
    sampling = SamplingParams(max_tokens=tokens)
    lengths = (31, 32, 49)
    return [
        Request(f"{name}/{i}", tuple(range(5, 5 + lengths[i // 2])), sampling, seed=i, share=f"{i // 2}")
        for i in range(6)
    ]


def told(completions: list[Completion]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(c.tokens, c.logprobs) for c in completions]


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("architecture", ARCHITECTURES + MIXTURES)
def test_answers_are_those_of_the_modules(architecture: str, load: Load) -> None:
    policy = load(architecture)
    got = generate(policy, requests("a", 40))
    for ours, plain in zip(got, generate(policy, requests("a", 40), plain=True), strict=True):
        assert ours.tokens == plain.tokens
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(plain.logprobs), atol=1e-5, rtol=1e-5)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt_oss"])
def test_an_answer_in_float32_is_the_same_alone_among_others_and_after_preemption(
    architecture: str, load: Load
) -> None:
    """To the last bit: rows do not depend on each other, and what is computed again is computed alike."""
    policy, asked = load(architecture), requests("a", 60)
    together = generate(policy, asked)
    assert [c for r in asked for c in told(generate(policy, [r]))] == told(together)
    page = 2 * policy.layers * policy.kv_heads * 8 * policy.head_dim * 4 / 2**30
    crowded, preempted = asyncio.run(_generate(policy, asked, memory_gb=40.5 * page, page_size=8))
    assert preempted > 0, "the cache was not small enough to test preemption"
    assert told(crowded) == told(together)


@pytest.mark.thorough(keep=2)
@each_dtype
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_threads_change_nothing(architecture: str, dtype: str, load: Load) -> None:
    policy, before = load(architecture, dtype), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(told(generate(policy, requests("a"))))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


@each_dtype
def test_engines_beside_each_other_and_a_trainer(dtype: str, load: Load) -> None:
    """Their threads have teams of their own, and share no room."""
    first, second = load("llama", dtype), load("mixtral", dtype)
    expected = [told(generate(policy, requests("a", 40))) for policy in (first, second)]
    ended = threading.Event()

    def train() -> None:
        weight = torch.randn(128, 128, requires_grad=True)
        while not ended.is_set():
            (torch.randn(64, 128) @ weight).relu().sum().backward()

    async def both() -> list[tuple[list[Completion], int]]:
        return await asyncio.gather(*(_generate(policy, requests("a", 40)) for policy in (first, second)))

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        got = [told(found) for found, _ in asyncio.run(both())]
    finally:
        ended.set()
        trainer.join()
    assert got == expected


@pytest.mark.thorough(keep=4)
@each_dtype
@pytest.mark.parametrize("lora", [0, 4], ids=["all weights", "adapters"])
@pytest.mark.parametrize("move", [False, True], ids=["in place", "moved"])
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_no_packed_copy_outlives_a_weight_update(
    architecture: str, move: bool, lora: int, dtype: str, load: Load
) -> None:
    """The same weights must give the same tokens and log-probs, whatever was served before."""
    served, fresh = (load(architecture, dtype, lora_rank=lora) for _ in range(2))

    async def across_updates() -> list[list[Completion]]:
        engine = NativeEngine(served, EngineConfig(memory_gb=0.02))
        assert isinstance(engine.runner, CpuRunner) and engine.runner.decoder is not None
        found = [await asyncio.gather(*(engine.generate(r) for r in requests("before")))]
        for version in (1, 2):
            change(served, version, move)
            await engine.update_weights(WeightUpdate(version))
            found.append(await asyncio.gather(*(engine.generate(r) for r in requests(str(version)))))
        await engine.close()
        return found

    found = asyncio.run(across_updates())
    for version, got in enumerate(found):
        if version:
            change(fresh, version, False)
        assert told(got) == told(generate(fresh, requests("fresh")))
    assert found[0][0].logprobs != found[1][0].logprobs != found[2][0].logprobs


def change(policy: Policy, version: int, move: bool) -> None:
    """All that is trained."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.requires_grad:
                p.add_((torch.randn(p.shape, generator=generator) * 0.02).to(p.dtype))
            if move:
                p.data = p.data.clone()


def held_bytes(engine: NativeEngine) -> int:
    """Of packed and merged copies."""
    assert isinstance(engine.runner, CpuRunner) and engine.runner.decoder is not None
    decoder = engine.runner.decoder
    copies = [*(matrix.data for matrix in decoder._matrices()), *decoder._merged._wholes, *decoder._room.values()]
    return sum(copy.untyped_storage().nbytes() for copy in copies)


@pytest.mark.thorough(keep=4)
@each_dtype
@pytest.mark.parametrize("lora", [0, 4], ids=["all weights", "adapters"])
@pytest.mark.parametrize("move", [False, True], ids=["in place", "moved"])
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_an_engine_that_stands_still_has_no_copies(
    architecture: str, move: bool, lora: int, dtype: str, load: Load
) -> None:
    """They are made anew, of the weights that there are then."""
    served, fresh = (load(architecture, dtype, lora_rank=lora) for _ in range(2))

    async def across_updates() -> list[list[Completion]]:
        engine = NativeEngine(served, EngineConfig(memory_gb=0.02))
        found = []
        for version in (1, 2):
            await asyncio.gather(*(engine.generate(r) for r in requests("before")))
            assert held_bytes(engine) > 0
            await engine.pause()
            assert held_bytes(engine) == 0
            filler = [torch.full((4096,), torch.nan) for _ in range(400)]  # so that copies get memory with nonsense
            change(served, version, move)
            del filler
            await engine.update_weights(WeightUpdate(version))
            await engine.resume()
            found.append(await asyncio.gather(*(engine.generate(r) for r in requests(str(version)))))
        await engine.close()
        return found

    for version, got in enumerate(asyncio.run(across_updates()), 1):
        change(fresh, version, False)
        assert told(got) == told(generate(fresh, requests("fresh")))


def test_answers_in_flight_go_on_after_the_copies_were_given_back(load: Load) -> None:
    policy, asked = load("qwen2"), requests("a", 60)

    async def interrupted() -> list[Completion]:
        engine = NativeEngine(policy, EngineConfig(memory_gb=0.02))
        running = [asyncio.create_task(engine.generate(r)) for r in asked]
        for tokens in (20, 100, 200):
            while engine.stats().generated_tokens < tokens:
                await asyncio.sleep(0.001)
            await engine.pause()
            assert engine.stats().running > 0 and held_bytes(engine) == 0
            await engine.resume()
        found = [await task for task in running]
        await engine.close()
        return found

    assert told(asyncio.run(interrupted())) == told(generate(policy, asked))


@each_dtype
@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    "name", ["q_proj", "k_proj", "v_proj", "gate_proj", "mlp.gate.", "experts.gate_up", "experts.down"]
)
def test_weights_that_are_no_numbers_end_the_engine(name: str, value: str, dtype: str, load: Load) -> None:
    """As with the modules: neither scores nor logits of a router that are no numbers may become probabilities."""
    policy = load("llama" if "proj" in name and "." not in name else "mixtral", dtype)

    async def broken() -> None:
        engine = NativeEngine(policy, EngineConfig(memory_gb=0.02))
        assert isinstance(engine.runner, CpuRunner) and engine.runner.decoder is not None
        with torch.no_grad():
            for path, parameter in policy.model.named_parameters():
                if name in path:
                    parameter[..., 3, 5] = float(value)
        await engine.update_weights(WeightUpdate(1))
        try:
            await engine.generate(requests("a")[0])
        finally:
            await engine.close()

    with pytest.raises(EngineError, match="not finite"):
        asyncio.run(broken())


@torch.inference_mode()
def test_weights_may_change_between_two_steps(load: Load) -> None:
    """Steps with new weights read what older ones have left in the cache, as those of the modules do."""
    policy, tokens = load("llama"), some_tokens(36)
    table = torch.tensor([[3, 1, 2]], dtype=torch.int32)
    fast = CpuRunner(policy, KVCache(policy, 0.02, 16))
    plain = ModelRunner(policy, KVCache(policy, 0.02, 16), plain=True)
    for t in range(36):
        if t % 10 == 9:
            with torch.inference_mode(False):
                change(policy, t, move=t == 29)
            fast.weights_changed()
        fast._pack()
        step = tokens[t : t + 1], torch.tensor([t + 1], dtype=torch.int32), table
        got, expected = (runner._logits(runner._decode_states(*step)) for runner in (fast, plain))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_adapters_are_merged_into_the_copies(architecture: str, targets: str, load: Load) -> None:
    policy = load(architecture, lora_rank=4, lora_targets=targets)
    change(policy, 1, False)
    assert CpuRunner(policy, KVCache(policy, 0.02, 16)).decoder is not None
    beside = generate(policy, requests("a"), plain=True)
    for merged, plain in zip(generate(policy, requests("a")), beside, strict=True):
        assert merged.tokens == plain.tokens
        torch.testing.assert_close(torch.tensor(merged.logprobs), torch.tensor(plain.logprobs), atol=2e-5, rtol=1e-5)


def round_as_eights(policy: Policy) -> None:
    """Weights become what 8 bits keep of them: those of one product together."""
    decoder: Any = policy.decoder
    for layer in decoder.layers:
        attn, mlp = layer.self_attn, layer.mlp
        for parts in ([attn.q_proj, attn.k_proj, attn.v_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]):
            whole = float8.rounded(torch.cat([m.weight for m in parts]))
            for module, part in zip(parts, whole.split([len(m.weight) for m in parts]), strict=True):
                module.weight.data.copy_(part)


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_weights_in_8_bits_are_rounded_copies(architecture: str, lora: int, load: Load) -> None:
    """Also after an update, and with adapters, which are merged first; the policy's own stay as they are."""
    policy = load(architecture, lora_rank=lora)
    change(policy, 1, False)
    before = [p.clone() for p in policy.model.parameters()]

    async def use() -> list[Completion]:
        engine = NativeEngine(policy, EngineConfig(memory_gb=0.02, weights_dtype="float8"))
        try:
            await asyncio.gather(*(engine.generate(r) for r in requests("first")))
            change(policy, 2, False)
            await engine.update_weights(WeightUpdate(1))
            return list(await asyncio.gather(*(engine.generate(r) for r in requests("b"))))
        finally:
            await engine.close()

    eight = asyncio.run(use())
    for parameter, was in zip(policy.model.parameters(), before, strict=True):
        parameter.data.copy_(was)
    change(policy, 2, False)
    plain = generate(policy, requests("b"))
    merged = load(architecture)
    merged.base.load_state_dict(merged_state(policy), strict=False)
    round_as_eights(merged)
    for got, expected, other in zip(eight, generate(merged, requests("b")), plain, strict=True):
        assert got.tokens == expected.tokens
        torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(expected.logprobs), atol=2e-5, rtol=1e-5)
        assert got.logprobs != other.logprobs


def test_who_has_no_copies_in_8_bits_is_told_so(load: Load) -> None:
    def refused(architecture: str, **settings: Any) -> str:
        policy = load(architecture, exact=settings.pop("exact", False))
        config = {"memory_gb": 0.02, "weights_dtype": "float8", **settings}
        with pytest.raises(EngineError) as caught:
            NativeEngine(policy, EngineConfig.model_validate(config))
        return str(caught.value)

    broken = load("qwen3")
    broken.base.model.norm.weight.data[3] = float("nan")
    with pytest.raises(EngineError, match="not finite"):
        NativeEngine(broken, EngineConfig(memory_gb=0.02, weights_dtype="float8"))
    assert "experts have no kernels" in refused("qwen3_moe")
    assert "engine.cache_dtype = 'int8'" in refused("llama", cache_dtype="int8")
    assert "an exact policy needs engine.weights_dtype" in refused("llama", exact=True)


@each_dtype
def test_the_copies_are_as_large_as_the_weights(dtype: str, load: Load) -> None:
    policy = load("llama", dtype)
    matrices = [p for p in policy.model.parameters() if p.dim() == 2]
    size = sum(p.numel() * p.element_size() for p in matrices)
    assert size <= decoder_of(policy).packed_bytes < size * 1.1
