"""Routing replay on tiny random mixture-of-experts models."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from kitae.errors import ModelError
from kitae.models.routing import NO_RECORD, RouterLoad, record_routing, replay_routing, replayed_gates, takes_largest
from kitae.trainer.forward import recompute_layers

EXAMPLE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "algorithm_examples.json").read_text())[
    "routing"
]
LAYERS, EXPERTS, TOP_K, VOCAB = 2, 4, 2, 64

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": EXPERTS}),
    "qwen2": ("Qwen2MoeConfig", {"norm_topk_prob": False, "shared_expert_intermediate_size": 32}),
    "qwen3": ("Qwen3MoeConfig", {"norm_topk_prob": False, "head_dim": 8}),
    "qwen3-normalised": ("Qwen3MoeConfig", {"norm_topk_prob": True, "head_dim": 8}),
    "olmoe": ("OlmoeConfig", {"norm_topk_prob": False}),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": EXPERTS, "head_dim": 8}),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def make_model(config_class: str, **extra: Any) -> Any:
    config = getattr(transformers, config_class)(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=64,
        initializer_range=0.3,  # so that experts differ and routing matters
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **{"num_experts": EXPERTS, "num_key_value_heads": 2, **extra},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


@cache
def shared_model(family: str) -> Any:
    """Not to be changed by a test."""
    name, extra = FAMILIES[family]
    return make_model(name, **extra)


@pytest.fixture
def model() -> Any:
    return make_model("Qwen3MoeConfig", norm_topk_prob=False, head_dim=8)


def tokens_of(seed: int, rows: int = 2, length: int = 6) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def logp(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def recorded(model: Any, tokens: Tensor) -> Tensor:
    with record_routing(model) as record, torch.inference_mode():
        model(input_ids=tokens, use_cache=False)
    return record.experts_TLK


def shifted(experts_TLK: Tensor) -> Tensor:
    """A valid record that differs from this one at every position."""
    return (experts_TLK + 1) % EXPERTS


def test_worked_example() -> None:
    logits = torch.tensor([EXAMPLE["logits"]])
    natural, replay = (torch.tensor([EXAMPLE[key]]).long() for key in ("natural", "replay"))
    assert logits.topk(TOP_K).indices.equal(natural)
    for experts, renormalise, key in (
        (natural, True, "natural_gate"),
        (replay, True, "replay_gate"),
        (replay, False, "full_softmax_at_replay"),
    ):
        assert replayed_gates(logits, experts, renormalise)[0].tolist() == pytest.approx(EXAMPLE[key], abs=1e-6)


@pytest.mark.thorough(keep=2)
@every_family
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 3), length=st.integers(1, 8))
def test_replaying_native_experts_is_the_identity(family: str, seed: int, rows: int, length: int) -> None:
    model, tokens = shared_model(family), tokens_of(seed, rows, length)
    experts_TLK = recorded(model, tokens)
    assert experts_TLK.shape == (rows * length, LAYERS, TOP_K)
    with torch.no_grad():
        native = logp(model, tokens)
        with replay_routing(model, experts_TLK):
            torch.testing.assert_close(logp(model, tokens), native, rtol=0, atol=1e-5)


@every_family
def test_replaying_native_experts_leaves_every_gradient_alone(family: str) -> None:
    model, tokens = shared_model(family), tokens_of(1)
    native = gradients(model, logp(model, tokens)[..., 3].sum())
    with replay_routing(model, recorded(model, tokens)):
        replayed = gradients(model, logp(model, tokens)[..., 3].sum())
    assert_same(replayed, native)


@every_family
def test_replay_routes_to_the_recorded_experts_and_trains_the_router(family: str) -> None:
    model, tokens = shared_model(family), tokens_of(2)
    other_TLK = shifted(recorded(model, tokens))
    with replay_routing(model, other_TLK), record_routing(model) as used:
        replayed = logp(model, tokens)
    assert used.experts_TLK.equal(other_TLK)
    assert (replayed - logp(model, tokens)).abs().max() > 0.01
    trained = gradients(model, replayed[..., 3].sum())
    routers = [g for name, g in trained.items() if name.endswith((".gate.weight", ".router.weight"))]
    assert len(routers) == LAYERS
    assert all(g.isfinite().all() and g.abs().max() > 1e-4 for g in routers)


def test_gates_follow_the_current_router(model: Any) -> None:
    """The output moves with the router's weights although the experts do not."""
    tokens = tokens_of(3)
    experts_TLK = recorded(model, tokens)
    before = logp(model, tokens)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.neg_()  # would now choose the other two of four experts
    with replay_routing(model, experts_TLK), record_routing(model) as used:
        after = logp(model, tokens)
    assert used.experts_TLK.equal(experts_TLK)
    assert not recorded(model, tokens).equal(experts_TLK)
    assert (after - before).abs().max() > 0.01


