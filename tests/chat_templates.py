"""Chat templates in the manner of well-known models, and tokenizers to go with them."""

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kitae.data.chat import Chat

CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
QWEN = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PHI = (  # two stop tokens in a row at the end of a conversation
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|im_end|>{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}<|im_end|>{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
HERMES = (  # tools in a line of the system, results in a turn of their own
    "{% if tools %}<|im_start|>system\nYou may call: <tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (  # a call is the whole turn, and only one; results come from ipython
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\nAnswer in JSON with "
    '{"name": function, "parameters": arguments} to call one of: '
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|eot_id|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>"
    "{% elif m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": {{ m.tool_calls[0].function.name | tojson }}, '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
SMOLLM2 = (  # knows nothing of tools
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are SmolLM.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_XML = QWEN.replace(
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}',
    "<function={{ call.function.name }}>{% for k, v in call.function.arguments | items %}"
    "{{ '\\n' }}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>{% endfor %}\n</function>",
)
HARMONY = (  # channels; a result must follow its call, old answers end with another token than new ones
    "<|start|>system<|message|>You are a model.<|end|>"
    "{% if tools %}<|start|>developer<|message|>namespace functions { "
    "{% for t in tools %}{{ t | tojson }}{% endfor %} }<|end|>{% endif %}"
    "{% set last = namespace(name=none) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{% set last.name = m.tool_calls[0].function.name %}"
    "<|start|>assistant<|channel|>commentary to=functions.{{ last.name }} <|constrain|>json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}{% set last.name = none %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endif %}"
    "{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call before a result') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
FAMILIES = {  # templates of models that call tools, by the name of the way in which they do
    "qwen": QWEN,
    "qwen-xml": QWEN_XML,
    "hermes": HERMES,
    "smollm2": SMOLLM2,
    "llama": LLAMA3,
    "harmony": HARMONY,
}
GOOD = {"chatml": CHATML, "llama": LLAMA, "qwen": QWEN, "phi": PHI, "inst": INST}

THINKING = CHATML.replace(  # shows the thinking of the last answer only
    "{{ m.content }}",
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}",
)
FORGETFUL = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
ENDLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LATE = (  # the turn of the assistant is closed by the next one
    "{% for m in messages %}{% if not loop.first %}<|im_end|>{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_end|><|im_start|>assistant\n{% endif %}"
)
OPENS_OTHERWISE = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")

SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>")
MORE_SPECIAL = (
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    *("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>"),
)
STOPS = ("<|im_end|>", "<|eot|>", "<|eot_id|>", "<|eom_id|>", "<|call|>", "<|return|>")


def tokenizer(template: str | None = CHATML, *, adds_specials: bool = False, spaced: bool = False):
    """Bytes as tokens, and special ones; `spaced` puts a space before every text, as older tokenizers do."""
    base = Tokenizer(BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    if spaced:
        base.normalizer = normalizers.Prepend(" ")
    base.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (*SPECIAL, *MORE_SPECIAL)])
    if adds_specials:
        ids = [(t, base.token_to_id(t)) for t in ("<s>", "<|im_end|>")]
        base.post_processor = processors.TemplateProcessing(single="<s> $A <|im_end|>", special_tokens=ids)
    made = PreTrainedTokenizerFast(tokenizer_object=base, bos_token="<s>", eos_token="<|im_end|>")
    made.chat_template = template
    return made


class _Stops:
    """In place of a generation config: the turn of the Llama-like template ends with another token than EOS."""

    def __init__(self, tokens: list[int]) -> None:
        self.eos_token_id = tokens


def chat(template: str | None = CHATML, **options: bool) -> Chat:
    made = tokenizer(template, **options)
    return Chat(made, _Stops(made.convert_tokens_to_ids(list(STOPS))))
