"""Facts about a model for code that does not hold it: its tokenizer and context length."""

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from kitae.models.config import ModelConfig
from kitae.models.load import find_model, load_tokenizer
from kitae.models.parts import context_of
from kitae.models.policy import Policy
from kitae.models.quiet import reading


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`ModelFacts(tokenizer, generation_config, max_context=8192, vocabulary=49152)`; generation: None if the model has
    none."""

    tokenizer: Any
    generation: Any
    max_context: int
    vocabulary: int

    @classmethod
    def of(cls, policy: Policy) -> "ModelFacts":
        return cls(policy.tokenizer, policy.base.generation_config, policy.max_context, policy.vocabulary)

    @classmethod
    def read(cls, config: ModelConfig) -> "ModelFacts":
        """Read the facts from the folder of a model, without its weights."""
        tokenizer, generation = load_tokenizer(config)
        folder = find_model(config.path)
        assert folder is not None
        with reading(repr(config.path), folder):
            text = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code).get_text_config()
        return cls(tokenizer, generation, context_of(text), int(text.vocab_size))
