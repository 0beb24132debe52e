"""The plain case: one question, one answer."""

from kitae.envs.base import Observation
from kitae.types import Message, Prompt


class SingleTurn:
    """An `Environment` that shows the prompt and is done after the first answer."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt

    async def start(self) -> tuple[Message, ...]:
        return self._prompt.messages

    async def step(self, response: str) -> Observation:
        return Observation(done=True)

    async def close(self) -> None:
        pass
