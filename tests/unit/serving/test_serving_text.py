"""Told piece by piece or at once, an answer is the same, byte for byte, whatever a model says and however it comes."""

import random
from dataclasses import replace
from typing import Any

import pytest
from chat_templates import CHATML, QWEN, tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from served import ADD, CALL, joined, pieces, renderer_of, stopped
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kitae.data.chat import Chat
from kitae.data.tool_calls import template_of
from kitae.engines.base import Sampled, SamplingParams
from kitae.serving.answers import Choice
from kitae.serving.base import Answer, Ask
from kitae.serving.chat_answers import ResponseBuilder, StreamBuilder
from kitae.serving.refusals import Refused
from kitae.serving.requests import AnswerOrder
from kitae.serving.streamed_text import DecodedText, GrowingAnswer
from kitae.serving.token_text import TokenText
from kitae.types import Message

THINKING = QWEN.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")


def sentencepiece() -> Any:
    """Words with their space in front, and single bytes for what is not among them."""
    words = ["\u2581a", "\u2581be", "c", "\u2581", "b", "a", "{", "<"]
    vocabulary = {w: i for i, w in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256)), "<|im_end|>"])}
    base = Tokenizer(BPE(vocabulary, [], byte_fallback=True, unk_token="c"))
    base.pre_tokenizer = pre_tokenizers.Metaspace()
    base.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])  # fmt: skip
    base.add_special_tokens(["<|im_end|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<|im_end|>")
    made.chat_template = CHATML
    return made


TOKENIZERS = {
    "chatml": tokenizer(CHATML),
    "qwen": tokenizer(QWEN),
    "thinking": tokenizer(THINKING),
    "sentencepiece": sentencepiece(),
}
PIECES = ["a", " ", "\n", "€", "🙂", "é", "<", "{", "stop", "st", "op", "\n\n", "<think>", "</think>", CALL,
          "<tool_call>", '{"name": "add", "arguments": {"a": 1}}', "</tool_call>", "\ufffd", "ab", "ba"]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
STOPS = st.lists(st.sampled_from(["stop", "op\n", "€", "aba", "<", "\n\n", "🙂é", "}}"]), max_size=3)


def compare(made: Any, tokens: tuple[int, ...], order: AnswerOrder, seed: int) -> None:
    """An answer of these tokens: told as they come, and told at the end."""
    chat = Chat(made)
    ask = order.asks[0]
    tokens = stopped(chat, tokens, ask)
    sampled = Sampled(tokens, tuple(-0.5 - 0.001 * i for i in range(len(tokens))), (7,) * len(tokens))
    turn = chat.read(tokens, ask.sampling.stop_strings, ask.tools)
    answer = Answer((1, 2), sampled, "stop", turn)
    builder = ResponseBuilder(order, renderer_of(made, chat))
    (whole,) = builder.whole([Choice(0, answer)])["choices"]
    telling = StreamBuilder(builder, 0)
    events = [event for piece in pieces(sampled, random.Random(seed)) for event in telling.add(piece)]
    early = "".join(e["choices"][0].get("delta", e["choices"][0]).get("content", "") for e in events)
    assert not any(stop in early for stop in ask.sampling.stop_strings)
    if order.kind == "chat" and not (whole["message"]["content"] or "").startswith(early):
        assert ask.tools and "</think>" in turn.text and "<think>" not in template_of(made)
        with pytest.raises(Refused, match="without stream"):
            telling.end(answer)
        return
    found = joined([*events, *telling.end(answer)])
    if order.kind == "text":
        assert found["text"] == whole["text"]
    else:
        expected = dict(whole["message"])
        expected["content"] = expected["content"] or ""
        assert found["message"] == expected
    for name in ("token_ids", "versions", "finish_reason", "version", "logprobs"):
        assert found[name] == whole[name], name
    assert found.get("problem") == whole.get("problem")


def order(kind: str, stops: list[str], tools: bool, made: Any) -> AnswerOrder:
    sampling = SamplingParams(stop_strings=tuple(stops), stop_tokens=(made.eos_token_id,))
    if kind == "text":
        ask = Ask("a", prompt_tokens=(1, 2), sampling=sampling)
        return AnswerOrder("o", "", (ask,), ("x",), logprobs=True, token_ids=True)
    ask = Ask("a", messages=(Message("user", "q"),), tools=(ADD,) if tools else (), sampling=sampling)
    return AnswerOrder("o", "", (ask,), logprobs=True, token_ids=True)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, stops=STOPS, kind=st.sampled_from(["chat", "tools", "text"]), seed=st.integers(0, 99))
@example(text="Yes. " + CALL + " Done.", stops=[], kind="tools", seed=0)
@example(text="a</think>b", stops=[], kind="tools", seed=0)
@example(text="\n\nHello <think>x</think>", stops=[], kind="tools", seed=1)
@settings(max_examples=60, deadline=None)
def test_pieces_joined_are_the_whole(name: str, text: str, stops: list[str], kind: str, seed: int) -> None:
    made = TOKENIZERS[name]
    compare(made, Chat(made).encode(text), order(kind, stops, kind == "tools", made), seed)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), stops=STOPS, tools=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_also_of_tokens_that_make_no_sense(name: str, data: Any, stops: list[str], tools: bool, seed: int) -> None:
    made = TOKENIZERS[name]
    tokens = tuple(data.draw(st.lists(st.integers(0, len(made) - 1), max_size=20)))
    compare(made, tokens, order("chat", stops, tools, made), seed)


def test_half_a_character_waits_for_the_other_half() -> None:
    made = TOKENIZERS["chatml"]
    spoken = DecodedText(Chat(made), TokenText(made))
    first, second, third = Chat(made).encode("€")
    for token, text in ((first, ""), (second, ""), (third, "€")):
        spoken.add([token])
        assert spoken.text == text


def test_what_is_certain_does_not_wait() -> None:
    made = TOKENIZERS["chatml"]
    chat, token_text = Chat(made), TokenText(made)
    growing = GrowingAnswer(chat, token_text, ["stop"])
    assert [growing.add(chat.encode(text)) for text in ("Go", " on s", "to", "ne sto")] == ["Go", " on ", "", "stone "]
    assert growing.add(chat.encode("p it")) == "" and growing.end("Go on stone ") == ""
    growing = GrowingAnswer(chat, token_text, tools=[ADD])
    assert [growing.add(chat.encode(text)) for text in ("I add", ". ", "Now: <to", "ol")] == [
        "I add",
        ".",
        " Now:",
        "",
    ]
    growing = GrowingAnswer(chat, token_text, tools=[ADD], early=False)
    assert growing.add(chat.encode("I think")) == "" and growing.end("I think") == "I think"


def test_tokens_are_spelled_apart() -> None:
    made = TOKENIZERS["chatml"]
    token_text = TokenText(made)
    euro = Chat(made).encode("€")
    assert [token_text.text(t) for t in euro] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert [b for t in euro for b in token_text.bytes(t)] == list("€".encode())
    assert token_text.text(made.eos_token_id) == "<|im_end|>" and token_text.is_special(made.eos_token_id)
    metaspace = TokenText(TOKENIZERS["sentencepiece"])
    assert [metaspace.text(t) for t in (0, 5)] == [" a", "a"]
    assert metaspace.text(8 + 0xE2) == "bytes:\\xe2" and metaspace.bytes(8 + 0xE2) == [0xE2]


def test_an_order_without_tools_reads_no_calls() -> None:
    made = TOKENIZERS["qwen"]
    plain = order("chat", [], False, made)
    compare(made, Chat(made).encode(CALL), replace(plain, logprobs=False), 0)
