from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import GenerationConfig, PreTrainedTokenizerFast

from kitae.data.chat import Chat, as_dict
from kitae.errors import DataError
from kitae.types import Message, ToolCall

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER, ANSWER = Message("user", "How many?"), Message("assistant", "Nine, I  think .")
TOOL = Message("tool", "9 answerendshere")


def tokenizer(template=CHATML, adds_specials=False):
    """Bytes as tokens, and three special tokens."""
    base = Tokenizer(BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    base.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "<|im_start|>", "<|im_end|>")])
    if adds_specials:
        ids = [(t, base.token_to_id(t)) for t in ("<s>", "<|im_end|>")]
        base.post_processor = processors.TemplateProcessing(single="<s> $A <|im_end|>", special_tokens=ids)
    made = PreTrainedTokenizerFast(tokenizer_object=base, bos_token="<s>", eos_token="<|im_end|>")
    made.chat_template = template
    return made


def raw(tok, tokens):
    return tok.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def sampled(tok, text):
    return tuple(tok(text, add_special_tokens=False)["input_ids"])


def test_prompt_is_the_template_up_to_the_answer():
    tok = tokenizer()
    tokens = Chat(tok).encode_prompt([USER])
    assert isinstance(tokens, tuple)
    assert list(tokens) == tok.apply_chat_template(
        [{"role": "user", "content": "How many?"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert raw(tok, tokens).endswith("<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("adds_specials", [False, True])
def test_turns_add_up_to_the_whole_conversation(adds_specials):
    tok = tokenizer(adds_specials=adds_specials)
    chat = Chat(tok)
    grown = chat.encode_prompt([USER]) + sampled(tok, ANSWER.content + "<|im_end|>") + chat.encode_turn([TOOL, USER])
    assert grown == chat.encode_prompt([USER, ANSWER, TOOL, USER])


def test_an_open_turn_is_closed_first():
    tok = tokenizer()
    chat = Chat(tok)
    grown = chat.encode_prompt([USER]) + sampled(tok, ANSWER.content) + chat.encode_turn([USER], closed=False)
    assert grown == chat.encode_prompt([USER, ANSWER, USER])


def test_a_template_may_write_before_its_stop_token():
    tok = tokenizer("{% for m in messages %}[{{ m.role }}] {{ m.content }} <|im_end|>\n{% endfor %}[assistant]")
    assert raw(tok, Chat(tok).encode_turn([USER])) == "\n[user] How many? <|im_end|>\n[assistant]"


def test_a_template_without_stop_token():
    tok = tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    assert raw(tok, Chat(tok).encode_turn([USER])) == "\nuser: How many?\nassistant:"


def test_history_that_a_template_rewrites_does_not_matter():
    template = CHATML.replace("{{ m.content }}", "{% if loop.last %}<think></think>{% endif %}{{ m.content }}")
    tok = tokenizer(template)
    expected = "\n<|im_start|>user\n<think></think>How many?<|im_end|>\n<|im_start|>assistant\n"
    assert raw(tok, Chat(tok).encode_turn([USER])) == expected


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (
            "{{ raise_exception('no tools here') if messages[2] }}",
            [TOOL],
            r"refuses the roles .*'tool'.*: no tools here",
        ),
        ("{% for m in messages %}x{% endfor %}", [USER], "must show the content of assistant messages"),
        (CHATML, [], "a turn must have at least one message"),
    ],
)
def test_turns_that_cannot_be_encoded(template, messages, message):
    with pytest.raises(DataError, match=message):
        Chat(tokenizer(template)).encode_turn(messages)


@pytest.mark.parametrize(("adds_specials", "start"), [(False, ""), (True, "<s>")])
def test_without_a_template_the_text_is_plain(adds_specials, start):
    tok = tokenizer(None, adds_specials)
    chat = Chat(tok)
    assert raw(tok, chat.encode_prompt([USER, Message("user", "Now?")])) == start + "How many?\nNow?"
    assert raw(tok, chat.encode_turn([TOOL])) == "\n" + TOOL.content


def test_empty_prompts_are_refused():
    with pytest.raises(DataError, match="at least one message"):
        Chat(tokenizer()).encode_prompt([])
    with pytest.raises(DataError, match="at least one token"):
        Chat(tokenizer(None)).encode_prompt([Message("user", "")])
    with pytest.raises(DataError, match="at least one token"):
        Chat(tokenizer("{# nothing #}")).encode_prompt([USER])


def test_decoding_keeps_the_spaces_and_drops_special_tokens():
    tok = tokenizer()
    text = " a ,  b 's . \n"
    assert Chat(tok).decode(sampled(tok, text + "<|im_end|>")) == text
    assert Chat(tok).decode(()) == ""


def test_stop_tokens_come_from_both_and_only_once():
    tok = tokenizer()
    end, start = tok.convert_tokens_to_ids(["<|im_end|>", "<s>"])
    assert Chat(tok).stop_tokens == (end,)
    assert Chat(tok, GenerationConfig(eos_token_id=[end, start])).stop_tokens == (end, start)
    assert Chat(tok, SimpleNamespace(eos_token_id=start)).stop_tokens == (end, start)
    tok.eos_token = None
    assert Chat(tok, GenerationConfig()).stop_tokens == ()


# Tools.

WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    "{% for t in tools %}{{ t.function.name }}: {{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}"
    "{% if m.tool_call_id %} ({{ m.tool_call_id }}){% endif %}{{ '\n' }}"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}[{{ p.type }}]{{ p.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls %}<call {{ c.id }}>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALLING = Message("assistant", "Wait.", calls=(ToolCall("add", {"b": 2, "a": [1, False]}, id="call_0"),))
RESULT = Message("tool", "3", call_id="call_0", name="add")


def test_messages_have_the_shape_that_templates_know():
    assert as_dict(USER) == {"role": "user", "content": "How many?"}
    assert as_dict(RESULT) == {"role": "tool", "content": "3", "tool_call_id": "call_0", "name": "add"}
    call = {"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": [1, False]}}}
    assert as_dict(CALLING) == {"role": "assistant", "content": "Wait.", "tool_calls": [{"id": "call_0", **call}]}
    assert as_dict(Message("assistant", calls=(ToolCall("f", {}),)))["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {}}}
    ]
    parts = ({"type": "text", "text": "Look:"}, {"type": "image", "url": "a.png"})
    assert as_dict(Message("user", parts=parts)) == {"role": "user", "content": list(parts)}


