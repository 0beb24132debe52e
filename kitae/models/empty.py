"""Modules without weights: parameters on the meta device, until they are shards that a rank reads.

Whatever tries modules out before that (the choice of compiled kernels, peft) sees other values for a moment, those of
a layer at a time.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from kitae.errors import ModelError
from kitae.models.config import ModelConfig
from kitae.models.parts import layers_of


@dataclass(frozen=True, slots=True)
class Unfilled:
    """What a policy without weights is to be filled from. device: where it will compute."""

    config: ModelConfig
    folder: Path
    device: torch.device


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters that modules make go to the meta device; buffers, which are computed and not read, do not."""
    register = nn.Module.register_parameter

    def without_values(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = without_values  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def is_empty(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def random_layers(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """The model's layers one by one, and the modules beside them. Those without weights have random ones meanwhile."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = list(layers_of(model))
        inside = {id(module) for layer in layers for module in layer.modules()}
        beside = [m for m in model.modules() if id(m) not in inside and m._parameters]
        for unit, parts in [*((layer, [*layer.modules()]) for layer in layers), *((each, [each]) for each in beside)]:
            with standing_in(parts, lambda p: torch.randn(p.shape, dtype=p.dtype, device=device).mul_(0.05)):
                yield unit


def shapes_alone(model: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """A context in which parameters on the meta device are on a real one, where they take no memory."""
    return standing_in(model.modules(), lambda p: torch.zeros((), dtype=p.dtype, device=device).expand(p.shape))


@contextmanager
def standing_in(modules: Iterable[nn.Module], make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Other values in place of parameters on the meta device. Whether they are trained may be changed."""
    known: dict[int, nn.Parameter] = {}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in [*modules]:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in known:
                    known[id(parameter)] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
                replaced.append((module, name, parameter))
                module._parameters[name] = known[id(parameter)]
    try:
        yield
    finally:
        for module, name, parameter in replaced:
            parameter.requires_grad_(known[id(parameter)].requires_grad)
            module._parameters[name] = parameter


def place_buffers(model: nn.Module, device: torch.device) -> None:
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                raise ModelError(f"{type(model).__name__} cannot be loaded in shards: {path}.{name} has no values")
            module._buffers[name] = buffer if buffer is None else buffer.to(device)


def keep_precision(model: nn.Module) -> None:
    """Parameters that a class keeps in fp32 whatever the others are in."""
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in model.named_parameters() if kept else ():
        if kept & set(name.split(".")):
            parameter.data = parameter.data.float()
