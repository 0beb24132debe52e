"""A trained reward model as an ordinary folder, which `AutoModelForSequenceClassification` loads."""

import copy
import shutil
from pathlib import Path
from typing import Any

from kitae.errors import ModelError
from kitae.models.lora import merged_state
from kitae.models.quiet import quiet_transformers
from kitae.models.scalar import ScalarModel

SCORE = "score.weight"
"""What classes of sequence classification call the head."""


def export_reward(model: ScalarModel, folder: Path) -> None:
    """Write decoder, head and tokenizer. LoRA adapters are merged; the model itself is not changed."""
    import torch

    policy = model.policy
    config = copy.deepcopy(policy.base.config)
    config._attn_implementation = None  # a saved folder must load without Kitae
    config.num_labels = 1
    config.pad_token_id = policy.tokenizer.pad_token_id
    with torch.device("meta"):
        shell = classifier(config, policy.source)
    lm_head = {f"{name}.weight" for name, module in policy.base.named_modules() if module is policy.head}
    state = {name: tensor for name, tensor in merged_state(policy).items() if name not in lm_head}
    state[SCORE] = model.head.weight.detach().to(policy.dtype)
    missing = shell.state_dict().keys() ^ state.keys()
    if missing:
        raise ModelError(
            f"{policy.source}: {type(shell).__name__} has other weights than its decoder, {sorted(missing)}"
        )
    scratch = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.parent.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        shell.save_pretrained(scratch, state_dict=state)
        policy.tokenizer.save_pretrained(scratch)
    for path in scratch.iterdir():
        path.chmod(0o644)  # weights are written readable for their owner alone
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def classifier(config: Any, source: str) -> Any:
    """The class of sequence classification that belongs to a model's configuration, without weights."""
    from transformers import AutoModelForSequenceClassification

    try:
        return AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise ModelError(f"{source}: transformers has no class of sequence classification for it ({error})") from error