def test_tools_calls_and_results_are_rendered():
    tok = tokenizer(WITH_TOOLS)
    chat = Chat(tok)
    parts = Message("user", parts=({"type": "text", "text": "1 + "}, {"type": "text", "text": "2"}))
    text = raw(tok, chat.encode_prompt([parts, CALLING, RESULT], [ADD]))
    assert text.startswith("<|im_start|>system\nadd: {") and '"description": "Add."' in text
    assert "<|im_start|>user\n[text]1 + [text]2<|im_end|>" in text
    assert 'Wait.<call call_0>add{"b": 2, "a": [1, false]}<|im_end|>' in text
    assert text.endswith("<|im_start|>tool add (call_0)\n3<|im_end|>\n<|im_start|>assistant\n")


def test_the_last_prompt_is_remembered_with_its_tools():
    tok = tokenizer(WITH_TOOLS)
    chat = Chat(tok)
    plain, told = chat.encode_prompt([USER]), chat.encode_prompt([USER], [ADD])
    assert plain != told and raw(tok, told).endswith(raw(tok, plain)) and chat.encode_prompt([USER]) == plain


def test_a_result_follows_what_the_model_sampled():
    tok = tokenizer(WITH_TOOLS)
    chat = Chat(tok)
    call = 'Wait.<call call_0>add{"b": 2, "a": [1, false]}<|im_end|>'
    grown = chat.encode_prompt([USER], [ADD]) + sampled(tok, call) + chat.encode_turn([RESULT])
    assert grown == chat.encode_prompt([USER, CALLING, RESULT], [ADD])


def test_without_a_template_parts_are_their_texts_and_tools_are_refused():
    tok = tokenizer(None)
    parts = Message("user", parts=({"type": "text", "text": "1 + "}, {"type": "text", "text": "2"}))
    assert raw(tok, Chat(tok).encode_prompt([parts])) == "1 + 2"
    with pytest.raises(DataError, match="needs a chat template to be told of tools"):
        Chat(tok).encode_prompt([USER], [ADD])


@pytest.mark.thorough
def test_a_real_tokenizer_adds_turns_up(demo_tokenizer):
    tok = demo_tokenizer
    chat = Chat(tok)
    said = sampled(tok, ANSWER.content + "<|im_end|>")
    grown = chat.encode_prompt([USER]) + said + chat.encode_turn([RESULT])
    assert grown == chat.encode_prompt([USER, ANSWER, RESULT])
