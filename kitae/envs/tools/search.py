"""Search in a folder of texts, as a tool."""

import asyncio

from kitae.envs.tools.base import ToolRefusal, describe, shortened
from kitae.envs.tools.passages import Index
from kitae.types import ToolCall

_LONGEST = 1_000  # characters of a passage, at most


class Search:
    """An `EpisodeTool` on an index that all episodes share."""

    tool = describe("search", "Finds passages in a collection of texts.", query="Words to look for.")

    def __init__(self, index: Index, results: int) -> None:
        self._index, self._results = index, results

    async def call(self, call: ToolCall) -> str:
        query = str(call.arguments["query"])
        if not query.strip():
            raise ToolRefusal("a query must have at least one word")
        found = await asyncio.to_thread(self._index.find, query[:_LONGEST], self._results)
        shown = [f"[{n}] {p.source}\n{shortened(p.text, _LONGEST)}" for n, p in enumerate(found, 1)]
        return "\n\n".join(shown) or "Nothing was found."

    async def close(self) -> None:
        pass
