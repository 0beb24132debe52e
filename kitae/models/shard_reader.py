"""Fill the parameters of a sharded model from its files: each rank reads its own blocks and nothing else.

Names and forms of tensors in files are not always those of the modules. transformers says what becomes of what. What
is only renamed is read as a block. Experts that lie in the files one by one are read one by one, those of this rank
alone. Anything else (a projection that is stored in one piece with others, say) is read whole, converted and cut: such
tensors are on every rank for a moment, one at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kitae.errors import ModelError
from kitae.models.stored_tensors import StoredTensor, stored_tensors
from kitae.models.whole import Place, place_of


@dataclass(slots=True)
class _Origin:
    """Where a parameter comes from: tensors of the files by the pattern that they met, and what converts them."""

    converter: Any = None
    sources: dict[str, list[StoredTensor]] = field(default_factory=dict)

    def read(self, model: Any, name: str, place: Place) -> dict[str, Tensor]:
        """Parts of parameters, and of the one of this name the block at this place."""
        if self.converter is None:
            ((only,),) = self.sources.values()
            return {name: only.read(place)}
        converter = deepcopy(self.converter)
        for pattern, tensors in self.sources.items():
            for each in tensors[place[0]] if self._stacks else tensors:
                converter.add_tensor(name, name, pattern, each.read)
        if not converter.collected_tensors:
            return {}
        found = converter.convert(name, model=model, config=model.config)
        return {each: (value[0] if isinstance(value, list) else value) for each, value in found.items()}

    @property
    def _stacks(self) -> bool:
        """Whether each expert becomes one of the rows of the parameter, whatever the others are."""
        first, *others = self.converter.operations
        along = [(type(each).__name__, getattr(each, "dim", None)) for each in (first, *others)]
        stays = all(name == "Concatenate" and dim for name, dim in along[1:])
        return along[0] == ("MergeModulelist", 0) and stays and len(self.converter.target_patterns) == 1


def fill(model: Any, folder: Path, device: torch.device, *, without: nn.Module | None = None) -> None:
    """Give all parameters on the meta device the values in the folder; those that share a tensor share it again.

    model: of transformers, whose parameters are shards already. device: where the shards are to lie. without: a module
    that nothing computes with.
    """
    with _without_adapters(model):
        unused = [f"{name}." for name, module in model.named_modules() if module is without]
        state = {n: t for n, t in model.state_dict(keep_vars=True).items() if not n.startswith(tuple(unused))}
        twins: dict[int, list[str]] = {}
        for name, tensor in state.items():
            twins.setdefault(id(tensor), []).append(name)
        missing = {name for name, tensor in state.items() if tensor.is_meta}
        for name, origin in _origins(model, stored_tensors(folder), state).items():
            _take(model, name, origin, state, device, missing)
        for names in twins.values():
            filled = [name for name in names if name not in missing]
            for name in names if filled else ():
                _set(model, name, model.get_parameter(filled[0]))
                missing.discard(name)
    if missing:
        raise ModelError(f"{folder} must hold all weights of {type(model).__name__}, but lacks {min(missing)}")


def _take(
    model: Any, name: str, origin: _Origin, state: Mapping[str, Tensor], device: torch.device, missing: set[str]
) -> None:
    found = origin.read(model, name, place_of(state[name]))
    if origin.converter is not None and not found:  # no expert lies here
        found = {name: torch.empty([each.stop - each.start for each in place_of(state[name])])}
    for each, value in found.items():
        into = state.get(each)
        if into is None:
            continue
        place = place_of(into)
        size = torch.Size([along.stop - along.start for along in place])
        part = value[place].clone() if value.shape == into.shape != size else value
        if part.shape != size:
            raise ModelError(f"{each} must have the shape {tuple(into.shape)}, got {tuple(part.shape)} in the files")
        own: Tensor = part.to(device, into.dtype).contiguous()
        if isinstance(into, DTensor):
            own = DTensor(own, into._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        _set(model, each, nn.Parameter(own, into.requires_grad) if isinstance(into, nn.Parameter) else own)
        missing.discard(each)


def _origins(model: Any, stored: Mapping[str, StoredTensor], state: Mapping[str, Tensor]) -> dict[str, _Origin]:
    """By the parameter, or the first one, that tensors of the files become."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    changes = get_model_conversion_mapping(model, None, None)
    renamings = [each for each in changes if isinstance(each, WeightRenaming)]
    converters = [each for each in changes if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, _Origin] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, met = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, met = key, None
        if name in state:
            origin = found.setdefault(name, _Origin(by_pattern[met] if met else None))
            origin.sources.setdefault(met or key, []).append(stored[key])
    return found


def _set(model: Any, name: str, value: Tensor) -> None:
    module, _, own = name.rpartition(".")
    setattr(model.get_submodule(module), own, value)


@contextmanager
def _without_adapters(model: Any) -> Iterator[None]:
    """The modules under adapters in their places, where files have them."""
    adapted = [(name, module) for name, module in model.named_modules() if hasattr(module, "get_delta_weight")]

    def put(choose: Callable[[Any], Any]) -> None:
        for name, module in adapted:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, choose(module))

    put(lambda module: module.base_layer)
    try:
        yield
    finally:
        put(lambda module: module)