@pytest.mark.parametrize(("family", "rounding"), [("mixtral", 0.0), ("qwen3", 0.0), ("gpt-oss", 0.1)])
def test_replaying_native_experts_is_the_identity_in_bfloat16(family: str, rounding: float) -> None:
    """GPT-OSS computes its gates in bfloat16; replay computes all gates in float32, then rounds."""
    name, extra = FAMILIES[family]
    model, tokens = make_model(name, **extra).to(torch.bfloat16), tokens_of(4)
    native_TLK = recorded(model, tokens)
    with torch.no_grad():
        native = logp(model, tokens)
        with replay_routing(model, native_TLK):
            torch.testing.assert_close(logp(model, tokens), native, rtol=0, atol=rounding)
        with replay_routing(model, shifted(native_TLK)):
            assert (logp(model, tokens) - native).abs().max() > 1.0


def test_positions_without_a_record_are_routed_natively(model: Any) -> None:
    tokens = tokens_of(5, rows=1)
    native_TLK = recorded(model, tokens)
    mixed_TLK = shifted(native_TLK)
    mixed_TLK[:3] = NO_RECORD
    with torch.no_grad(), replay_routing(model, mixed_TLK), record_routing(model) as used:
        replayed = logp(model, tokens)
    assert used.experts_TLK[:3].equal(native_TLK[:3])
    assert used.experts_TLK[3:].equal(mixed_TLK[3:])
    native = logp(model, tokens).detach()
    torch.testing.assert_close(replayed[0, :3], native[0, :3])  # later tokens do not reach back
    with torch.no_grad(), replay_routing(model, torch.full_like(native_TLK, NO_RECORD)):
        torch.testing.assert_close(logp(model, tokens), native)


def test_dense_layers_do_not_count() -> None:
    model, tokens = make_model("Qwen3MoeConfig", head_dim=8, mlp_only_layers=[0]), tokens_of(6)
    assert recorded(model, tokens).shape == (12, 1, TOP_K)


@pytest.mark.parametrize("experts_of", [shifted, lambda native_TLK: native_TLK])
def test_recomputed_layers_replay_the_same_record(model: Any, experts_of: Callable[[Tensor], Tensor]) -> None:
    tokens = tokens_of(7)
    experts_TLK = experts_of(recorded(model, tokens))
    model.train()
    with replay_routing(model, experts_TLK):
        plain = gradients(model, logp(model, tokens)[..., 3].sum())
    calls: list[int] = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda *_: calls.append(1))
    recompute_layers(model)
    with replay_routing(model, experts_TLK):
        recomputed = gradients(model, logp(model, tokens)[..., 3].sum())
    assert len(calls) == 2
    assert_same(recomputed, plain)


def test_recording_ignores_recomputation(model: Any) -> None:
    tokens = tokens_of(8)
    native_TLK = recorded(model, tokens)
    recompute_layers(model.train())
    with record_routing(model) as record:
        loss = logp(model, tokens)[..., 3].sum()
    loss.backward()
    assert record.experts_TLK.equal(native_TLK)


