"""`kitae doctor MODEL`: what is to be known of a model's chat template and tokenizer before it is trained.

Everything is tried out on small conversations. Of the weights, two rows are read at most.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kitae.data.chat import Chat, as_message
from kitae.data.tool_calls import CLOSE, OPEN, template_of
from kitae.errors import DataError
from kitae.study.model_shape import count_parameters
from kitae.types import Message, Tool, ToolCall

if TYPE_CHECKING:
    import torch

Verdict = Literal["good", "note", "wrong"]

_QUESTION, _MORE = Message("user", "What is 1 + 2?"), Message("user", "And 3 + 4?")
_ANSWER = Message("assistant", "It is 3.")
_THOUGHT = "howeverstrange"
_THINKING = Message("assistant", f"<think>\n{_THOUGHT}\n</think>\n\nIt is 3.")
_CALL = ToolCall("add", {"a": 1, "note": 'a "quoted" é\n'}, "call_0")
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["a"],
        },
    },
}
_RESULT = Message("tool", "3", call_id="call_0", name="add")
_UNLIMITED = 10**9  # what tokenizers say that know of no limit
_ALIKE = 0.05  # how far two rows of an embedding are apart, as a share of their length, if nobody has trained them


@dataclass(frozen=True, slots=True)
class Checked:
    """One thing that was looked at: `Checked("stop token", "good", "'<|im_end|>' ends a turn")`."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def report(model: str, as_json: bool) -> bool:
    """Print the findings on a model; whether nothing is wrong."""
    from kitae.models.config import ModelConfig
    from kitae.models.load import check_model, load_tokenizer

    config = ModelConfig(path=model)
    folder = check_model(config)
    tokenizer, generation = load_tokenizer(config)
    findings = [*examine(tokenizer, generation), *weigh(folder, tokenizer)]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            advice = f"; {finding.advice}" if finding.advice else ""
            print(f"{finding.verdict:6} {finding.name:14} {finding.found}{advice}")
    return all(finding.verdict != "wrong" for finding in findings)


def examine(tokenizer: Any, generation: Any = None) -> list[Checked]:
    """What the chat template and the tokenizer do."""
    chat = Chat(tokenizer, generation)
    if chat.plain:
        template = Checked(
            "template",
            "note",
            "none: messages are joined by newlines",
            "train from an instruct model, or teach a template by SFT first",
        )
        return [template, _padding(tokenizer)]
    checks: tuple[Callable[[Chat], Checked], ...] = (
        _template,
        _begin,
        _stop,
        _prefix,
        _thinking,
        _tools,
        _calls,
        _results,
    )
    return [*(_tried(check, chat) for check in checks), _padding(tokenizer)]


def _tried(check: Callable[[Chat], Checked], chat: Chat) -> Checked:
    try:
        return check(chat)
    except DataError as problem:
        name = check.__name__.strip("_")
        return Checked(
            name, "wrong", str(problem), "mend the chat template: conversations of this kind cannot be trained"
        )


def _template(chat: Chat) -> Checked:
    tokens = chat.encode_prompt([_QUESTION])
    shown = chat.spell(*tokens)
    if _QUESTION.content not in shown:
        return Checked("template", "wrong", "it leaves the question out", "mend the chat template")
    return Checked(
        "template", "good", f"a question of {len(chat.encode(_QUESTION.content))} tokens becomes {len(tokens)}"
    )


def _begin(chat: Chat) -> Checked:
    tokens = chat.encode_prompt([_QUESTION])
    if chat.bos is not None and tokens[:2] == (chat.bos, chat.bos):
        return Checked(
            "BOS", "wrong", f"prompts begin with {chat.spell(chat.bos)!r} twice", "take one out of the template"
        )
    if chat.bos is None or tokens[0] != chat.bos:
        return Checked("BOS", "good", "the template begins without one")
    return Checked("BOS", "good", f"prompts begin with {chat.spell(chat.bos)!r} once")


def _stop(chat: Chat) -> Checked:
    """A turn must end with a token at which sampling stops."""
    closing, stops = chat.closing(), chat.stop_tokens
    found = [token for token in closing if token in stops]
    if found:
        return Checked("stop token", "good", f"{chat.spell(found[0])!r} ends a turn and stops sampling")
    special = [token for token in closing if token in chat.special_tokens]
    told = ", ".join(repr(chat.spell(token)) for token in stops) or "none"
    if special:
        name = chat.spell(special[0])
        return Checked(
            "stop token",
            "wrong",
            f"{name!r} ends a turn, but sampling stops at {told}",
            f"add {special[0]} to eos_token_id in generation_config.json",
        )
    return Checked(
        "stop token",
        "wrong",
        f"the template ends a turn with {chat.spell(*closing)!r}, at which nothing stops ({told} would)",
        "set sampling.stop, or mend the template",
    )


def _prefix(chat: Chat) -> Checked:
    """Whether appended turns are what the template makes of the whole."""
    asked, whole = chat.encode_prompt([_QUESTION]), chat.encode_prompt([_QUESTION, _ANSWER, _MORE])
    said = whole[len(asked) :]
    end = next((n + 1 for n, token in enumerate(said) if token in chat.stop_tokens), 0)
    said = said[:end] or chat.encode(_ANSWER.content)
    if asked + said + chat.encode_turn([_MORE], closed=end > 0) == whole and _ANSWER.content in chat.spell(*said):
        return Checked("prefix", "good", "conversations only grow: what was said stays the same tokens")
    return Checked(
        "prefix",
        "note",
        "the template shows old turns otherwise than they were sampled",
        "Kitae appends to what was sampled, so training sees what the model saw; a server that renders anew does not",
    )


