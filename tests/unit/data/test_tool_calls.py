"""Calls of tools as the families of models write them, and whatever else a model may say."""

import json
import time

import pytest
from chat_templates import CHATML, FAMILIES, OPENS_OTHERWISE, STOPS, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.data.chat import Chat
from kitae.data.tool_calls import CallReader, family_of
from kitae.types import Message, ToolCall

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "number"}, "note": {"type": "string"}},
            "required": ["a", "b"],
        },
    },
}
ECHO = {
    "type": "function",
    "function": {"name": "echo", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}
TOOLS = (ADD, ECHO)
CALL = ToolCall("add", {"a": 1, "b": 2.5, "note": 'it "is" <so>\n'}, "call_0")
OTHER = ToolCall("echo", {"text": "é 語 \\ {}"}, "call_1")
MARKED = ("qwen", "hermes", "smollm2")


def reader(family):
    return CallReader(tokenizer(FAMILIES[family]))


def read(family, text, tools=TOOLS):
    """A turn as the model would sample it: special tokens are tokens."""
    made = reader(family)
    tokens = made._tokenizer(text, add_special_tokens=False)["input_ids"]
    return made.read(tokens, tools, made._decode(tokens))


def as_sampled(family, *calls):
    """What a model must say for calls, by the template that shows them."""
    chat = Chat(tokenizer(FAMILIES[family]))
    question = Message("user", "q")
    asked = chat.spell(*chat.encode_prompt([question], TOOLS))
    told = chat._helped([question, Message("assistant", calls=calls), Message("user", "end")], TOOLS)
    assert told.startswith(asked)
    said = told[len(asked) :]
    return said[: min(said.index(stop) for stop in STOPS if stop in said)]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_known_by_their_templates(family):
    assert family_of(tokenizer(FAMILIES[family])) == family


def test_a_model_without_a_template_calls_nothing():
    made = CallReader(tokenizer(None))
    assert made.family == "none"
    turn = made.read((), TOOLS, '<tool_call>{"name": "add"}</tool_call>')
    assert not turn.calls and not turn.problem and turn.content == turn.text


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_template_shows_is_what_the_reader_reads(family):
    turn = read(family, as_sampled(family, CALL))
    assert (turn.calls, turn.problem, turn.content.strip()) == ((CALL,), "", "")


@pytest.mark.parametrize("family", [*MARKED, "qwen-xml"])
def test_several_calls_and_what_is_said_around_them(family):
    turn = read(family, "First this. " + as_sampled(family, CALL, OTHER))
    assert turn.calls == (CALL, OTHER) and turn.content.strip() == "First this."


def test_a_list_of_calls_and_a_missing_end():
    both = json.dumps([{"name": c.name, "arguments": c.arguments} for c in (CALL, OTHER)])
    assert read("smollm2", f"<tool_call>{both}</tool_call>").calls == (CALL, OTHER)
    assert read("qwen", '<tool_call>\n{"name": "echo", "arguments": {}}\n').calls == (ToolCall("echo", {}, "call_0"),)


def test_llama_calls_with_and_without_a_tag():
    body = '{"name": "echo", "parameters": {"text": "x"}}'
    for said in (body, f"<|python_tag|>{body}", f"  {body}\n"):
        assert read("llama", said).calls == (ToolCall("echo", {"text": "x"}, "call_0"),)
    assert [c.id for c in read("llama", f"{body}; {body}").calls] == ["call_0", "call_1"]
    for said in ('{"answer": 42}', "The name is x.", '{"name": "Bob"}'):
        turn = read("llama", said)
        assert (turn.content, turn.calls, turn.problem) == (said, (), "")
    assert "must be a JSON object" in read("llama", "<|python_tag|>print(1)").problem


def test_harmony_channels():
    said = (
        "<|channel|>analysis<|message|>Hm, to=functions.echo?<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I call.<|end|><|start|>assistant<|channel|>commentary to=functions.echo <|constrain|>json<|message|>"
        '{"text": "x"}<|call|>'
    )
    turn = read("harmony", said)
    assert turn.calls == (ToolCall("echo", {"text": "x"}, "call_0"),)
    assert (turn.reasoning, turn.content) == ("Hm, to=functions.echo?", "I call.")
    final = read("harmony", "<|channel|>final<|message|>42<|return|>")
    assert (final.content, final.calls, final.problem) == ("42", (), "")
    assert read("harmony", "<|channel|>commentary to=browser.open<|message|>{}<|call|>").problem


@pytest.mark.parametrize("family", MARKED)
def test_reasoning_holds_no_calls(family):
    turn = read(family, '<think>I could <tool_call>{"name": "echo"}</tool_call></think>\n\nNo.')
    assert (turn.content, turn.calls, turn.problem) == ("No.", (), "")
    assert turn.reasoning.startswith("I could <tool_call>")
    cut = read(family, '<think>and <tool_call>{"name"')
    assert (cut.content, cut.calls, cut.problem) == ("", (), "") and cut.reasoning


def test_reasoning_that_the_template_has_opened():
    made = CallReader(tokenizer(OPENS_OTHERWISE))
    turn = made.read((), TOOLS, "so it is</think>42")
    assert (turn.reasoning, turn.content) == ("so it is", "42")
    assert made.read((), TOOLS, "not done").reasoning == "not done"
    assert CallReader(tokenizer(CHATML)).read((), TOOLS, "so</think>42").reasoning == "so"


@pytest.mark.parametrize("family", ["qwen", "qwen-xml", "llama", "harmony"])
def test_without_tools_nothing_is_a_call(family):
    turn = read(family, as_sampled(family, CALL), tools=())
    assert not turn.calls and not turn.problem


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ('{"name": "add", "arguments": {"a": 1, "b": 2}', "must be JSON"),
        ("{'name': 'add'}", "must be JSON"),
        ("", "must be JSON"),
        ("[[]]", 'must be a JSON object with "name"'),
        ('"add"', 'must be a JSON object with "name"'),
        ('{"name": 7}', 'must be a JSON object with "name"'),
        ('{"name": "sub", "arguments": {}}', "There is no tool 'sub'; there are: add, echo."),
        ('{"name": "add", "arguments": [1]}', "must be a JSON object, got"),
        ('{"name": "add", "arguments": {"a": 1}}', "the argument 'b' is missing"),
        ('{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}', "no argument 'c'"),
        ('{"name": "add", "arguments": {"a": "1", "b": 2}}', "'a' must be of type integer, got '1'"),
        ('{"name": "add", "arguments": {"a": true, "b": 2}}', "'a' must be of type integer, got True"),
        ('{"name": "add", "arguments": {"a": 1.5, "b": 2}}', "'a' must be of type integer, got 1.5"),
        ('{"name": "add", "arguments": {"a": 1, "b": NaN}}', "NaN is no JSON"),
        ('{"name": "add", "arguments": {"a": 1, "b": ' + "9" * 5000 + "}}", "must be JSON"),
        ('{"name": "echo", "arguments": {"text": "\\ud800"}}', "valid Unicode"),
        ("[" * 100_000, "nested too deeply"),
        ('{"name": "echo", "arguments": {"text": ' + "[" * 900 + "]" * 900 + "}}", "must be of type string"),
        ('[{"name": "echo", "arguments": {}}, {"name": "add"}]', "the argument 'a' is missing"),
    ],
)
def test_malformed_calls_are_told_in_a_sentence(call, complaint):
    turn = read("qwen", f"Well. <tool_call>{call}</tool_call>")
    assert complaint in turn.problem and turn.calls == () and turn.content == "Well. "
    assert len(turn.problem) < 400
    assert "<tool_call>" not in turn.problem  # a model that repeats it would call once more


