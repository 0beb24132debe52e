"""An environment of two turns for the toy recipe: what the model writes, the calculator computes or refuses."""

from kitae.envs.base import Observation, Opening
from kitae.envs.tools.base import ToolRefusal
from kitae.envs.tools.calculator import compute
from kitae.types import Message, Prompt, Turn

TURNS = 2


class Reckoning:
    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._heard = 0

    async def start(self) -> Opening:
        return Opening(self._prompt.messages)

    async def step(self, turn: Turn) -> Observation:
        self._heard += 1
        if self._heard == TURNS:
            return Observation(done=True)
        try:
            said = compute(turn.text)
        except ToolRefusal as refusal:
            said = str(refusal)[:40]
        return Observation((Message("user", said),))

    async def close(self) -> None:
        pass
