"""Which tokens are trained on: exactly what an assistant says, with the token that stops it, and nothing else."""

import json

import numpy as np
import pytest
from chat_templates import ENDLESS, FORGETFUL, GOOD, INST, LATE, LLAMA, OPENS_OTHERWISE, THINKING, chat
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.data.chat import Chat
from kitae.data.config import ExamplesConfig
from kitae.data.examples import Conversation, Example, ExampleStream, after_user
from kitae.data.rendering import Renderer, fit_list, fit_stream
from kitae.errors import DataError
from kitae.types import Message, ToolCall

HI, HELLO = Message("user", "Hi"), Message("assistant", "Hello")
BYE, CIAO = Message("user", "Bye"), Message("assistant", "Ciao")
SYSTEM = Message("system", "Be good.")
ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = Message("assistant", "", calls=(ToolCall("add", {"a": 1, "b": "two"}),))
RESULT = Message("tool", "3", name="add")
CHATS = {name: chat(template) for name, template in GOOD.items()}


def shown(made, by):
    """The tokens as text, one after the other, with what is trained in [brackets]."""
    text, inside = "", False
    for token, trained in zip(made.tokens_T, made.mask_T, strict=True):
        text += ("[" if trained and not inside else "]" if inside and not trained else "") + by.spell(int(token))
        inside = bool(trained)
    return text + "]" * inside


def render(by, *messages, train_on="all", prompt=0, tools=(), max_tokens=10_000, text=None):
    return Renderer(by, train_on, max_tokens).render(Conversation(messages, prompt, tools, text))


def test_tokens_and_mask_one_by_one():
    by = chat(LLAMA)
    made = render(by, HI, HELLO)
    bos, start, end, eot = (by.encode(t)[0] for t in ("<s>", "<|start|>", "<|end|>", "<|eot|>"))
    letters = {c: by.encode(c)[0] for c in "userasitnHiloe\n"}
    spelled = [letters[c] for c in "user"], [letters[c] for c in "assistant"]
    blank, hi, hello = ([letters[c] for c in text] for text in ("\n\n", "Hi", "Hello"))
    prompt = [bos, start, *spelled[0], end, *blank, *hi, eot, start, *spelled[1], end, *blank]
    assert made.tokens_T.tolist() == [*prompt, *hello, eot]
    assert made.mask_T.tolist() == [False] * len(prompt) + [True] * 6
    assert made.prompt_length == len(prompt) and made.cut == 0
    assert made.tokens_T.dtype == np.int64 and made.mask_T.dtype == np.bool_


TWO_TURNS = {
    "chatml": "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "[Hello<|im_end|>]\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[Ciao<|im_end|>]",
    "llama": "<s><|start|>user<|end|>\n\nHi<|eot|><|start|>assistant<|end|>\n\n[Hello<|eot|>]"
    "<|start|>user<|end|>\n\nBye<|eot|><|start|>assistant<|end|>\n\n[Ciao<|eot|>]",
    "qwen": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello<|im_end|>]\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[Ciao<|im_end|>]",
    "phi": "<|im_start|>user\nHi<|eot|>\n<|im_start|>assistant\n[Hello<|eot|>]\n"
    "<|im_start|>user\nBye<|eot|>\n<|im_start|>assistant\n[Ciao<|eot|>]",
    "inst": "<s>[INST] Hi [/INST][ Hello<|im_end|>][INST] Bye [/INST][ Ciao<|im_end|>]",
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("adds_specials", [False, True])
def test_every_turn_is_trained_up_to_its_stop_token(name, adds_specials):
    by = chat(GOOD[name], adds_specials=adds_specials)
    assert shown(render(by, HI, HELLO, BYE, CIAO), by) == TWO_TURNS[name]


@pytest.mark.parametrize("name", GOOD)
def test_the_last_turn_alone(name):
    first = (
        "[ Hello<|im_end|>]"
        if name == "inst"
        else "[Hello<|eot|>]"
        if name in ("llama", "phi")
        else "[Hello<|im_end|>]"
    )
    wanted = TWO_TURNS[name].replace(first, first[1:-1])
    for settings_ in ({"train_on": "last"}, {"train_on": "completion"}, {"prompt": 3}, {"prompt": 2}):
        assert shown(render(CHATS[name], HI, HELLO, BYE, CIAO, **settings_), CHATS[name]) == wanted