def test_backward_of_a_checkpointed_pass_must_run_inside(model: Any) -> None:
    tokens = tokens_of(9)
    experts_TLK = recorded(model, tokens)
    recompute_layers(model.train())
    with pytest.raises(ModelError, match="backward pass must run inside"), replay_routing(model, experts_TLK):
        logp(model, tokens)
    with torch.no_grad(), replay_routing(model, experts_TLK):
        logp(model, tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[:-1], "got 11 positions for 12 tokens"),
        (lambda r: r[:, :1], r"MoE layers = 2.*got torch.int16 \[12, 1, 2\]"),
        (lambda r: r[..., :1], r"experts per token = 2.*\[12, 2, 1\]"),
        (lambda r: r[0], r"\[2, 2\]"),
        (lambda r: r.float(), "integers.*float32"),
        (lambda r: r + EXPERTS, "different experts below 4"),
        (lambda r: r - EXPERTS - 1, "different experts below 4"),
        (lambda r: r.where(torch.arange(TOP_K) > 0, NO_RECORD), "-1 throughout, got .*token 0 of MoE layer 0"),
        (torch.ones_like, r"different experts.*got \[1, 1\]"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(change: Callable[[Tensor], Tensor], message: str) -> None:
    model, tokens = shared_model("qwen3"), tokens_of(10)
    with pytest.raises(ModelError, match=message), replay_routing(model, change(recorded(model, tokens))):
        logp(model, tokens)
    logp(model, tokens)  # and leaves no hook behind
    assert not any(m._forward_hooks for m in model.modules() if type(m).__name__.endswith("Router"))


def test_a_record_is_used_exactly_once() -> None:
    model, tokens = shared_model("qwen3"), tokens_of(11)
    experts_TLK = recorded(model, tokens)
    with pytest.raises(ModelError, match=r"no call in MoE layers \[0, 1\]"), replay_routing(model, experts_TLK):
        pass
    with pytest.raises(ModelError, match="second one in MoE layer 0"), replay_routing(model, experts_TLK):
        logp(model, tokens)
        logp(model, tokens)
    with pytest.raises(ModelError, match="second one in MoE layer 0"), record_routing(model):
        logp(model, tokens)
        logp(model, tokens)


def test_an_error_inside_is_not_hidden() -> None:
    model = shared_model("qwen3")
    with pytest.raises(ZeroDivisionError), record_routing(model):
        raise ZeroDivisionError


OTHER_GATES: list[tuple[str, dict[str, Any]]] = [
    (
        "DeepseekV3Config",
        {
            "n_routed_experts": EXPERTS,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
        },
    ),
    (
        "JambaConfig",
        {"attn_layer_period": 1, "attn_layer_offset": 0, "expert_layer_period": 1, "expert_layer_offset": 0},
    ),
]


@pytest.mark.parametrize(("name", "extra"), OTHER_GATES)
def test_routers_with_other_gates_are_refused(name: str, extra: dict[str, Any]) -> None:
    model = make_model(name, **extra)
    with pytest.raises(ModelError, match=r"gates from a softmax, got .*Router"), record_routing(model):
        logp(model, tokens_of(12))


def test_entropy_is_told_of_a_softmax_alone_and_the_load_in_any_case() -> None:
    def told(model: Any) -> set[str]:
        load = RouterLoad()
        with load.watch(model):
            logp(model, tokens_of(12))
        return set(load.numbers())

    sigmoid, unnormalised = (make_model(name, **extra) for name, extra in OTHER_GATES)
    assert told(sigmoid) == {"expert_load", "experts_idle"}
    assert told(unnormalised) == {"router_entropy", "expert_load", "experts_idle"}
    assert all(told(shared_model(family)) == told(unnormalised) for family in FAMILIES)


def test_models_without_known_routers_are_refused() -> None:
    class OddRouter(nn.Linear):
        pass

    with pytest.raises(ModelError, match="got Linear without any"), record_routing(nn.Linear(2, 2)):
        pass
    with pytest.raises(ModelError, match="got OddRouter"), record_routing(nn.Sequential(OddRouter(2, 2))):
        pass


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "smallest", "sums", "two inputs"])
def test_routers_are_known_by_trying(kind: str) -> None:
    def route(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.T
        experts = logits.topk(2, largest=kind != "smallest").indices
        gates = (logits.sigmoid() if kind == "sigmoid" else logits.softmax(-1)).gather(1, experts)
        return logits, gates if kind == "sums" else gates / gates.sum(-1, keepdim=True), experts

    def route_two(self: Any, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return route(self, x + bias)

    forward = route_two if kind == "two inputs" else route
    router: Any = type("OwnRouter", (nn.Module,), {"forward": forward})()
    router.weight = nn.Parameter(torch.randn(6, 16, generator=torch.Generator().manual_seed(0)))
    assert takes_largest(router) == (kind == "softmax")
    if kind == "sums":
        router.norm_topk_prob = False
        assert takes_largest(router)