def test_where_a_call_is_no_json():
    turn = read("qwen", '<tool_call>{"name": "echo\n"}</tool_call>')
    assert turn.problem.endswith("(Invalid control character at character 14).")


def test_one_bad_call_spoils_all():
    good = '<tool_call>{"name": "echo", "arguments": {}}</tool_call>'
    assert read("qwen", good).calls
    turn = read("qwen", f"{good}<tool_call>oops</tool_call>")
    assert not turn.calls and turn.problem


@pytest.mark.parametrize(
    ("inside", "complaint"),
    [
        ("<function=add><parameter=a>1</parameter></function>", "'b' is missing"),
        ("<function=add><parameter=a>x</parameter><parameter=b>2</parameter></function>", "of type integer, got 'x'"),
        ("<function=add><parameter=a>1", "must end with </parameter>"),
        ("<function=add>", "must end with </function>"),
        ("add(1, 2)", "must begin with <function=NAME>"),
    ],
)
def test_malformed_xml_calls(inside, complaint):
    assert complaint in read("qwen-xml", f"<tool_call>{inside}</tool_call>").problem


def test_values_in_xml_are_what_the_schema_says():
    said = "<tool_call><function=add><parameter=a>\n7\n</parameter><parameter=b>2</parameter>"
    said += "<parameter=note>7</parameter></function></tool_call>"
    assert read("qwen-xml", said).calls[0].arguments == {"a": 7, "b": 2, "note": "7"}


