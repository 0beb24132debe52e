"""What is said of a server when it is started."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kitae.serving.api_keys import NO_LIMITS, ApiKey, KeyLimits, KeyRing
from kitae.serving.handlers import AnswerPolicy
from kitae.serving.prompt_reader import ControlTokens, PromptReader, RequestReader
from kitae.serving.request_bodies import READING, ReadingLimits


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`ServerSettings("smollm2-135m", port=8000)`.

    name: the name by which clients know the model. keys: clients must send one of them; needed where other machines can
    reach the server. limits: of all clients together, where there are no keys. queue: the number of answers that may be
    under way, including those that wait for the engine; further requests are refused with a time to try again.
    control_tokens: see `kitae.serving.prompt_reader`. adapters: folders with LoRA adapters, by the names that clients
    use for the model with them.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[ApiKey, ...] = ()
    limits: KeyLimits = NO_LIMITS
    queue: int = 512
    control_tokens: ControlTokens = "completions"
    reading: ReadingLimits = READING
    adapters: Mapping[str, Path] = field(default_factory=dict)

    def ring(self) -> KeyRing:
        return KeyRing(self.keys, self.limits)

    answer_policy: AnswerPolicy = field(default_factory=AnswerPolicy)

    def reader_of(self, tokenizer: Any, generation_config: Any, context: int) -> RequestReader[PromptReader]:
        """What reads requests to a model with such a tokenizer."""
        prompts = [
            PromptReader.of(
                tokenizer,
                generation_config,
                context=context,
                most_answers=self.queue,
                control_tokens=self.control_tokens,
            )
            for _ in range(2)
        ]
        return RequestReader(prompts, self.reading)

    def reader_of_bodies(self) -> RequestReader[None]:
        """One for a model that makes tokens of texts elsewhere."""
        return RequestReader([None], self.reading)
