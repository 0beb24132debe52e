"""What settings allow and hardly anybody means: said before a run starts, or refused where nothing could be trained."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kitae.config.root import RLConfig, Root
from kitae.data.chat import Chat
from kitae.data.prompt_stream import PromptStream
from kitae.errors import DataError, RequestError
from kitae.models.adapter_folder import drops_out
from kitae.models.config import ModelConfig
from kitae.models.facts import ModelFacts
from kitae.models.foreign_folder import left_beside, newest_checkpoint, shards_of

_HIGHEST_LR = 0.01  # ten times what the largest adapters take
_TRIED = 64  # prompts that are measured


def doubts(config: Root) -> Iterator[str]:
    """About settings alone."""
    if config.training.lr > _HIGHEST_LR:
        yield (
            f"training.lr = {config.training.lr:g} is far above what AdamW takes (1e-6 to 1e-3): expect the model to "
            "break at the first step"
        )
    usual = ModelConfig()
    if not config.model.lora_rank and config.model.lora_alpha != usual.lora_alpha:
        yield (
            f"model.lora_alpha = {config.model.lora_alpha:g} has no effect: model.lora_rank is 0, so all weights are "
            "trained"
        )


def doubts_of_start(model: ModelConfig, folder: Path) -> Iterator[str]:
    """About a model that another trainer left: what of its folders is taken. folder: the model's own."""
    given = Path(model.path).expanduser()
    if (last := newest_checkpoint(given)) == folder:
        yield f"{model.path} is the output of a Trainer: its last checkpoint {folder.name} is taken"
    elif (shards := shards_of(given)) is not None:
        yield f"{shards} has shards of verl: they were put together in {folder}"
    for place in {last or shards_of(given) or given, Path(model.adapter or given).expanduser()}:
        if text := left_beside(place):
            yield text
    if drops_out(model.adapter):
        yield f"adapter {model.adapter} was trained with dropout, which is left out here: sampling has none"


def doubts_of_prompts(config: RLConfig, prompts: PromptStream) -> Iterator[str]:
    """About the prompts, and who judges the answers."""
    asked = config.training.prompts_per_step
    if prompts.size is not None and asked > prompts.size:
        yield (
            f"training.prompts_per_step = {asked} is more than the {prompts.size} rows: each step asks rows several "
            "times"
        )
    if "name" not in config.verifier.model_fields_set:
        yield f"verifier.name is not set: answers are judged by {config.verifier.name!r} (kitae verifiers lists others)"


def doubts_of_lengths(config: RLConfig, prompts: PromptStream) -> Iterator[str]:
    """About the model's context, for a model that is here. Raises `DataError` if no prompt fits into it."""
    facts = ModelFacts.read(config.model)
    chat = Chat(facts.tokenizer, facts.generation)
    tried = min(_TRIED, prompts.size or _TRIED)
    lengths = list[int]()
    for position in range(tried):
        with suppress(DataError, RequestError):  # a prompt that the template refuses is left out when its turn comes
            lengths.append(len(chat.encode_prompt(prompts.at(position).messages)))
    if not lengths:
        return
    if min(lengths) >= facts.max_context:
        raise DataError(
            f"prompts must be shorter than the model's context of {facts.max_context} tokens, but of {tried} that were "
            f"measured the shortest has {min(lengths)}"
        )
    longest = config.sampling.max_tokens + min(lengths)
    if longest > facts.max_context:
        yield (
            f"sampling.max_tokens = {config.sampling.max_tokens} is more than fits: the context of {config.model.path} "
            f"has {facts.max_context} tokens, and the shortest prompt {min(lengths)}; answers end there"
        )