def test_a_template_of_responses_that_came_with_the_tokenizer():
    made = tokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]")
    made.response_template = {
        "version": 1,
        "defaults": {"role": "assistant"},
        "start_anchor": "[assistant]",
        "fields": {
            "thinking": {"open": "<hm>", "close": "</hm>", "content": "text"},
            "tool_calls": {
                "open": "[call]",
                "close": "[/call]",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        },
    }
    own = CallReader(made)
    assert own.family == "template"

    def said(text):
        return own.read(made(text, add_special_tokens=False)["input_ids"], TOOLS, text)

    turn = said('<hm>so</hm>[call]{"name": "echo", "arguments": {"text": "x"}}[/call]')
    assert turn.calls == (ToolCall("echo", {"text": "x"}, "call_0"),) and turn.reasoning == "so"
    assert "could not be read" in said("[call]{oops[/call]").problem
    assert said("Hello").content == "Hello"


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool_ca", "<think>", "</think>", "<function=add>", "</function>"),
        *("<parameter=a>", "</parameter>", "<|python_tag|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>"),
        *("commentary to=functions.add ", "analysis", '{"name": "add", "arguments": ', '{"a": 1, "b": 2}', "}", "{"),
        *('"', "[", "]", ",", "\\", "\n", ";", "é", "\x00", "�", '"name"', '"parameters"', "1e999", "-"),
    ]
)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(PIECES | st.text(max_size=8), max_size=25))
def test_whatever_a_model_says_is_a_turn(family, pieces):
    made = READERS.setdefault(family, reader(family))
    text = "".join(pieces).encode(errors="replace").decode()
    tokens = made._tokenizer(text, add_special_tokens=False)["input_ids"]
    turn = made.read(tokens, TOOLS, made._decode(tokens))
    assert not (turn.calls and turn.problem)
    for call in turn.calls:
        assert call.name in ("add", "echo")
        json.dumps(call.arguments)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(tokens=st.lists(st.integers(0, 270), max_size=200))
def test_any_tokens_are_a_turn(family, tokens):
    made = READERS.setdefault(family, reader(family))
    made.read(tokens, TOOLS, made._decode(tokens))


READERS: dict[str, CallReader] = {}


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "piece", ["<tool_call>", "<think>", "</think>", '{"name":"parameters"', "[", "<|channel|>x", "to="]
)
def test_long_turns_take_linear_time(family, piece):
    made = READERS.setdefault(family, reader(family))
    made._marks, marks = {}, made._marks
    try:
        seconds = []
        for size in (200_000, 1_600_000):
            text = piece * (size // len(piece))
            began = time.process_time()
            made.read((), TOOLS, text)
            seconds.append(time.process_time() - began)
        assert seconds[1] < 20
    finally:
        made._marks = marks
