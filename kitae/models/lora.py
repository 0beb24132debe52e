"""LoRA through peft: adapters are part of the same modules, so engine and trainer need no second path."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitae.errors import ModelError
from kitae.models.config import ModelConfig
from kitae.models.parts import text_part
from kitae.models.quiet import reading
from kitae.models.routing import is_router

if TYPE_CHECKING:
    from torch import Tensor

    from kitae.models.policy import Policy


def add_lora(model: Any, config: ModelConfig) -> Any:
    """Freeze the model and add adapters to linear layers. Adapters have fp32 parameters, and are used in sampling and
    training.

    Experts and routers of a mixture get none: they are not linear layers, so "all-linear" leaves them out, and naming
    them is refused. Nor does the tower of a model that sees.
    """
    peft = import_peft()
    mixture = any(map(is_router, model.modules()))
    sees = text_part(model) is not model
    if config.adapter:
        lora = peft.LoraConfig.from_pretrained(Path(config.adapter).expanduser())
        lora.lora_dropout, lora.inference_mode = 0.0, False
    else:
        _check_targets(model, config.lora_targets, mixture)
        lora = peft.LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=_layers(model, config.lora_targets) if mixture or sees else _targets(config.lora_targets),
            task_type="CAUSAL_LM",
            bias="none",
        )
    try:
        with warnings.catch_warnings(), _of_no_kind(model.config) if mixture or sees else nullcontext():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft still asks for it
            adapted = peft.get_peft_model(model, lora)
    except ValueError as error:
        raise ModelError(f"model.lora_targets {config.lora_targets!r}: {error}") from error
    _check_adapted(adapted, config.lora_targets)
    if config.adapter:
        _load_factors(peft, adapted, config.adapter)
    return adapted


def _load_factors(peft: Any, adapted: Any, folder: str) -> None:
    """Give the adapters the factors that a folder has, all of them."""
    if hasattr(adapted.get_base_model().get_output_embeddings(), "lora_A"):
        raise ModelError(f"adapter {folder} must leave the head out: log-probs are computed from its weight alone")
    with reading("adapters", Path(folder)):
        state = peft.load_peft_weights(str(Path(folder).expanduser()), device="cpu")
        own = {name.replace(".default.", ".") for name, _ in adapted.named_parameters() if "lora_" in name}
        if state.keys() != own:
            odd = sorted(state.keys() ^ own)
            raise ModelError(
                f"adapter {folder} must have the factors of the layers that it adapts, got {len(state)} for "
                f"{len(own)}; the first that differs: {odd[0]}"
            )
        peft.set_peft_model_state_dict(adapted, state)


def _check_targets(model: Any, given: str, mixture: bool) -> None:
    """Raise unless all targets exist and none is the head: log-probs are computed from the head's weight alone, so an
    adapter on it would silently learn nothing."""
    if given == "all-linear":
        return
    modules, head = dict(model.named_modules()), model.get_output_embeddings()
    for wanted in _names(given) or [given]:
        found = [module for name, module in modules.items() if name and f".{name}".endswith(f".{wanted}")]
        if head in found:
            raise ModelError(f"model.lora_targets must leave the head out, got {given!r}")
        if not found and not mixture:  # `_layers` has the better message for mixtures
            known = ", ".join(
                sorted({name.rpartition(".")[2] for name, m in modules.items() if _has_matrix(m) and m is not head})
            )
            raise ModelError(f"model.lora_targets must name layers of the model ({known}), got {wanted!r}")


def _check_adapted(model: Any, given: str) -> None:
    """Raise if peft adapted a module that is not linear; nothing here merges such adapters."""
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight") and not len(module.lora_A):
            kind = type(module.base_layer).__name__
            raise ModelError(f"model.lora_targets must name linear layers, got {given!r}: {name} is of kind {kind}")


def _targets(given: str) -> str | list[str]:
    """The targets in the form that peft expects."""
    return given if given == "all-linear" else _names(given)


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _layers(mixture: Any, given: str) -> list[str]:
    """The full names of the linear layers that the targets select."""
    head = mixture.get_output_embeddings()
    own = set(text_part(mixture).modules())
    layers = {name: module for name, module in mixture.named_modules() if module in own and _is_linear(module)}
    if given == "all-linear":
        return [name for name, module in layers.items() if module is not head]
    wanted = {name: [layer for layer in layers if f".{layer}".endswith(f".{name}")] for name in _names(given)}
    if missing := [name for name, found in wanted.items() if not found]:
        raise ModelError(
            f"model.lora_targets must name linear layers, which experts and routers are not, got {', '.join(missing)!r}"
        )
    return sorted({layer for found in wanted.values() for layer in found})


@contextmanager
def _of_no_kind(config: Any) -> Iterator[None]:
    """Hide the model type from peft, which for a mixture takes gate_proj, up_proj and down_proj for experts that once
    had these names, even if they are linear layers of a dense block or of a shared expert."""
    kind, config.model_type = config.model_type, ""
    try:
        yield
    finally:
        config.model_type = kind


def _is_linear(module: Any) -> bool:
    import torch

    return isinstance(module, torch.nn.Linear)


def _has_matrix(module: Any) -> bool:
    """Whether it is a linear layer of any kind (GPT-2 has its own)."""
    import torch

    weight = getattr(module, "weight", None)
    return weight is not None and weight.dim() == 2 and not isinstance(module, torch.nn.Embedding)


def import_peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ModelError("model.lora_rank needs the package peft: pip install 'kitae[lora]'") from None
    return peft


def plain_part(module: Any) -> Any:
    """The linear layer itself, or that of an adapted module whose adapters only add to its weight; None otherwise."""
    import torch

    if type(module) is torch.nn.Linear:
        return module
    base = getattr(module, "base_layer", None)
    adapters = getattr(module, "active_adapters", ())
    if type(base) is not torch.nn.Linear or not set(adapters) <= set(getattr(module, "lora_A", ())):
        return None
    own = any(getattr(module, "use_dora", {}).get(a) or getattr(module, "lora_bias", {}).get(a) for a in adapters)
    return None if own or module.disable_adapters or module.fan_in_fan_out else base


def merged_bytes(model: Any) -> int:
    """What copies of the weights that adapters add to would take."""
    parts = [(module, plain_part(module)) for module in model.modules()]
    return sum(part.weight.nbytes for module, part in parts if part is not None and part is not module)


def merge_into(out: "Tensor", module: Any) -> None:
    """Write the weight of a module that has a `plain_part`, with its adapters added, into `out`."""
    import torch

    total = plain_part(module).weight.detach().float()
    for adapter in getattr(module, "active_adapters", ()):
        narrow, wide = (factor[adapter].weight.detach().float() for factor in (module.lora_A, module.lora_B))
        total = torch.addmm(total, wide, narrow, alpha=module.scaling[adapter])
    out.copy_(total)


def merged_state(policy: "Policy") -> "dict[str, Tensor]":
    """The state dict of the plain model with adapters merged; without LoRA, simply its state dict.

    For a sharded policy, tensors are whole on the writing rank; see `kitae.models.whole`.
    """
    return state_with_adapters(policy.base)


def state_with_adapters(base: Any) -> "dict[str, Tensor]":
    """The same of a model of transformers, whose layers may be adapted."""
    state = _whole_state(base)
    merged: dict[str, Tensor] = {}
    for name, module in base.named_modules():
        if hasattr(module, "get_delta_weight"):
            weight = state[f"{name}.base_layer.weight"]
            delta = sum(_delta(state, name, adapter, module) for adapter in module.active_adapters)
            merged[f"{name}.weight"] = (weight.float() + delta).to(weight.dtype)
    for name, tensor in state.items():
        if "lora_" not in name:
            merged.setdefault(name.replace(".base_layer.", "."), tensor)
    return merged


def adapter_state(policy: "Policy") -> "dict[str, Tensor]":
    """The adapters alone, by the names that peft gives them in a file. All ranks of a sharded policy must call it."""
    from kitae.models.whole import gathered

    named = policy.base.state_dict(keep_vars=True).items()
    found = {key: gathered(tensor.detach()) for key, tensor in named if "lora_" in key}
    return {f"base_model.model.{key.replace('.default.', '.')}": tensor for key, tensor in found.items()}


def save_adapter(policy: "Policy", adapter: "dict[str, Tensor]", folder: Path) -> None:
    """Write the folder that `PeftModel.from_pretrained` loads on the model that training began with."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({n: t.contiguous() for n, t in adapter.items()}, folder / "adapter_model.safetensors", {"format": "pt"})
    policy.model.peft_config["default"].save_pretrained(folder)


def _delta(state: "dict[str, Tensor]", name: str, adapter: str, module: Any) -> "Tensor":
    """The weight that an adapter adds to a module, whose own weight may be transposed."""
    narrow, wide = (state[f"{name}.{factor}.{adapter}.weight"].float() for factor in ("lora_A", "lora_B"))
    delta: Tensor = (wide @ narrow) * module.scaling[adapter]
    return delta.t() if module.fan_in_fan_out else delta


def _whole_state(model: Any) -> "dict[str, Tensor]":
    """The state with whole tensors. Names that share a tensor share it here too, so tied weights are recognised."""
    from kitae.models.whole import gathered

    known: dict[int, Tensor] = {}
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            known[id(tensor)] = gathered(tensor.detach())
        state[name] = known[id(tensor)]
    for name, module in model.named_modules():
        if hasattr(module, "codes"):  # its weight is in 4 bits
            del state[f"{name}.codes"], state[f"{name}.scales"]
            state[f"{name}.weight"] = module.weight
    return state
