"""Routing replay for mixture-of-experts models: a forward pass uses the experts that another one chose.

    with record_routing(model) as record:
        model(tokens)
    with replay_routing(model, record.experts_TLK):
        loss(model(tokens)).backward()

Replay fixes the indices only. Gates are computed again from the current logits at these indices and follow the model's
rule for normalising them, so the router is still trained. Reference and teacher passes do not replay.

Covered: routers that transformers writes as a module `…Router` which returns (logits, gates, experts), with gates that
are a softmax over all experts, renormalised over the chosen ones unless `norm_topk_prob` is off. Tested: Mixtral,
Qwen2-MoE, Qwen3-MoE, OLMoE, GPT-OSS, and non-reentrant activation checkpointing. Each forward pass checks by the
router's own output that it is of this kind.

Passes of other threads are neither recorded nor replayed, as an engine may sample from the same modules meanwhile. An
engine receives the experts of its passes by `watch_routing`, and stores them beside its cache.

Refused: other gates (tested: the sigmoid router with a bias for selection of DeepSeek-V3, Jamba), and models without
router modules. Not covered: servers that return their experts, models that are sharded over ranks, compiled models.

Legend: T tokens of the pass in row order, L MoE layers (dense layers do not count), K experts per token, E experts.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kitae.data.packing import NO_RECORD
from kitae.errors import ModelError

Routed = tuple[Tensor, Tensor, Tensor]  # logits_TE, gates_TK, experts_TK
Act = Callable[[int, nn.Module, Routed], Routed]  # (layer, router, what it returned) → what its caller gets


def replayed_gates(logits_TE: Tensor, experts_TK: Tensor, renormalise: bool) -> Tensor:
    """softmax(logits) at the given experts, in fp32. Renormalised, they sum to 1, as a softmax over the chosen experts
    only.

    Logits [2, 1, 1.2, -1] at experts [0, 1]: [0.536, 0.197], renormalised [0.731, 0.269].
    """
    gates_TK = logits_TE.float().softmax(-1).gather(-1, experts_TK)
    return gates_TK / gates_TK.sum(-1, keepdim=True) if renormalise else gates_TK


@dataclass(frozen=True, slots=True)
class RouterShape:
    """The choices of a model's routers at each position: `RouterShape(layers=48, top_k=8, experts=128)`.

    layers: those that mix experts; top_k: how many of its experts each layer chooses.
    """

    layers: int
    top_k: int
    experts: int

    @staticmethod
    def of(model: nn.Module) -> RouterShape:
        """Raises `ModelError` if the model has no routers."""
        routers: list[Any] = routers_of(model)
        return RouterShape(len(routers), int(routers[0].top_k), max(int(router.num_experts) for router in routers))

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype that can number the experts."""
        return torch.uint8 if self.experts <= 256 else torch.int16

    @property
    def bytes(self) -> int:
        """Bytes of the choices at one position."""
        return self.layers * self.top_k * self.dtype.itemsize


