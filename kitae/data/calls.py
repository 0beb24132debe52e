"""Calls of tools, read from what a model sampled."""

import json
from collections.abc import Sequence
from typing import Any

from kitae.types import Tool, ToolCall, Turn


class CallReader:
    """Reads turns of the models of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.family = "hermes"

    def read(self, tokens: Sequence[int], tools: Sequence[Tool], text: str) -> Turn:
        before, found, rest = text.partition("<tool_call>")
        if not found:
            return Turn(text, text)
        try:
            call = json.loads(rest.partition("</tool_call>")[0])
            return Turn(text, before, calls=(ToolCall(call["name"], call["arguments"]),))
        except (ValueError, KeyError, TypeError) as problem:
            return Turn(text, before, problem=f"the call is no JSON: {problem}")
