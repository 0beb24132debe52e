"""Layouts of rows that others have made up, as the rows that Kitae reads.

    layout      columns
    alpaca      instruction, input, output; history, system; chosen and rejected, or label (kto_tag), in place of output
    sharegpt    conversations with from and value; tools as JSON text, system; chosen and rejected; label (kto_tag)

`data.format = "alpaca"` names one; `data.format = "file.py:function"` is your own: a function from the row, a mapping,
to a mapping with the columns that `kitae.data.examples` knows (text, prompt, completion, messages, tools, chosen, …).
"""

from collections.abc import Callable, Mapping
from typing import Any

from kitae.data.data_files import clip, explained
from kitae.data.messages import from_json
from kitae.errors import DataError
from kitae.plugins import is_plugin, load_function, nearest

Values = Mapping[str, Any]
Layout = Callable[[Values], Any]


def find_layout(name: str) -> Layout:
    """The layout of this name; a user's own function is loaded here."""
    if name in LAYOUTS:
        return LAYOUTS[name]
    if is_plugin(name):
        return load_function(name, "format", ("row",), DataError)
    raise DataError(f"data.format must be one of {', '.join(LAYOUTS)} or file.py:function, got {name!r}{_near(name)}")


def lay_out(layout: Layout, row: Values) -> Values:
    """What a layout makes of a row; a `DataError` says what is wrong with the row, or with a user's function."""
    with explained(row):
        made = layout(row)
    if not isinstance(made, Mapping):
        raise DataError(f"a format must return a mapping of columns, got {clip(repr(made))}")
    return made


def alpaca(row: Values) -> Values:
    asked = "\n\n".join(str(row[key]) for key in ("instruction", "input") if row.get(key))
    if not asked:
        raise DataError("a row of alpaca must have an instruction or an input, got neither")
    turns = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for question, answer in row.get("history") or ():
        turns += {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    prompt = [*turns, {"role": "user", "content": asked}]
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return {"prompt": prompt, "chosen": row["chosen"], "rejected": row["rejected"]}
    return {"prompt": prompt, "completion": row["output"], **_label(row)}


def sharegpt(row: Values) -> Values:
    turns = [_turn(turn) for turn in _turns(row["conversations"])]
    if row.get("system") and not any(turn["role"] == "system" for turn in turns):
        turns = [{"role": "system", "content": row["system"]}, *turns]
    told = {"tools": row["tools"]} if row.get("tools") else {}
    if row.get("chosen") is not None and row.get("rejected") is not None:
        chosen, rejected = ([_turn(turn) for turn in _turns(row[key])] for key in ("chosen", "rejected"))
        return {"prompt": turns, "chosen": chosen, "rejected": rejected, **told}
    return {"messages": turns, **told, **_label(row)}


LAYOUTS: Mapping[str, Layout] = {"alpaca": alpaca, "sharegpt": sharegpt}

_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}


def _label(row: Values) -> Values:
    label = row.get("label", row.get("kto_tag"))
    return {} if label is None else {"label": label}


def _turns(turns: object) -> list[Any]:
    return [turns] if isinstance(turns, Mapping) else list(turns) if isinstance(turns, list) else [turns]


def _turn(turn: object) -> dict[str, Any]:
    speaker, value = (turn.get("from"), turn.get("value")) if isinstance(turn, Mapping) else (None, None)
    if speaker not in _SPEAKERS:
        raise DataError(f"a turn of sharegpt must be from one of {', '.join(_SPEAKERS)}, got {clip(repr(turn))}")
    role = _SPEAKERS[str(speaker)]
    if speaker != "function_call":
        return {"role": role, "content": value}
    if not isinstance(value, str):
        raise DataError(f"a function_call of sharegpt must be JSON in a text, got {clip(repr(value))}")
    calls = from_json("a function_call", value)
    return {"role": role, "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}


def _near(name: str) -> str:
    return nearest(name, LAYOUTS)