@dataclass(slots=True)
class RoutingRecord:
    """The experts of one forward pass: `[T, K]` for each MoE layer. Complete when the context has ended."""

    layers: dict[int, Tensor] = field(default_factory=dict)

    @property
    def experts_TLK(self) -> Tensor:
        """int16. One token, two layers, top-2: `[[[0, 2], [3, 1]]]`."""
        return torch.stack([self.layers[i] for i in range(len(self.layers))], dim=1)


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Record the experts chosen in the one forward pass that runs inside."""
    record = RoutingRecord()

    def keep(layer: int, router: nn.Module, routed: Routed) -> Routed:
        record.layers[layer] = routed[2].to(torch.int16)
        return routed

    with _hooked(routers_of(model), keep):
        yield record


@contextmanager
def watch_routing(routers: list[nn.Module], receive: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `receive(layer, experts_TK)` after each router in passes of this thread.

    Nothing is checked, and nothing waits for the device, so a pass may be captured as a graph, together with `receive`.
    """
    thread = threading.get_ident()

    def tell(layer: int, router: nn.Module, _: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            receive(layer, output[2])

    with hanging(tell, routers):
        yield


def check_routers(model: nn.Module, forward: Callable[[], object]) -> None:
    """Raise `ModelError` if a model's routers cannot be replayed. forward: any pass of it."""
    with torch.no_grad(), record_routing(model):
        forward()


class RouterLoad:
    """Statistics of a model's routers in some forward passes, with `with load.watch(model): …` around each of them.

    For routers whose gates are not a softmax of their first output, only the load is recorded; routers that do not
    return (logits, gates, experts) are ignored. Legend: L layers that mix experts, E experts of each.
    """

    def __init__(self) -> None:
        self._tokens: Counter[int] = Counter()  # by layer
        self._counts_E: dict[int, Tensor] = {}  # tokens of each expert
        self._spread: dict[int, Tensor] = {}  # Σ over tokens of the softmax's entropy, over that of a uniform one
        self._softmax: list[Tensor] = []  # for each pass, whether its gates are a softmax
        self._replayed: list[Tensor] = []  # recorded choices, and how many of them the router would not have made

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        thread = threading.get_ident()

        def look(layer: int, router: nn.Module, _: Any, output: Any) -> None:
            if threading.get_ident() == thread and not in_backward() and _is_routed(output):
                logits_TE, _, experts_TK = routed = _detached(output)
                self._softmax.append(_from_softmax(routed))
                self._add(layer, logits_TE, experts_TK)

        with hanging(look, list(filter(is_router, model.modules()))):
            yield

    def _add(self, layer: int, logits_TE: Tensor, experts_TK: Tensor) -> None:
        log_p_TE = logits_TE.float().log_softmax(-1)
        counts_E = torch.bincount(experts_TK.flatten(), minlength=logits_TE.shape[1])
        spread = -(log_p_TE.exp() * log_p_TE).sum() / math.log(max(2, logits_TE.shape[1]))
        self._tokens[layer] += len(logits_TE)
        self._counts_E[layer] = self._counts_E.get(layer, 0) + counts_E
        self._spread[layer] = self._spread.get(layer, 0) + spread

    def compare(self, native_TK: Tensor, recorded_TK: Tensor) -> None:
        """Compare what a router would have chosen with the recorded choices."""
        known_T = recorded_TK[:, 0] != NO_RECORD
        other_T = (native_TK.sort(-1).values != recorded_TK.sort(-1).values).any(-1) & known_T
        self._replayed.append(torch.stack((known_T.sum(), other_T.sum())))

    def numbers(self) -> dict[str, Tensor]:
        """The statistics as means over layers; {} if no router was seen.

        router_entropy: 1 if all experts are equally likely; only if gates are a softmax. expert_load: that of the
        busiest expert, 1 if all have the same. experts_idle: the share of experts without any token. routing_flips: the
        share of recorded choices that the routers would now make differently.
        """
        if not self._tokens:
            return {}
        known, other = torch.stack(self._replayed).sum(0).double() if self._replayed else (None, None)
        counts_LE = torch.stack([*self._counts_E.values()]).double()
        spread_L = torch.stack([s / self._tokens[layer] for layer, s in self._spread.items()])
        return {
            **({"router_entropy": spread_L.mean()} if torch.stack(self._softmax).all() else {}),
            "expert_load": (counts_LE.amax(-1) / counts_LE.mean(-1)).mean(),
            "experts_idle": (counts_LE == 0).double().mean(),
            **({} if known is None else {"routing_flips": other / known.clamp(min=1)}),
        }


@contextmanager
def replay_routing(model: nn.Module, experts_TLK: Tensor, load: RouterLoad | None = None) -> Iterator[None]:
    """Use recorded experts in the one forward pass that runs inside, and in its recomputation in the backward pass.

    load: receives what the routers would have chosen. With activation checkpointing the backward pass must run inside
    too: outside, it would recompute native routing.
    """
    routers = routers_of(model)
    _check_record(experts_TLK, routers)
    to_recompute: set[int] = set()

    def replay(layer: int, router: nn.Module, routed: Routed) -> Routed:
        logits_TE, gates_TK, native_TK = routed
        if len(experts_TLK) != len(native_TK):
            raise ModelError(
                f"a routing record must cover its forward pass, got {len(experts_TLK)} positions "
                f"for {len(native_TK)} tokens"
            )
        recorded_TK = experts_TLK[:, layer].to(native_TK)
        experts_TK = native_TK.where(recorded_TK == NO_RECORD, recorded_TK)
        if in_backward():
            to_recompute.clear()
        else:
            to_recompute.update([layer] if gates_TK.requires_grad else [])
            if load is not None:
                load.compare(native_TK, recorded_TK)
        return logits_TE, _gates(router, logits_TE, experts_TK).to(gates_TK), experts_TK

    with _hooked(routers, replay):
        yield
    if to_recompute and model.training and any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise ModelError("with activation checkpointing the backward pass must run inside replay_routing, it did not")


@contextmanager
def _hooked(routers: list[nn.Module], act: Act) -> Iterator[None]:
    """Call `act` on the output of each router, once in a forward pass and whenever the backward pass recomputes it.

    Each router has its own place in the record, because layers are recomputed in any order, any number of times.
    """
    called: set[int] = set()
    thread = threading.get_ident()

    def hook(layer: int, router: nn.Module, _: Any, output: Any) -> Any:
        if not in_backward():
            if threading.get_ident() != thread:
                return output
            if layer in called:
                raise ModelError(f"a routing record is of one forward pass, got a second one in MoE layer {layer}")
            called.add(layer)
            _check_output(router, output)
        return act(layer, router, output)

    with hanging(hook, routers):
        yield
    if missed := sorted(set(range(len(routers))) - called):
        raise ModelError(f"a forward pass must call every router, got no call in MoE layers {missed}")


@contextmanager
def hanging(hook: Callable[[int, nn.Module, Any, Any], Any], routers: list[nn.Module]) -> Iterator[None]:
    """Register a hook on every router, which receives the number of its layer."""
    handles = [router.register_forward_hook(partial(hook, layer)) for layer, router in enumerate(routers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def in_backward() -> bool:
    """Whether autograd is running on this thread, so that a forward pass is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _gates(router: nn.Module, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Gates by the router's own rule; routers without a setting for it renormalise."""
    return replayed_gates(logits_TE, experts_TK, bool(getattr(router, "norm_topk_prob", True)))


def is_router(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Router")


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers in layer order. Raises `ModelError` if there are none."""
    routers = list(filter(is_router, model.modules()))
    if not routers:
        raise ModelError(f"routing replay needs router modules, got {type(model).__name__} without any")
    for router in routers:
        if not (hasattr(router, "top_k") and hasattr(router, "num_experts")):
            raise _unknown(router)
    return routers


def _is_routed(output: Any) -> bool:
    """Whether a router's output is (logits, gates, experts)."""
    if not (isinstance(output, tuple) and len(output) == 3 and all(isinstance(x, Tensor) for x in output)):
        return False
    logits, gates, experts = output
    return logits.ndim == experts.ndim == 2 and gates.shape == experts.shape and not experts.is_floating_point()


@torch.no_grad()
def takes_largest(router: Any) -> bool:
    """Whether a router takes the experts with the largest logits, with gates as in `replayed_gates`.

    It is run, without hooks, on rows in which all experts differ.
    """
    weight_EH = router.weight
    rows = torch.linspace(1, 9, 16 * weight_EH.shape[1], device=weight_EH.device).sin().view(16, -1)
    try:
        routed = type(router).forward(router, rows.to(weight_EH.dtype))
        _check_output(router, routed)
    except (ModelError, RuntimeError, TypeError, ValueError, AttributeError):
        return False
    logits_TE, _, experts_TK = routed
    least_T, others_TE = (
        logits_TE.gather(1, experts_TK).amin(1),
        logits_TE.scatter(1, experts_TK, float("-inf")),
    )
    return bool((least_T >= others_TE.amax(1)).all())


def _check_output(router: nn.Module, output: Any) -> None:
    """Raise if the gates are not those that `_gates` computes from logits and experts."""
    if not _is_routed(output):
        raise _unknown(router)
    logits_TE, gates_TK, experts_TK = _detached(output)
    if not _close(_gates(router, logits_TE, experts_TK).to(gates_TK), gates_TK).all():
        raise _unknown(router)


def _from_softmax(routed: Routed) -> Tensor:
    """Whether gates have the proportions of a softmax of the logits. The result stays on the device."""
    logits_TE, gates_TK, experts_TK = routed
    shares_TK = gates_TK / gates_TK.sum(-1, keepdim=True)
    return _close(replayed_gates(logits_TE, experts_TK, True).to(gates_TK), shares_TK).all()


def _close(a: Tensor, b: Tensor) -> Tensor:
    """Equality up to rounding."""
    return torch.isclose(a, b, rtol=0, atol=max(1e-5, torch.finfo(b.dtype).eps), equal_nan=True)


def _detached(routed: Routed) -> Routed:
    logits_TE, gates_TK, experts_TK = routed
    return logits_TE.detach(), gates_TK.detach(), experts_TK


def _unknown(router: nn.Module) -> ModelError:
    return ModelError(
        "routing replay needs routers that return (logits, gates, experts) with gates from a softmax, "
        f"got {type(router).__name__}"
    )


def _check_record(experts_TLK: Tensor, routers: list[nn.Module]) -> None:
    layers, top_k, experts = len(routers), int(routers[0].top_k), int(routers[0].num_experts)  # type: ignore[arg-type]
    if experts_TLK.ndim != 3 or experts_TLK.shape[1:] != (layers, top_k) or experts_TLK.is_floating_point():
        raise ModelError(
            f"a routing record must be integers [tokens, MoE layers = {layers}, experts per token = {top_k}], "
            f"got {experts_TLK.dtype} {list(experts_TLK.shape)}"
        )
    sorted_TLK = experts_TLK.sort(-1).values
    known_TL = ((sorted_TLK >= 0) & (sorted_TLK < experts)).all(-1) & (sorted_TLK.diff(dim=-1) > 0).all(-1)
    bad_TL = ~(known_TL | (sorted_TLK == NO_RECORD).all(-1))
    if bad_TL.any():
        token, layer = bad_TL.nonzero()[0].tolist()
        raise ModelError(
            f"a position of a routing record must hold {top_k} different experts below {experts}, or {NO_RECORD} "
            f"throughout, got {experts_TLK[token, layer].tolist()} at token {token} of MoE layer {layer}"
        )
