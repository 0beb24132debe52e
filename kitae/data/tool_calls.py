"""Calls of tools and reasoning, read from what a model sampled.

Each family of models writes them in its own way:

    qwen, hermes, smollm2   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, also a list of such objects
    qwen-xml                <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    llama                   {"name": "add", "parameters": {"a": 1}}, which is then the whole answer
    harmony                 <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>
    template                as the `response_template` says that came with the tokenizer

Reasoning stands between <think> and </think>, in harmony on the channel `analysis`. What looks like a call in there is
none. A call that cannot be read, or that does not fit the schema of its tool, is a problem, told in a sentence.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kitae.data.tool_arguments import fitted, function_of, misfit, parameters_of, show
from kitae.types import Tool, ToolCall, Turn

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"
_PYTHON_TAG = "<|python_tag|>"
_CHANNEL, _MESSAGE, _START, _CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
_CALL, _END, _RETURN = "<|call|>", "<|end|>", "<|return|>"
_MARKS = {
    "llama": (_PYTHON_TAG,),
    "harmony": (_CHANNEL, _MESSAGE, _START, _CONSTRAIN, _CALL, _END, _RETURN),
}
_THOUGHTS = (_THINK, _THOUGHT, OPEN, CLOSE)
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
_RECIPIENT = re.compile(r"to=functions\.(\S+)")
_MOST_CALLS = 64  # in one turn

Said = tuple[str, str, tuple[ToolCall, ...]]
"""Content, reasoning, calls."""


class _Problem(Exception):
    """Something that looks like a call is none; the message may be shown to the model."""


class CallReader:
    """`CallReader(tokenizer).read(tokens, tools, text)`; `family` says how the model writes calls, or "none"."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.family = family_of(tokenizer)
        self._opening = _rendered(tokenizer, ("user",))
        self._thinking = begins_thinking(tokenizer)
        names = _MARKS.get(self.family, _THOUGHTS)
        special = special_ids(tokenizer)
        ids = ((tokenizer.convert_tokens_to_ids(name), name) for name in names)
        self._marks = {i: name for i, name in ids if i in special}

    def read(self, tokens: Sequence[int], tools: Sequence[Tool], text: str) -> Turn:
        """What was said in a turn, whatever it was. `text` is the turn without special tokens, cut before a stop
        string. Without tools nothing is a call."""
        said = self._spelled(tokens, text)
        try:
            content, reasoning, calls = _READERS[self.family](self, said, tools)
            problem = ""
            calls = tuple(ToolCall(c.name, c.arguments, f"call_{i}") for i, c in enumerate(calls))
            _check(calls, tools)
        except _Problem as found:
            content, reasoning = self._around(said)
            calls, problem = (), str(found)
        return Turn(text, content, reasoning, calls, problem)

    def _spelled(self, tokens: Sequence[int], text: str) -> str:
        """The text with those special tokens that mean something to the family."""
        if self.family == "template":
            return self._decode(tokens, special=True)
        if not self._marks or not any(token in self._marks for token in tokens):
            return text
        pieces, begin = [], 0
        for position, token in enumerate(tokens):
            if token in self._marks:
                pieces += [self._decode(tokens[begin:position]), self._marks[token]]
                begin = position + 1
        return "".join([*pieces, self._decode(tokens[begin:])])

    def _decode(self, tokens: Sequence[int], special: bool = False) -> str:
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    def _around(self, said: str) -> tuple[str, str]:
        """Content and reasoning of a turn whose calls cannot be read."""
        if self.family == "harmony":
            parts = list(_channels(said))
            content = "".join(body for head, body in parts if "analysis" not in head and "to=" not in head)
            return content, "".join(body for head, body in parts if "analysis" in head and "to=" not in head)
        answer, reasoning = _without_thoughts(said, self._thinking)
        return _without_calls(answer), reasoning

    def _marked(self, said: str, tools: Sequence[Tool]) -> Said:
        answer, reasoning = _without_thoughts(said, self._thinking)
        if not tools or OPEN not in answer:
            return answer, reasoning, ()
        read = _xml_calls if self.family == "qwen-xml" else _json_calls
        calls: list[ToolCall] = []
        for inside in _insides(answer):
            calls += read(inside, tools)
            if len(calls) > _MOST_CALLS:
                raise _Problem(f"There must be at most {_MOST_CALLS} tool calls in one turn.")
        return _without_calls(answer), reasoning, tuple(calls)

    def _llama(self, said: str, tools: Sequence[Tool]) -> Said:
        answer, reasoning = _without_thoughts(said, self._thinking)
        before, tagged, after = answer.partition(_PYTHON_TAG)
        body = after if tagged else before
        if not tools or not (tagged or _looks_like_a_call(body)):
            return answer, reasoning, ()
        return (before if tagged else ""), reasoning, tuple(_call(*found) for found in _objects(body))

    def _harmony(self, said: str, tools: Sequence[Tool]) -> Said:
        content, reasoning = self._around(said)
        if not tools:
            return content, reasoning, ()
        calls = []
        for head, body in _channels(said):
            if found := _RECIPIENT.search(head):
                calls.append(ToolCall(found[1], _json_object(body, f"The arguments of {found[1]!r}")))
            elif "to=" in head:
                raise _Problem("A tool must be called as to=functions.NAME.")
        return content, reasoning, tuple(calls)

    def _own_template(self, said: str, tools: Sequence[Tool]) -> Said:
        """By the parser of transformers, which may fail in any way on what a model says."""
        try:
            found = self._tokenizer.parse_response(said, prefix=self._opening, tools=[dict(tool) for tool in tools])
            calls = tuple(map(_parsed_call, found.get("tool_calls") or ())) if tools else ()
            return str(found.get("content") or ""), _reasoning_of(found), calls
        except (Exception, RecursionError) as problem:
            if not tools:
                return said, "", ()
            raise _Problem(f"The tool call could not be read: {show(str(problem))}.") from None