def _thinking(chat: Chat) -> Checked:
    opened = chat.spell(*chat.encode_prompt([_QUESTION])).rstrip().endswith("<think>")
    whole = chat.spell(*chat.encode_prompt([_QUESTION, _THINKING, _MORE]))
    begins = "answers begin inside <think>" if opened else "the template opens no <think>"
    if _THOUGHT in whole:
        return Checked("thinking", "good", f"{begins}; earlier turns keep their thoughts")
    return Checked(
        "thinking",
        "note",
        f"{begins}; thoughts are dropped from earlier turns",
        "in episodes of several turns the model reads its earlier thoughts: leave room for them",
    )


def _tools(chat: Chat) -> Checked:
    if chat.tells_tools:
        return Checked("tools", "good", "the template tells the model of tools")
    chat.encode_prompt([_QUESTION], [_TOOL])
    return Checked(
        "tools",
        "note",
        "the template tells of no tools",
        "Kitae does in the system message; show some calls as examples, or teach them by SFT first",
    )


def _calls(chat: Chat) -> Checked:
    """Whether a call that the template shows is read as that call."""
    asked = chat.encode_prompt([_QUESTION], [_TOOL])
    whole = chat.encode_prompt([_QUESTION, Message("assistant", calls=(_CALL,)), _MORE], [_TOOL])
    if whole[: len(asked)] != asked:
        return Checked("calls", "note", f"read as {chat.family} writes them; the template shows them otherwise")
    said = whole[len(asked) :]
    end = next((n for n, token in enumerate(said) if token in chat.stop_tokens), len(said))
    turn = chat.read(said[:end], tools=[_TOOL])
    if turn.calls == (_CALL,):
        return Checked("calls", "good", f"read as {chat.family} writes them")
    return Checked(
        "calls",
        "wrong",
        f"a call that the template shows is read as {turn.problem or as_message(turn)}",
        "report the template: its way of calling is not known",
    )


def _results(chat: Chat) -> Checked:
    tokens = chat.encode_turn([_RESULT])
    if _RESULT.content not in chat.spell(*tokens):
        return Checked("results", "wrong", "the template leaves out what tools say", "mend the chat template")
    special = [token for token in tokens if token in chat.special_tokens]
    attack = [Message("tool", "".join(map(chat.spell, special)) + "3", call_id="call_0", name="add")]
    if [token for token in chat.encode_turn(attack) if token in chat.special_tokens] != special:
        return Checked(
            "results", "wrong", "special tokens in what a tool says are read as such", "use a fast tokenizer"
        )
    return Checked("results", "good", "what tools say is shown, and stays text")


def _padding(tokenizer: Any) -> Checked:
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        return Checked(
            "padding",
            "note",
            f"the padding is {tokenizer.pad_token!r}, which also ends turns",
            "Kitae never pads; trainers that mask the padding would not learn to stop",
        )
    return Checked("padding", "good", "the padding is no end of a turn")


def weigh(folder: Path, tokenizer: Any) -> Iterator[Checked]:
    """What the files of a model say: how much it reads, how large it is."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    limit = tokenizer.model_max_length
    if context is None:
        yield Checked(
            "context", "wrong", "the model does not say how much it reads", "set max_position_embeddings in config.json"
        )
    elif limit < min(context, _UNLIMITED):
        yield Checked("context", "note", f"{context} tokens, but the tokenizer says {limit}", "Kitae goes by the model")
    else:
        yield Checked("context", "good", f"{context} tokens")
    size = sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
    kind = str(getattr(config, "dtype", None) or "an unknown dtype").removeprefix("torch.")
    parameters = count_parameters(folder) or 0
    many = f"{parameters / 1e6:,.0f} M parameters in " if parameters else ""
    yield Checked("size", "good", f"{many}{kind}, {size / 2**20:,.0f} MiB on disk")
    yield from _marks(folder, tokenizer)


def _marks(folder: Path, tokenizer: Any) -> Iterator[Checked]:
    """Whether the model can write the marks of a call, where they are tokens of their own.

    Some models have such tokens and never saw them: all rows of their embedding that were not trained are the same.
    """
    ids = tokenizer.get_added_vocab()
    if OPEN not in template_of(tokenizer) or not {OPEN, CLOSE} <= ids.keys():
        return
    rows = _embedded(folder, ids[OPEN], ids[CLOSE])
    if rows is None:
        return
    first, second = rows
    if (first - second).norm() > _ALIKE * max(first.norm(), second.norm()):
        yield Checked("call marks", "good", f"{OPEN} and {CLOSE} were trained")
        return
    yield Checked(
        "call marks",
        "note",
        f"{OPEN} and {CLOSE} are tokens that were never trained, so the model does not write them",
        "take both out of added_tokens in tokenizer.json, which spells them in pieces, or teach calls by SFT first",
    )


def _embedded(folder: Path, *tokens: int) -> "tuple[torch.Tensor, ...] | None":
    """Rows of the embedding; None where it is not to be found."""
    from safetensors import safe_open

    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                if name.endswith("embed_tokens.weight"):
                    matrix = opened.get_slice(name)
                    return tuple(matrix[token : token + 1][0].float() for token in tokens)
    return None