@pytest.mark.parametrize("name", GOOD)
def test_what_is_before_an_answer_is_what_the_model_reads_when_asked(name):
    by = CHATS[name]
    asked = by.encode_prompt((HI,))
    made = render(by, HI, HELLO, BYE, CIAO)
    assert tuple(made.tokens_T[: made.prompt_length]) == asked
    if name != "inst":  # which writes a space before its answers
        answer = by.encode("Hello" + ("<|eot|>" if name in ("llama", "phi") else "<|im_end|>"))
        turn = (*asked, *answer, *by.encode_turn((BYE,)))
        assert tuple(made.tokens_T[: len(turn)]) == turn, "an episode of two turns has the same tokens"


def test_tools_are_called_in_training_and_their_results_are_not_trained():
    by = CHATS["qwen"]
    made = render(by, HI, CALL, RESULT, RESULT, HELLO, tools=(ADD,))
    assert shown(made, by) == (
        "<|im_start|>system\n# Tools\n" + json.dumps(ADD) + "\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\n[\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "two"}}\n</tool_call>'
        "<|im_end|>]\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[Hello<|im_end|>]"
    )
    answered = render(by, HI, CALL, RESULT, HELLO, tools=(ADD,), train_on="last")
    assert int(answered.mask_T.sum()) == len("Hello") + 1
    completion = render(by, HI, HELLO, BYE, CALL, RESULT, CIAO, tools=(ADD,), train_on="completion")
    assert shown(completion, by).count("[") == 2, "the call and what follows from it answer the last turn of the user"


@pytest.mark.parametrize("adds_specials", [False, True])
@pytest.mark.parametrize(
    ("given", "plain"), [("ab", "[ab"), ("<s>ab", "<s>[ab"), ("ab<|im_end|>", "[ab"), ("a\n", "[a\n")]
)
def test_plain_text_ends_once_and_begins_once(adds_specials, given, plain):
    by = chat(adds_specials=adds_specials)
    wanted = f"{plain}<|im_end|>]"
    if adds_specials:
        wanted = wanted if wanted.startswith("<s>") else f"<s>{wanted}"
    else:  # nothing predicts the first token
        wanted = wanted if wanted.startswith("<s>") else f"{wanted[1]}[{wanted[2:]}"
    made = render(by, text=given)
    assert shown(made, by) == wanted
    assert made.prompt_length == 1


def test_a_model_without_a_template_reads_as_in_rl():
    by = chat(None, adds_specials=True)
    made = render(by, SYSTEM, HI, HELLO, BYE, CIAO)
    assert shown(made, by) == "<s>Be good.\nHi[Hello<|im_end|>]\nBye[Ciao<|im_end|>]"
    assert tuple(made.tokens_T[: made.prompt_length]) == by.encode_prompt((SYSTEM, HI))
    for messages, tools in [((HI, HELLO), (ADD,)), ((HI, CALL), ())]:
        with pytest.raises(DataError, match="needs a chat template"):
            render(by, *messages, tools=tools)


def test_a_tokenizer_that_puts_spaces_before_texts():
    by = chat(INST, spaced=True)
    whole = by.encode("<s>[INST] Hi [/INST] Hello<|im_end|>[INST] Bye [/INST] Ciao<|im_end|>")
    made = render(by, HI, HELLO, BYE, CIAO)
    assert tuple(made.tokens_T) == whole
    assert "[ Hello<|im_end|>]" in shown(made, by) and shown(made, by).endswith("[ Ciao<|im_end|>]")


