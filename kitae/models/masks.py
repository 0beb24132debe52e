"""What the layers of a model see, learnt from the masks that it makes.

Kitae's attention takes no mask: a layer says by the keyword `sliding_window` how far its tokens see. Some layers leave
that to their mask alone. So when a model is loaded it makes its masks once, and a window that is known from a mask
only is kept as an attribute of the module. A mask that says anything but a window is refused, and so is one that says
something else than the keyword.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kitae.errors import ModelError
from kitae.models import attention_seam
from kitae.models.attention_seam import use_attention
from kitae.models.parts import context_of, decoder_of

_NAME = "kitae_masks"


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """What a model gets in place of a mask: the rule of the mask, and the size of its windows or chunks."""

    rule: Callable[..., Any]
    size: int | None

    def __getitem__(self, _: Any) -> "Sight":
        return self

    def sees(self, query: int, key: int) -> bool:
        first = torch.zeros((), dtype=torch.long)
        return bool(self.rule(first, first, torch.tensor(query), torch.tensor(key)))

    def window(self, context: int) -> int | None:
        """The window; None: everything before. Raises `ValueError` for another rule."""
        far = 8 * (self.size or 1000)
        if not self.sees(far, far) or self.sees(far, far + 1):
            raise ValueError("tokens that see later ones")
        if self.size is None and self.sees(far, 0):
            return None
        if self.size is not None and self.sees(far, far - self.size + 1) and not self.sees(far, far - self.size):
            return self.size
        if self.size is not None and context <= self.size and self.sees(self.size - 1, 0):
            return None  # chunks, of which a sequence has one
        raise ValueError("neither all tokens before nor a window of them")


def find_windows(model: Any, source: str) -> bool:
    """Keep the windows of modules that do not hand theirs on; returns whether all masks were made, and read."""
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _record)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, _sight)
    found: list[tuple[Any, Any, int | None]] = []
    positions = torch.arange(2, device=next(model.parameters()).device)
    try:
        use_attention(model, _NAME)
        with torch.no_grad():
            decoder_of(model)(
                input_ids=positions[None], position_ids=positions[None], use_cache=False, kitae_sights=found
            )
    except Exception:  # a model that cannot compute so is refused, or accepted, by the checks that follow
        return False
    finally:
        use_attention(model, attention_seam.NAME)
        for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            interface._global_mapping.pop(_NAME, None)  # registered names are those of the class
    context = context_of(model.config.get_text_config())
    if not all(isinstance(sight, Sight) for _, sight, _ in found):
        return False
    for module, sight, told in found:
        try:
            window = sight.window(context)
        except (ValueError, IndexError, RuntimeError) as error:
            raise ModelError(
                f"{source}: layer {module.layer_idx} of {type(model).__name__} must see all tokens before, or a window "
                f"of them, got a mask of {error}"
            ) from error
        if told is None and window is not None:
            setattr(module, attention_seam.WINDOW, window)
        elif told != window and told is not None and min(told, context) != min(window or context, context):
            raise ModelError(
                f"{source}: layer {module.layer_idx} of {type(model).__name__} must tell its attention what its mask "
                f"says, got a window of {told} and a mask of {window}"
            )
    return True


def _sight(*_: Any, mask_function: Callable[..., Any], local_size: int | None = None, **__: Any) -> Sight:
    return Sight(mask_function, local_size)


def _record(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *,
    sliding_window: int | None = None, kitae_sights: list[Any] | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    if kitae_sights is not None:
        kitae_sights.append((module, attention_mask, sliding_window))
    return torch.zeros(1, query.shape[2], query.shape[1], value.shape[3], dtype=value.dtype, device=value.device), None
