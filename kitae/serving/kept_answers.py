"""Answers that a client may go on from by their ids, as the Responses API has it."""

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_MOST, _MOST_BYTES = 1000, 64 * 2**20


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer as it was told, and the conversation up to it, in the shape of chats and without instructions."""

    told: Json
    messages: tuple[Json, ...]


class KeptAnswers:
    """Those of one client: `kept.keep("resp_1", answer, news=2)`. Beyond a thousand, or 64 MiB of JSON, the oldest go.

    What a conversation has in common with an earlier one is held, and counted, once. They end with the process.
    """

    def __init__(self, most: int = _MOST, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._kept: OrderedDict[str, tuple[KeptAnswer, int]] = OrderedDict()

    def keep(self, id: str, answer: KeptAnswer, news: int) -> None:
        """news: how many of its last messages are in no kept answer yet."""
        size = len(json.dumps([answer.told, answer.messages[len(answer.messages) - news :]]))
        self._kept[id] = answer, size
        self._bytes += size
        while len(self._kept) > self._most or (self._bytes > self._most_bytes and len(self._kept) > 1):
            self.drop(next(iter(self._kept)))

    def find(self, id: str) -> KeptAnswer | None:
        found = self._kept.get(id)
        return found[0] if found else None

    def drop(self, id: str) -> bool:
        """Whether it was there."""
        _, size = found = self._kept.pop(id, (None, 0))
        self._bytes -= size
        return found[0] is not None