class TestRefused:
    def test_a_template_that_never_stops(self):
        with pytest.raises(DataError, match=r"must end a turn.*'<\|im_end\|>'.*it ends with ' ?Hello\\n'"):
            render(chat(ENDLESS), HI, HELLO)

    def test_a_template_that_stops_an_answer_only_when_another_turn_follows(self):
        with pytest.raises(DataError, match="no answer would end"):
            render(chat(LATE), HI, HELLO, BYE, CIAO)

    def test_a_template_that_opens_an_answer_otherwise_than_it_shows_it(self):
        with pytest.raises(DataError, match=r"go on from, but it changes .*<think>.* into .*Hello"):
            render(chat(OPENS_OTHERWISE), HI, HELLO)

    def test_a_template_that_rewrites_old_answers(self):
        thought = Message("assistant", "<think>Hm</think>Hello")
        by = chat(THINKING)
        with pytest.raises(DataError, match=r"changes .*Hm.* into .*train_on='last'"):
            render(by, HI, thought, BYE, CIAO)
        last = render(by, HI, thought, BYE, Message("assistant", "<think>So</think>Ciao"), train_on="last")
        assert shown(last, by).endswith(
            "assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
            "[<think>So</think>Ciao<|im_end|>]"
        ), "the history as the model will see it"
        assert render(by, HI, thought).mask_T.sum() == len(thought.content) + 1

    def test_a_template_that_leaves_out_a_part_of_the_answer(self):
        with pytest.raises(DataError, match="must show all of an answer, but it leaves out '<think>Hm"):
            render(chat(FORGETFUL), HI, Message("assistant", "<think>Hm</think>Hello"))

    def test_a_template_that_knows_no_tools(self):
        with pytest.raises(DataError, match="tell the model of its tools, but it leaves out 'add'"):
            render(CHATS["chatml"], HI, HELLO, tools=(ADD,))
        with pytest.raises(DataError, match="leaves out 'add'"):
            render(CHATS["chatml"], HI, CALL)

    def test_an_answer_that_spells_the_stop_token(self):
        for by in (CHATS["chatml"], chat(None)):
            with pytest.raises(DataError, match=r"must not spell out '<\|im_end\|>'"):
                render(by, HI, Message("assistant", "I say <|im_end|> and go on"))
        with pytest.raises(DataError, match="must not spell out"):
            render(
                CHATS["qwen"], HI, Message("assistant", "", calls=(ToolCall("add", {"a": "<|eot|>"}),)), tools=(ADD,)
            )

    def test_a_bos_that_the_template_and_the_text_say(self):
        with pytest.raises(DataError, match="begin with '<s>' once"):
            render(chat("{{ bos_token }}" + LLAMA), HI, HELLO)

    def test_a_template_that_refuses_the_roles(self):
        strict = "{{ raise_exception('alternate!') }}"
        with pytest.raises(DataError, match=r"refuses the roles \['user'\].*alternate!"):
            render(chat(strict), HI, HELLO)

    def test_nothing_to_train_on(self):
        with pytest.raises(DataError, match="must have a turn of the assistant"):
            render(CHATS["chatml"], HI, HELLO, BYE, CIAO, prompt=4)


class TestLength:
    def test_what_is_too_long_is_cut_at_the_end(self):
        whole = render(CHATS["chatml"], HI, HELLO)
        made = render(CHATS["chatml"], HI, HELLO, max_tokens=len(whole.tokens_T) - 2)
        assert made.cut == 2 and made.length == len(whole.tokens_T)
        assert made.tokens_T.tolist() == whole.tokens_T[:-2].tolist() and made.prompt_length == whole.prompt_length
        assert shown(made, CHATS["chatml"]).endswith("[Hell]"), "what was cut off is not taught to stop"
        assert render(CHATS["chatml"], HI, HELLO, max_tokens=len(whole.tokens_T)).cut == 0

    @staticmethod
    def stream(*answers):
        examples = [Example(f"f:{i}", Conversation((HI, Message("assistant", a)), 1)) for i, a in enumerate(answers, 1)]
        return ExampleStream([examples], seed=0, shuffle=False)

    @staticmethod
    def config(**settings_):
        return ExamplesConfig(path="f", **settings_)

    def test_dropped_and_counted(self):
        room = len(render(CHATS["qwen"], HI, HELLO).tokens_T)
        config = self.config(max_tokens=room)
        fit = fit_stream(self.stream("Hello", "Hello!", "Hi"), Renderer(CHATS["qwen"], "all", room), config)
        assert [fit.at(i).id for i in range(3)] == ["f:1", "f:3", "f:1"] and fit.size == 2
        assert fit.skipped == f"1 of 3 examples do not fit into data.max_tokens = {room} and are left out"
        kept = fit_list(
            [self.stream("Hello!", "Hi").at(i) for i in range(2)], Renderer(CHATS["qwen"], "all", room), config
        )
        assert [e.id for e in kept] == ["f:2"]

    def test_cut_unless_nothing_trained_is_left(self):
        by = CHATS["qwen"]
        room = len(by.encode_prompt((HI,)))
        for limit, size in ((room + 1, 2), (room, None)):
            config = self.config(max_tokens=limit, too_long="truncate")
            if size:
                assert fit_stream(self.stream("Hello", "H"), Renderer(by, "all", limit), config).size == size
            else:
                with pytest.raises(DataError, match="2 of 2 examples do not fit"):
                    fit_stream(self.stream("Hello", "H"), Renderer(by, "all", limit), config)
                with pytest.raises(DataError, match="no held-out example fits"):
                    fit_list([self.stream("Hello").at(0)], Renderer(by, "all", limit), config)

    def test_refused(self):
        config = self.config(max_tokens=20, too_long="refuse")
        with pytest.raises(DataError, match=r"^f:1: an example must fit into data.max_tokens = 20, got \d\d tokens"):
            fit_stream(self.stream("Hello"), Renderer(CHATS["qwen"], "all", 20), config)

    def test_a_pair_is_as_long_as_its_longer_side(self):
        pair = Example("f:1", Conversation((HI, HELLO), 1), Conversation((HI, Message("assistant", "Hello there")), 1))
        stream = ExampleStream([[pair, Example("f:2", pair.chosen)]], seed=0, shuffle=False)
        room = len(render(CHATS["qwen"], HI, HELLO).tokens_T)
        fit = fit_stream(stream, Renderer(CHATS["qwen"], "all", room), self.config(max_tokens=room))
        assert [example.rejected for example in fit.sources[0]] == [None]

    def test_what_the_template_refuses_is_named(self):
        stream, renderer = self.stream("a", "<|im_end|>", "b"), Renderer(CHATS["qwen"], "all", 100)
        with pytest.raises(DataError, match=r"^f:2: an answer must not spell out"):
            fit_stream(stream, renderer, self.config(max_tokens=100))
        fit = fit_stream(stream, renderer, self.config(max_tokens=100, skip_bad_rows=True))
        assert fit.size == 2 and fit.skipped.startswith("1 of 3 examples cannot be rendered")
        assert "the first: f:2: an answer must not spell out" in fit.skipped


