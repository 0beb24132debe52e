"""Expert parallelism as transformers has it: each rank of a group holds some experts, and receives their tokens."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from kitae.errors import ConfigError
from kitae.models.policy import Policy
from kitae.trainer.parallel.tensor_parallel import pattern

_DISPATCH = "ep_dispatch_experts"  # the style that sends tokens to experts, so ranks may have different tokens


def split_experts(policy: Policy, group: DeviceMesh, tensor: DeviceMesh) -> list[nn.Module]:
    """Split the experts over the group. Returns the modules that hold them. tensor: the ranks with the same rows."""
    decoder: Any = policy.decoder
    config = policy.base.config.get_text_config()
    plan: dict[str, str] = getattr(config, "base_model_ep_plan", None) or {}
    name = type(policy.base).__name__
    if _DISPATCH not in plan.values():
        raise ConfigError(f"cluster.expert > 1 needs a model with a plan that sends tokens to experts, got {name}")
    if policy.model is not policy.base:
        raise ConfigError("cluster.expert > 1 needs model.lora_rank = 0")
    try:  # the first name came with 5.23
        from transformers.distributed.expert_parallel import EPImplementation, apply_expert_parallelism  # noqa: F401
    except ImportError:
        from transformers import __version__

        raise ConfigError(f"cluster.expert > 1 needs transformers 5.23 or newer, got {__version__}") from None
    experts = [m for n, m in decoder.named_modules() if plan.get(pattern(n)) == _DISPATCH]
    for count in {int(m.num_experts) for m in experts}:
        if count % group.size():
            raise ConfigError(f"cluster.expert must divide the experts of {name}, {count}; got {group.size()}")
    named = [*decoder.named_parameters(), *decoder.named_modules()]  # in this order: dispatch counts a rank's experts
    apply_expert_parallelism(decoder, group, tensor, {n: plan[pattern(n)] for n, _ in named if pattern(n) in plan})
    return experts
