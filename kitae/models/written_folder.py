"""Trained models as ordinary folders."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kitae.models.lora import adapter_state, merged_state, save_adapter
from kitae.models.parts import text_part
from kitae.models.policy import Policy
from kitae.models.quiet import quiet_transformers
from kitae.models.whole import is_writer


def export_policy(policy: Policy, folder: Path) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, with tokenizer and chat template.

    LoRA adapters are merged into the exported weights, and are in its folder `adapter` once more, as peft loads them;
    the policy itself is not changed. If it is sharded, all ranks must call this, and the first one writes.
    """
    state, adapter = merged_state(policy), adapter_state(policy)
    if not is_writer():
        return
    base: Any = policy.base
    configs = list({id(c): c for c in (base.config, text_part(base).config)}.values())
    implementations = [c._attn_implementation for c in configs]
    for own in configs:
        own._attn_implementation = None  # a saved folder must load without Kitae
    try:
        with written_whole(folder) as scratch, quiet_transformers():
            base.save_pretrained(scratch, state_dict=state)
            policy.tokenizer.save_pretrained(scratch)
            if policy.vision is not None:
                policy.vision.reader.save(scratch)
            if adapter:
                save_adapter(policy, adapter, scratch / "adapter")
    finally:
        for own, implementation in zip(configs, implementations, strict=True):
            own._attn_implementation = implementation


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which replaces `folder` when everything is written."""
    scratch = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.parent.mkdir(parents=True, exist_ok=True)
    yield scratch
    mask = os.umask(0o077)  # there is no other way to read it
    os.umask(mask)
    for path in scratch.rglob("*"):  # weights are written with permissions for their owner alone
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)
