"""The decoder of a model, and what its config says of it, whatever names and places a family has for them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

_CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "model_max_length",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)

_ANY = 1 << 20  # of models that say nothing of it: those with states, or a bias for the distance


def decoder_of(model: Any) -> Any:
    """The modules below the language head."""
    found = model.get_decoder()
    if found is model or found is model.get_output_embeddings():  # the name of something else in some families
        return model.model
    return found


def layers_of(model: Any) -> Iterable["Module"]:
    """The decoder's layers."""
    from torch.nn import ModuleList

    count = int(model.config.get_text_config().num_hidden_layers)
    return next(m for m in decoder_of(model).modules() if isinstance(m, ModuleList) and len(m) == count)


def setting(config: Any, name: str, default: Any = None) -> Any:
    """A setting; where layers differ in it, that of the first layer."""
    try:
        return getattr(config, name, default)
    except RuntimeError:  # transformers refuses to tell what differs
        return getattr(config.per_layer_config[0], name, default)


def context_of(config: Any) -> int:
    """How many tokens a sequence may have. Layers that attend within chunks are computed as if there were one, those
    with an index of tokens as if it took all."""
    longest = next((int(n) for name in _CONTEXT if (n := getattr(config, name, None))), _ANY)
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and "chunked_attention" in (getattr(config, "layer_types", None) or []):
        longest = min(longest, int(chunk))
    if index := getattr(config, "index_topk", None):
        longest = min(longest, int(index))
    if getattr(config, "attn_temperature_tuning", False):  # Llama 4 counts positions from here on
        longest = min(longest, int(config.floor_scale) - 1)
    return longest


def text_part(model: Any) -> Any:
    """What reads and writes tokens: of a model that sees, its decoder, beside a tower with an attention of its own."""
    decoder = decoder_of(model)
    return decoder if hasattr(model.config, "vision_config") and hasattr(decoder, "set_attn_implementation") else model


def towers_of(model: Any) -> list[Any]:
    """The parameters of what sees, and of what joins it to the decoder."""
    own = {id(p) for part in (decoder_of(model), model.get_output_embeddings()) for p in part.parameters()}
    return [p for p in model.parameters() if id(p) not in own]