WORDS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12).filter(
    lambda t: t == t.strip() and t and "<" not in t and "[" not in t and not any(c.isspace() for c in t)
)


@st.composite
def conversations(draw):
    """Turns of everybody: system, user, assistant with and without calls, results of tools."""
    messages = [Message("system", draw(WORDS))] if draw(st.booleans()) else []
    uses_tools = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        messages.append(Message("user", draw(WORDS)))
        if uses_tools and draw(st.booleans()):
            messages.append(Message("assistant", "", calls=(ToolCall("add", {"a": 1}),)))
            messages += [Message("tool", draw(WORDS)) for _ in range(draw(st.integers(1, 2)))]
        messages.append(Message("assistant", draw(WORDS)))
    prompt = draw(st.sampled_from([0, after_user(messages)]))
    return Conversation(tuple(messages), prompt, (ADD,) if uses_tools else ())


@settings(max_examples=150, deadline=None)
@given(conversation=conversations(), train_on=st.sampled_from(["all", "last", "completion"]), data=st.data())
def test_trained_is_what_the_assistant_said_and_nothing_else(conversation, train_on, data):
    name = "qwen" if conversation.tools else data.draw(st.sampled_from(sorted(GOOD)))
    by = CHATS[name]
    made = Renderer(by, train_on, 100_000).render(conversation)
    turns = [m for m in conversation.messages[conversation.prompt :] if m.role == "assistant"]
    if train_on == "last":
        turns = turns[-1:]
    if train_on == "completion":
        start = conversation.prompt or after_user(conversation.messages)
        turns = [m for m in conversation.messages[start:] if m.role == "assistant"]
    call = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    stop = "<|eot|>" if name in ("llama", "phi") else "<|im_end|>"
    space = " " if name == "inst" else ""
    said = "".join(f"{space}{call if m.calls else m.content}{stop}" for m in turns)
    assert raw(by, made.tokens_T[made.mask_T]) == said
    assert raw(by, made.tokens_T) == rendered_until_stop(by, conversation, stop)
    assert made.prompt_length == int(np.argmax(made.mask_T)) > 0


def raw(by, tokens):
    return by.spell(*map(int, tokens))


def rendered_until_stop(by, conversation, stop):
    text = by.render(conversation.messages, generate=False, tools=conversation.tools)
    return text[: text.rindex(stop) + len(stop)]


def test_the_demo_model(demo_tokenizer):
    tokenizer = demo_tokenizer
    by = Chat(tokenizer)
    made = render(by, HI, HELLO, BYE, CIAO)
    whole = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in (HI, HELLO, BYE, CIAO)], tokenize=True, return_dict=False
    )
    assert made.tokens_T.tolist() == whole[:-1], "as the template has it, without the newline after the end"
    assert raw(by, made.tokens_T[made.mask_T]) == "Hello<|im_end|>Ciao<|im_end|>"
