"""What a folder of peft says of its adapters: where they start, and which of its settings Kitae does not have.

The folder's own settings decide: rank, alpha, layers, rank-stabilised scales (rslora), ranks of single layers. Dropout
is left out, because sampling has none. Everything else that would make it another model is refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SETTINGS = "adapter_config.json"
_REFUSED = {  # settings of peft, the values that are none, and what the others would be
    "use_dora": (False, "weights in magnitude and direction (DoRA)"),
    "use_qalora": (False, "QA-LoRA"),
    "use_bdlora": (None, "block-diagonal factors"),
    "bias": ("none", "trained biases"),
    "lora_bias": (False, "biases of the factors"),
    "modules_to_save": (None, "whole modules that were trained beside the adapters"),
    "trainable_token_indices": (None, "trained tokens"),
    "target_parameters": (None, "adapted parameters of experts"),
    "layer_replication": (None, "repeated layers"),
    "alora_invocation_tokens": (None, "adapters that begin within a text"),
    "arrow_config": (None, "a router of adapters"),
    "megatron_config": (None, "Megatron's layers"),
}
_PLAIN_STARTS = (True, False, "gaussian", None)  # the base is the model as it was


def with_adapter(values: Any) -> Any:
    """The settings of a model with what the folder says that `adapter` names, or `path`: base, rank, alpha, targets.

    Raises `ValueError` where a setting that is given says otherwise, or the folder needs what Kitae has not.
    """
    if not isinstance(values, Mapping):
        return values
    given, path = str(values.get("adapter") or ""), str(values.get("path") or "")
    named = given or (path if is_adapter(path) else "")
    if not named:
        return values
    if not is_adapter(named):
        raise ValueError(f"adapter must be a folder with {SETTINGS}, as peft writes it, got {named!r}")
    said = _read(Path(named).expanduser())
    made = dict(values) | {"adapter": named}
    if not path or path == named:
        made["path"] = said.get("base_model_name_or_path")
        if not made["path"]:
            raise ValueError(f"path must be the model that the adapters of {named} are for, which they do not say")
    for key, value in _own(said).items():
        if key in values and type(value)(values[key]) != value:
            raise ValueError(f"{key} must be left out, or {value!r} as {named} has it, got {values[key]!r}")
        made[key] = value
    return made


def is_adapter(path: str) -> bool:
    return bool(path) and (Path(path).expanduser() / SETTINGS).is_file()


def drops_out(adapter: str) -> bool:
    """Whether the adapters were trained with dropout."""
    return bool(adapter) and bool(_read(Path(adapter).expanduser()).get("lora_dropout"))


def _own(said: dict[str, Any]) -> dict[str, Any]:
    targets = said["target_modules"]
    named = targets if isinstance(targets, str) else ",".join(sorted(targets))
    return {"lora_rank": int(said["r"]), "lora_alpha": float(said["lora_alpha"]), "lora_targets": named}


def _read(folder: Path) -> dict[str, Any]:
    try:
        said = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"adapter {folder}: {SETTINGS} cannot be read: {error}") from error
    if not isinstance(said, dict) or said.get("peft_type") != "LORA":
        kind = said.get("peft_type") if isinstance(said, dict) else type(said).__name__
        raise ValueError(f"adapter {folder}: peft_type must be LORA, got {kind!r}")
    if missing := [key for key in ("r", "lora_alpha", "target_modules") if not said.get(key)]:
        raise ValueError(f"adapter {folder}: {SETTINGS} must have {missing[0]}")
    for key, (none, what) in _REFUSED.items():
        if said.get(key, none) not in (none, None, False, [], {}):
            raise ValueError(f"adapter {folder}: {key} = {said[key]!r} is not supported: {what}")
    if said.get("init_lora_weights", True) not in _PLAIN_STARTS:
        how = said["init_lora_weights"]
        raise ValueError(f"adapter {folder}: init_lora_weights = {how!r} is not supported: it changes the base")
    return said
