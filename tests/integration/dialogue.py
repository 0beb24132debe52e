"""An environment of three turns for the toy recipe. Some answers make it raise, hang or flood: which ones, the answer
itself says, so a run that is interrupted has the same failures as one that is not."""

import asyncio
import zlib

from kitae.envs.base import Observation, Opening
from kitae.types import Message, Prompt, Turn

TURNS = 3
FAILURES = ("raise", "hang", "flood", "error")


def fate_of(response: str) -> str:
    """Of five answers in six nothing special becomes."""
    found = zlib.crc32(response.encode("utf-8", "replace")) % 24
    return FAILURES[found] if found < len(FAILURES) else ""


class Dialogue:
    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._heard = 0

    async def start(self) -> Opening:
        return Opening(self._prompt.messages)

    async def step(self, turn: Turn) -> Observation:
        self._heard += 1
        await asyncio.sleep(0.001)
        fate = fate_of(turn.text)
        if fate == "raise":
            raise ValueError(f"turn {self._heard} is too much")
        if fate == "hang":
            await asyncio.sleep(1000)
        if fate == "flood":
            return Observation((Message("user", "x" * 600),))
        if fate == "error":
            return Observation(error="out of order")
        if self._heard == TURNS:
            return Observation(done=True)
        return Observation((Message("user", f"Again, {self._heard}."),))

    async def close(self) -> None:
        pass
