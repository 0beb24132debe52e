"""The seam between Kitae and mixers, the modules of transformers that carry a state from token to token.

Short convolutions, Mamba, the gated delta rule and other linear attention ask a cache for the state of the tokens
before, and give it the state after theirs. A mixer knows nothing of packed rows: it computes a batch of sequences. So
its calls go to the context of the pass, which says which tokens of the row are the next ones of which sequence, and
what their states are. The mixer's own forward pass computes every batch; a mixer is recognised by its questions to the
cache, not by its name.

Most layers do not hand the keyword `kitae` to their mixers, so the context is that of the thread (`pass_context`).
"""

import inspect
import math
from collections.abc import Callable
from functools import cache
from types import CodeType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kitae.errors import ModelError
from kitae.models.pass_context import of_thread

States = dict[str, Tensor]
"""The states of B sequences in one mixer, each `[B, …]`; an empty one stands before the first token."""

_CACHES = ("cache_params", "past_key_values")
_QUESTIONS = {
    "get_conv_state",
    "get_recurrent_state",
    "update_conv_state",
    "update_recurrent_state",
    "get_linear_cache",
}
_NUMBER, _STEPS = "kitae_mixer", "kitae_steps"


class StateContext(Protocol):
    """Which tokens of a row follow which. `carry` runs all tokens of the row, each once."""

    def carry(self, call: "MixerCall") -> None: ...


class MixerCache:
    """What a mixer takes for a cache of transformers, with the states of one batch in one layer."""

    def __init__(self, states: States) -> None:
        self.states = states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"conv{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"recurrent{state_idx}")

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.states.get("linear")

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self.states["linear"] = state

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.states[f"recurrent{state_idx}"] = state
        return state

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Keep the last inputs of a convolution, `[B, C, T]`; returns them with those before, or with zeros before
        the first token where there are few."""
        name = f"conv{state_idx}"
        before = self.states.get(name)
        size = before.shape[-1] if before is not None else conv_kernel_size or inputs.shape[-1]
        if before is not None:
            inputs = torch.cat((before, inputs), -1)
        elif inputs.shape[-1] < size:
            inputs = nn.functional.pad(inputs, (size - inputs.shape[-1], 0))
        self.states[name] = inputs[..., inputs.shape[-1] - size :]
        return inputs


class MixerCall:
    """One call of a mixer, on a row of T tokens. number: of the mixer, among those of the model.

    A context calls `run` for batches of tokens that together are all of the row; of what it computes twice, the first
    counts. steps: the mixer goes on from a state with one token at a time only, as Mamba's first kind does.
    """

    def __init__(
        self,
        number: int,
        tokens: int,
        device: torch.device,
        own: "Callable[[Tensor, MixerCache | None], Any]",
        steps: bool,
    ) -> None:
        self.number, self.tokens, self.device, self.steps = number, tokens, device, steps
        self._own = own
        self._rows: list[Tensor] = []
        self._found: list[tuple[Tensor | None, ...]] = []
        self.alone = False  # the mixer returns one tensor, not a tuple

    def anew(self) -> "MixerCall":
        """The same call, of which nothing has run."""
        return MixerCall(self.number, self.tokens, self.device, self._own, self.steps)

    def run(self, rows_BL: Tensor, states: States | None = None) -> States:
        """Compute the tokens at these rows, B sequences of L tokens that go on from the states; returns those after.

        Row T is a token of zeros, for what fills up a batch; the states after it mean nothing. None: there is none
        before, and nobody asks for those after. A mixer may write into the states that it is given.
        """
        if states and self.steps and rows_BL.shape[1] > 1:
            for rows_B1 in torch.split(rows_BL, 1, dim=1):
                states = self.run(rows_B1, states)
            return states
        known = None if states is None else MixerCache(dict(states))
        found = self._own(rows_BL, known)
        self.alone = not isinstance(found, tuple)
        kept = () if known is None else tuple(known.states.values())
        parts = (found,) if self.alone else found
        # What is also in the cache is a state, which a mixer may return beside its output.
        self._found.append(tuple(None if any(part is state for state in kept) else part for part in parts))
        self._rows.append(rows_BL.flatten())
        return {} if known is None else known.states

    def result(self) -> Any:
        """What the mixer returns for the row, `[1, T, …]`."""
        rows = torch.cat(self._rows)
        place_T = rows.new_full((self.tokens + 1,), len(rows))
        place_T.scatter_reduce_(0, rows, torch.arange(len(rows), device=rows.device), "amin")
        outs = []
        for parts in zip(*self._found, strict=True):
            if all(isinstance(part, Tensor) and part.dim() > 2 for part in parts):
                flat = torch.cat([part.flatten(0, 1) for part in parts])
                outs.append(flat.index_select(0, place_T[:-1])[None] if len(flat) == len(rows) else None)
            else:
                outs.append(None)
        return outs[0] if self.alone else tuple(outs)


def is_mixer(module: nn.Module) -> bool:
    """Whether a module asks a cache for states."""
    code = _code(module)
    return code is not None and not _QUESTIONS.isdisjoint(code.co_names)


def _goes_in_steps(module: nn.Module) -> bool:
    """Whether a mixer reads the state that its scan should begin with for single tokens alone."""
    code = _code(module)
    if code is None or "get_recurrent_state" not in code.co_names:
        return False
    handed_on = {name for names in code.co_consts if isinstance(names, tuple) for name in names}
    return handed_on.isdisjoint(("initial_state", "initial_states"))


def _code(module: nn.Module) -> CodeType | None:
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def attach(model: nn.Module) -> None:
    """Send the calls of a model's mixers to the context of the pass."""
    for number, module in enumerate(mixers_of(model)):
        setattr(module, _NUMBER, number)
        setattr(module, _STEPS, _goes_in_steps(module))
        module.forward = MethodType(_forward, module)  # bound, so that a deep copy uses its own weights


