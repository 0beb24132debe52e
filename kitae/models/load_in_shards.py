"""Load a model that no process holds whole: modules first, without weights; then shards; then each rank's own values.

    empty_policy   modules with parameters on the meta device; adapters, which are small, have their values
    shard          makes shards of them (`kitae.trainer.parallel.sharding`), and calls
    fill_policy    which reads this rank's part of the files, and checks the model as `load_policy` does

Compiled kernels are chosen before there are weights, by the same probes with random ones.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kitae.errors import ModelError
from kitae.models import attention_seam
from kitae.models.config import ModelConfig
from kitae.models.empty import Unfilled, keep_precision, parameters_on_meta, place_buffers, shapes_alone
from kitae.models.load import (
    adapt,
    disable_dropout,
    find_model,
    load_policy,
    load_tokenizer,
    pick_dtype,
    ready_device,
    with_seam,
)
from kitae.models.picture_reader import reader_of
from kitae.models.quiet import reading

if TYPE_CHECKING:
    from kitae.models.policy import Policy

Within = Callable[[Callable[[], None]], None]


def empty_policy(config: ModelConfig, seed: int = 0) -> "Policy":
    """A policy like that of `load_policy`, without weights and unchecked: `policy.unfilled` says where they are.

    A model that sees is loaded whole.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from kitae.models.fuse import fuse
    from kitae.models.policy import Policy

    folder = find_model(config.path)
    assert folder is not None
    device = ready_device(config)
    tokenizer, generation = load_tokenizer(config)
    if reader_of(tokenizer) is not None:
        return load_policy(config, seed)
    trust = {"trust_remote_code": config.trust_remote_code}
    with reading(repr(config.path), folder), parameters_on_meta():
        found = AutoConfig.from_pretrained(folder, **trust)
        dtype = pick_dtype(config.dtype, device)
        model = with_seam(
            lambda name: AutoModelForCausalLM.from_config(found, dtype=dtype, attn_implementation=name, **trust)
        )
    keep_precision(model)
    place_buffers(model, device)
    if generation is not None:
        model.generation_config = generation
    disable_dropout(model.eval())
    if not config.plain and not config.exact:
        fuse(model, device, model.dtype)
    if config.lora_rank:
        from kitae.models.lora import add_lora

        torch.manual_seed(seed)
        with shapes_alone(model, device):
            model = add_lora(model, config)
    attention_seam.attach_latents(model)
    try:
        policy = Policy(model, tokenizer, config.path, exact=config.exact, plain=config.plain)
    except (AttributeError, TypeError) as error:
        raise ModelError(f"{config.path}: {type(model).__name__} must attend to tokens, got {error}") from error
    policy.spread(device, 1, None)
    if config.exact:
        from kitae.models.exact import make_exact

        make_exact(policy)
    policy.unfilled = Unfilled(config, folder, device)
    return policy


def fill_policy(policy: "Policy", within: Within, *, host: bool, scalar: bool) -> None:
    """Read the values of shards, and check what they make. All ranks must call it.

    within: runs something while the parameters of the root are whole. host: the shards are to lie in host memory.
    scalar: nothing computes with the head of the language model.
    """
    from kitae.models.shard_reader import fill

    unfilled, policy.unfilled = policy.unfilled, None
    assert unfilled is not None
    config = unfilled.config
    with reading(repr(config.path), unfilled.folder):
        place = torch.device("cpu") if host else unfilled.device
        fill(policy.base, unfilled.folder, place, without=policy.head if scalar else None)
    within(lambda: _check(policy, config, scalar=scalar))


def _check(policy: "Policy", config: ModelConfig, *, scalar: bool) -> None:
    """What `kitae.models.load.load_policy` checks."""
    from kitae.models.agreement import check_attention, own_states
    from kitae.models.fuse import without_kernels

    with without_kernels(policy.base):
        own = own_states(policy.base)
        known = adapt(policy.base, config.path)
    check_attention(policy.base, config.path, own, windows_known=known)
    if config.exact:
        from kitae.models.exact import check

        check(policy)
    policy.check_layers()
    if not scalar:
        policy.check_head()
