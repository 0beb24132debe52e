"""Grammars of calls of tools: what an answer must look like that calls one, in the way of the model's family.

In Lark's notation with `%json`, as `kitae.engines.constraint` has it. What comes before a call is nothing, or the end
of thoughts that the chat template has begun.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kitae.data.tool_arguments import function_of, parameters_of
from kitae.data.tool_calls import CLOSE, OPEN, begins_thinking, family_of, special_ids
from kitae.types import Tool

_MARKED = ("qwen", "hermes", "smollm2")
SPACES = {"whitespace_pattern": r" |\n[ \t]{0,24}"}
"""Between parts of JSON: a space, or a new line and its indent. Without an end, models that are lost write nothing
else."""
_THOUGHTS = 'thoughts[suffix="</think>"]: /(?s:.*)/\n'


def of_calls(tokenizer: Any, tools: Sequence[Tool], *, single: bool) -> str | None:
    """The grammar of one call, or of several; None: the family writes them in a way that no grammar here describes."""
    family = family_of(tokenizer)
    if family not in (*_MARKED, "llama"):
        return None
    word = "parameters" if family == "llama" else "arguments"
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(function_of(tool).get("name"))}, "{word}": '
        schema: Mapping[str, Any] = parameters_of(tool) or {"type": "object"}
        rules.append(f'call_{i}: {json.dumps(head)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps({**schema, 'x-guidance': SPACES})}")
    if family == "llama":
        start = "call"
    else:
        one = f'{_mark(tokenizer, OPEN)} "\\n" call "\\n" {_mark(tokenizer, CLOSE)}'
        start = one if single else f'{one} ("\\n" {one})*'
    return _after_thoughts(tokenizer, start) + "\n".join(rules)


def of_json(tokenizer: Any, schema: Mapping[str, Any]) -> str | None:
    """JSON after thoughts; None where there are none, and the schema says it all."""
    if not begins_thinking(tokenizer):
        return None
    return _after_thoughts(tokenizer, "answer") + f"answer: %json {json.dumps({**schema, 'x-guidance': SPACES})}"


def _after_thoughts(tokenizer: Any, start: str) -> str:
    if not begins_thinking(tokenizer):
        return f"start: {start}\n"
    return f"start: thoughts /\\n*/ {start}\n{_THOUGHTS}"


def _mark(tokenizer: Any, mark: str) -> str:
    """A special token, or the text."""
    return mark if tokenizer.convert_tokens_to_ids(mark) in special_ids(tokenizer) else json.dumps(mark)
