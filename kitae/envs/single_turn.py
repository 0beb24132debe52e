"""The simplest episode: one question, one answer, no environment beyond the verifier."""

from kitae.envs.base import Observation, Opening
from kitae.types import Prompt, Turn


class SingleTurn:
    """Shows the prompt, and is done after the first response."""

    def __init__(self, prompt: Prompt) -> None:
        self._opening = Opening(prompt.messages)

    async def start(self) -> Opening:
        return self._opening

    async def step(self, turn: Turn) -> Observation:
        return Observation(done=True)

    async def close(self) -> None:
        pass