def limit_steps(model: nn.Module) -> None:
    """Hold the time steps of Mamba-2 within their limits where they are projected.

    A mixer does so with whole sequences and forgets it with single tokens (Nemotron-H). To be called once, with
    adapters in place.
    """
    for mixer in mixers_of(model):
        low, high = getattr(mixer, "time_step_limit", None) or (0.0, math.inf)
        if (low, high) != (0.0, math.inf):
            if hasattr(mixer, "mup_vector"):
                raise ModelError(f"{type(mixer).__name__} must not scale limited time steps, got {low} to {high}")
            projection: Any = mixer.in_proj
            projection.register_forward_hook(MethodType(_limited, mixer))


def _limited(self: Any, module: nn.Module, inputs: Any, projected: Tensor) -> Tensor:
    """The last numbers are the time steps, softplus(step + bias) when they are used."""
    others = projected.shape[-1] - len(self.dt_bias)
    bounds = [math.log(math.expm1(limit)) if 0 < limit < 20 else limit or -math.inf for limit in self.time_step_limit]
    low, high = (bound - self.dt_bias.detach() for bound in bounds)
    return torch.cat((projected[..., :others], projected[..., others:].clamp(low, high)), -1)


def mixers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_mixer(module)]


@cache
def _signature(kind: Any) -> tuple[inspect.Signature, str, str]:
    """The signature of a mixer's forward pass, and its parameters for the cache and for whatever else is given."""
    signature = inspect.signature(kind.forward)
    caches = [name for name in _CACHES if name in signature.parameters]
    if not caches:
        raise ModelError(f"{kind.__name__} must take a cache as {' or '.join(_CACHES)}, got {signature}")
    rest = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    return signature, caches[0], rest[0] if rest else ""


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    context = of_thread()
    assert context is not None, "a model with mixers must be called within `by_thread`"
    kind: Any = type(self)
    signature, cached, rest = _signature(kind)
    given = signature.bind(self, *args, **kwargs).arguments
    given = {name: value for name, value in given.items() if name not in ("self", cached, rest)}
    row = next(value for value in given.values() if isinstance(value, Tensor))
    tokens = row.shape[1]
    per_token = {n: v for n, v in given.items() if isinstance(v, Tensor) and v.shape[:2] == (1, tokens)}
    padded = {n: torch.cat((v[0], torch.zeros_like(v[0, :1]))) for n, v in per_token.items()}

    def own(rows_BL: Tensor, known: MixerCache | None) -> Any:
        picked = {n: v.index_select(0, rows_BL.flatten()).view(*rows_BL.shape, *v.shape[1:]) for n, v in padded.items()}
        return kind.forward(self, **{**given, **picked, cached: known})

    call = MixerCall(int(getattr(self, _NUMBER)), tokens, row.device, own, bool(getattr(self, _STEPS)))
    context.carry(call)
    return call.result()