def family_of(tokenizer: Any) -> str:
    """How a model writes calls, by its chat template; "none": it has no template."""
    template = template_of(tokenizer)
    if not template:
        return "none"
    if _CHANNEL in template:
        return "harmony"
    if "<function=" in template and OPEN in template:
        return "qwen-xml"
    if "<|start_header_id|>" in template and ('"parameters"' in template or "ipython" in template):
        return "llama"
    if OPEN in template:
        shown = _rendered(tokenizer, ("user", "assistant", "tool"))
        return "qwen" if shown.count("<|im_start|>user") > 1 else "hermes"  # results come from the user, or a tool
    if getattr(tokenizer, "response_template", None):
        return "template"
    return "smollm2" if "SmolLM" in template else "hermes"


def begins_thinking(tokenizer: Any) -> bool:
    """Whether a turn begins with reasoning: the template writes <think> before the model answers."""
    return _rendered(tokenizer, ("user",)).rstrip().endswith(_THINK)


def template_of(tokenizer: Any) -> str:
    """The chat template; several of them, one after the other."""
    found = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, found.values())) if isinstance(found, Mapping) else str(found)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """All special tokens, with and without a role."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(i for i, token in added.items() if token.special).union(getattr(tokenizer, "all_special_ids", ()))


def _rendered(tokenizer: Any, roles: Sequence[str]) -> str:
    """What the template makes of a conversation, up to where the model answers; nothing, where it refuses."""
    if not template_of(tokenizer):
        return ""
    try:
        turns = [{"role": role, "content": "q"} for role in roles]
        text: str = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    except Exception:  # the template is a program that came with the model; whoever renders with it will be told
        return ""
    return text


def _without_thoughts(said: str, thinking: bool) -> tuple[str, str]:
    """What is left of a turn without its reasoning, and the reasoning. `thinking`: it begins with that."""
    if not thinking:
        first, last = said.find(_THINK), said.find(_THOUGHT)
        thinking = last >= 0 and (first < 0 or last < first)
    answer, thoughts, position = [], [], 0
    while True:
        if thinking:
            end = said.find(_THOUGHT, position)
            thoughts.append(said[position : end if end >= 0 else len(said)].replace(_THINK, ""))
            if end < 0:
                break
            position = end + len(_THOUGHT)
        begin = said.find(_THINK, position)
        answer.append(said[position : begin if begin >= 0 else len(said)])
        if begin < 0:
            break
        position, thinking = begin + len(_THINK), True
    kept = "".join(answer)
    return (kept.strip("\n") if thoughts else kept), "\n".join(t.strip() for t in thoughts if t.strip())


def _insides(answer: str) -> Iterator[str]:
    """What stands between the marks of calls; the last may lack its end, as models that stop there do."""
    for piece in answer.split(OPEN)[1:]:
        yield piece.partition(CLOSE)[0]


def _without_calls(answer: str) -> str:
    before, *pieces = answer.split(OPEN)
    return before + "".join(piece.partition(CLOSE)[2] for piece in pieces)


def _json_calls(inside: str, tools: Sequence[Tool]) -> list[ToolCall]:
    found = _json(inside, "A tool call")  # without the marks: small models repeat what they are told, as calls
    return [_call(one, inside) for one in (found if isinstance(found, list) else [found])]


def _xml_calls(inside: str, tools: Sequence[Tool]) -> list[ToolCall]:
    head = _FUNCTION.match(inside)
    if not head:
        raise _Problem(f"A tool call must begin with <function=NAME>, got {show(inside)}.")
    name, position = head[1].strip(), head.end()
    schema = next((parameters_of(tool) for tool in tools if function_of(tool).get("name") == name), {})
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    arguments: dict[str, Any] = {}
    while found := _PARAMETER.match(inside, position):
        end = inside.find("</parameter>", found.end())
        if end < 0:
            raise _Problem(f"The parameter {found[1]!r} must end with </parameter>.")
        value = inside[found.end() : end].removeprefix("\n").removesuffix("\n")
        arguments[found[1].strip()] = fitted(value, properties.get(found[1].strip()))
        position = end + len("</parameter>")
    if inside[position:].strip() != "</function>":
        raise _Problem(f"A tool call must end with </function>, got {show(inside[position:].strip())}.")
    return [ToolCall(name, arguments)]


def _call(found: object, text: str) -> ToolCall:
    """`{"name": "add", "arguments": {…}}`, or with parameters instead."""
    name = found.get("name") if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not isinstance(name, str):
        raise _Problem(f'A tool call must be a JSON object with "name" and "arguments", got {show(text.strip())}.')
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON, as OpenAI's API has it
        arguments = _json(arguments, f"The arguments of {show(name)}")
    if not isinstance(arguments, Mapping):
        raise _Problem(f"The arguments of {show(name)} must be a JSON object, got {show(arguments)}.")
    return ToolCall(name, dict(arguments))


def _looks_like_a_call(body: str) -> bool:
    start = body.lstrip()[:1]
    return start == "{" and '"name"' in body and ('"parameters"' in body or '"arguments"' in body)


def _objects(body: str) -> list[tuple[object, str]]:
    """JSON objects one after the other, with semicolons or spaces between them."""
    decoder, position, found = json.JSONDecoder(parse_constant=_no_constant), 0, list[tuple[object, str]]()
    while True:
        while position < len(body) and (body[position].isspace() or body[position] == ";"):
            position += 1
        if position == len(body) and found:
            return found
        if len(found) >= _MOST_CALLS:
            raise _Problem(f"There must be at most {_MOST_CALLS} tool calls in one turn.")
        try:
            one, end = decoder.raw_decode(body, position)
        except (ValueError, RecursionError) as problem:
            raise _Problem(
                f"A tool call must be a JSON object, got {show(body[position:])} ({_why(problem)})."
            ) from None
        found.append((one, body[position:end]))
        position = end


def _json_object(text: str, what: str) -> Mapping[str, Any]:
    found = _json(text, what)
    if not isinstance(found, Mapping):
        raise _Problem(f"{what} must be a JSON object, got {show(text.strip())}.")
    return found


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as problem:
        raise _Problem(f"{what} must be JSON, got {show(text.strip())} ({_why(problem)}).") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _why(problem: Exception) -> str:
    if isinstance(problem, RecursionError):
        return "it is nested too deeply"
    if isinstance(problem, json.JSONDecodeError):
        return f"{problem.msg.removesuffix(' at')} at character {problem.pos}"
    return str(problem)[:100]


def _channels(said: str) -> Iterator[tuple[str, str]]:
    """Messages of a harmony turn: what stands before <|message|>, and the text; the model's first begins mid-head."""
    for piece in re.split(r"<\|(?:end|call|return)\|>", said):
        head, found, body = piece.partition(_MESSAGE)
        if found:
            yield head, body
        elif head.strip():
            yield "", head.replace(_START, "").replace(_CHANNEL, "")


