"""The verifier `instructions`: does a response follow up to five (or more) verifiable instructions at once?

A reference is `{"instructions": [{"id": "punctuation:no_comma", "kwargs": {}}]}`, or has the two lists of the public
data sets, `{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}`, or is the JSON text of either. The ids
are those of IFEval and IFBench; `ifeval` and `ifbench` say where verdicts can differ from the public checkers.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from kitae.plugins import nearest
from kitae.types import Score
from kitae.verifiers.instructions.ifbench import IFBENCH
from kitae.verifiers.instructions.ifeval import IFEVAL
from kitae.verifiers.instructions.instruction_arguments import BadArgument, bind
from kitae.verifiers.visible_text import visible

KINDS = IFEVAL | IFBENCH


def instructions(
    response: str,
    reference: Any,
    context: Mapping[str, Any],
    *,
    mode: Literal["strict", "loose"] = "strict",
    reward: Literal["all", "fraction"] = "all",
) -> Score:
    """1 where every instruction is followed; with `reward` "fraction", the share that is.

    `mode` "loose" forgives an introduction, a closing line and markdown: an instruction is followed where it is by the
    response or by one of its seven variants, without the first line, the last line, both, or asterisks. An empty
    response follows nothing. Components hold each verdict by its id; a second one of the same id ends in "#2".
    """
    if mode not in ("strict", "loose"):
        return Score.error(f"the option mode of 'instructions' must be 'strict' or 'loose', got {mode!r}")
    if reward not in ("all", "fraction"):
        return Score.error(f"the option reward of 'instructions' must be 'all' or 'fraction', got {reward!r}")
    texts = [text for text in (_variants(response) if mode == "loose" else [response]) if visible(text).strip()]
    verdicts: dict[str, float] = {}
    try:
        for id, arguments in _instructions(reference):
            verdicts[_unique(id, verdicts)] = float(_is_followed(texts, id, arguments))
    except BadArgument as error:
        return Score.error(str(error))
    failed = [id for id, followed in verdicts.items() if not followed]
    value = 1 - len(failed) / len(verdicts) if reward == "fraction" else float(not failed)
    return Score(value, verdicts, detail=f"not followed: {', '.join(failed)}" if failed else "")


def _is_followed(texts: Sequence[str], id: str, arguments: Any) -> bool:
    check = KINDS.get(id)
    if check is None:
        raise BadArgument(f"an instruction is one of IFEval or IFBench, got {id[:100]!r}{nearest(id[:100], KINDS)}")
    if not isinstance(arguments, Mapping):
        raise BadArgument(f"{id}: kwargs must be a mapping, got {str(arguments)[:100]!r}")
    try:
        return any(map(partial(check, **bind(check, arguments)), texts))
    except BadArgument as error:
        raise BadArgument(f"{id}: {error}") from None


def _variants(response: str) -> list[str]:
    lines = response.split("\n")
    cuts = [response] + ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return list(dict.fromkeys([*cuts, *(cut.replace("*", "") for cut in cuts)]))


def _instructions(reference: Any) -> list[tuple[str, Any]]:
    """The ids with their arguments: `[("punctuation:no_comma", {})]`."""
    data = _parsed(reference)
    entries = data.get("instructions") if isinstance(data, Mapping) else None
    if isinstance(data, Mapping) and entries is None and isinstance(data.get("instruction_id_list"), list):
        ids, arguments = data["instruction_id_list"], data.get("kwargs") or [{} for _ in data["instruction_id_list"]]
        if not isinstance(arguments, list) or len(arguments) != len(ids):
            raise BadArgument("the lists instruction_id_list and kwargs of a reference must be equally long")
        entries = [{"id": id, "kwargs": kwargs} for id, kwargs in zip(ids, arguments, strict=True)]
    if not isinstance(entries, list) or not entries:
        raise BadArgument(
            'the reference of \'instructions\' must be {"instructions": [{"id": …, "kwargs": …}, …]}, '
            f"got {str(reference)[:100]!r}"
        )
    return [_entry(entry) for entry in entries]


def _entry(entry: Any) -> tuple[str, Any]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("id"), str):
        raise BadArgument(f'an instruction must be {{"id": …, "kwargs": …}}, got {str(entry)[:100]!r}')
    return entry["id"], entry.get("kwargs") or {}


def _parsed(reference: Any) -> Any:
    if not isinstance(reference, str):
        return reference
    try:
        return json.loads(reference)
    except (ValueError, RecursionError):
        return None


def _unique(id: str, taken: Mapping[str, float]) -> str:
    """`id`, or `id#2`, `id#3`, … where it is taken."""
    if id not in taken:
        return id
    return next(name for number in range(2, len(taken) + 3) if (name := f"{id}#{number}") not in taken)