def _parsed_call(found: Any) -> ToolCall:
    inside = found.get("function", found) if isinstance(found, Mapping) else found
    return _call(inside, str(found))


def _reasoning_of(found: Mapping[str, Any]) -> str:
    names = ("thinking", "reasoning_content", "reasoning")
    return next((str(found[name]) for name in names if found.get(name)), "")


def _check(calls: Sequence[ToolCall], tools: Sequence[Tool]) -> None:
    known = {str(function_of(tool).get("name")): parameters_of(tool) for tool in tools}
    for call in calls:
        if call.name not in known:
            names = ", ".join(known) or "none"
            raise _Problem(f"There is no tool {show(call.name)}; there are: {names}.")
        if problem := misfit(call.arguments, known[call.name]):
            raise _Problem(f"The call of {call.name!r} does not fit: {problem}.")
        try:
            json.dumps(call.arguments, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            raise _Problem(f"The arguments of {call.name!r} must be valid Unicode text.") from None


def _plain(reader: CallReader, said: str, tools: Sequence[Tool]) -> Said:
    return said, "", ()


_READERS: dict[str, Callable[[CallReader, str, Sequence[Tool]], Said]] = {
    "qwen": CallReader._marked,
    "hermes": CallReader._marked,
    "smollm2": CallReader._marked,
    "qwen-xml": CallReader._marked,
    "llama": CallReader._llama,
    "harmony": CallReader._harmony,
    "template": CallReader._own_template,
    "none": _plain,
}
