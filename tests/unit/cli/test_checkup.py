"""`kitae doctor MODEL`."""

import json

import pytest
import torch
from chat_templates import (
    CHATML,
    ENDLESS,
    FAMILIES,
    FORGETFUL,
    GOOD,
    OPENS_OTHERWISE,
    STOPS,
    THINKING,
    tokenizer,
)
from safetensors.torch import save_file
from typer.testing import CliRunner

from kitae.cli.checkup import examine, weigh
from kitae.cli.main import app
from kitae.models.load import find_model


class Stops:
    def __init__(self, tokens):
        self.eos_token_id = tokens


def findings(template, stops=STOPS, **options):
    made = tokenizer(template, **options)
    return {f.name: f for f in examine(made, Stops(made.convert_tokens_to_ids(list(stops))))}


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_wrong_with_the_families(name):
    found = findings(FAMILIES[name])
    assert {f.name for f in found.values() if f.verdict == "wrong"} == set()
    assert found["calls"].verdict == "good" and f"read as {name}" in found["calls"].found
    assert found["results"].verdict == "good" and found["stop token"].verdict == "good"
    assert found["tools"].verdict == ("note" if name == "smollm2" else "good")


@pytest.mark.parametrize("name", GOOD)
def test_conversations_that_only_grow(name):
    assert findings(GOOD[name])["prefix"].verdict == "good"


def test_a_turn_that_ends_with_a_token_at_which_nothing_stops():
    found = findings(FAMILIES["llama"], stops=("<|im_end|>",))["stop token"]
    assert found.verdict == "wrong" and "'<|eot_id|>' ends a turn, but sampling stops at '<|im_end|>'" in found.found
    assert "generation_config.json" in found.advice
    assert findings(ENDLESS)["stop token"].verdict == "wrong"


def test_thinking_that_is_dropped():
    assert findings(CHATML)["thinking"].verdict == "good"
    assert findings(FORGETFUL)["thinking"].verdict == "note"
    dropped = findings(THINKING)["thinking"]
    assert dropped.verdict == "note" and "dropped from earlier turns" in dropped.found
    assert "begin inside <think>" in findings(OPENS_OTHERWISE)["thinking"].found


def test_old_turns_that_are_shown_otherwise():
    template = CHATML.replace("{{ m.content }}", "{% if not loop.last %}old {% endif %}{{ m.content }}")
    found = findings(template)["prefix"]
    assert found.verdict == "note" and "Kitae appends" in found.advice


def test_two_beginnings():
    assert findings("{{ bos_token }}" + FAMILIES["llama"])["BOS"].verdict == "wrong"
    assert findings(FAMILIES["llama"])["BOS"].verdict == "good"


def test_a_template_that_refuses_or_leaves_out():
    picky = CHATML.replace("{% for m", "{% if messages[2] %}{{ raise_exception('too long') }}{% endif %}{% for m", 1)
    found = findings(picky)
    assert found["prefix"].verdict == "wrong" and "too long" in found["prefix"].found
    silent = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    assert findings(silent)["template"].verdict == "wrong"


def test_calls_that_the_reader_does_not_know():
    odd = FAMILIES["hermes"].replace("<tool_call>", "<invoke>")
    assert findings(odd)["calls"].verdict == "wrong"


def test_no_template_and_padding():
    found = findings(None)
    assert found["template"].verdict == "note" and "newlines" in found["template"].found
    made = tokenizer()
    made.pad_token = "<|im_end|>"
    assert [f.verdict for f in examine(made) if f.name == "padding"] == ["note"]


@pytest.fixture
def weighed(tmp_path):
    """What is said of the marks of calls, for a model with these two rows in its embedding."""

    def weighed(first, second, tokens=("<tool_call>", "</tool_call>"), template=FAMILIES["qwen"]):
        made = tokenizer(template)
        made.add_tokens(list(tokens))
        rows = torch.randn(len(made), 4)
        for token, row in zip(tokens, (first, second), strict=False):
            rows[made.convert_tokens_to_ids(token)] = torch.tensor(row)
        (tmp_path / "config.json").write_bytes((find_model("tiny") / "config.json").read_bytes())
        save_file({"model.embed_tokens.weight": rows.bfloat16()}, tmp_path / "model.safetensors")
        return {f.name: f for f in weigh(tmp_path, made)}.get("call marks")

    return weighed


def test_marks_of_calls_that_were_never_trained(weighed):
    found = weighed([0.3, 0.1, 0.0, -0.2], [0.3, 0.1, 0.001, -0.2])
    assert found.verdict == "note" and "never trained" in found.found and "added_tokens" in found.advice
    assert weighed([0.0] * 4, [0.0] * 4).verdict == "note"


def test_marks_of_calls_that_were_trained(weighed):
    assert weighed([0.3, 0.1, 0.0, -0.2], [0.3, 0.2, 0.0, -0.2]).verdict == "good"


def test_marks_of_calls_that_are_no_tokens_or_not_the_template_s(weighed):
    same = [0.3, 0.1, 0.0, -0.2]
    assert weighed(same, same, tokens=("<tool_call>",)) is None
    assert weighed(same, same, template=CHATML) is None


def test_the_command():
    runner = CliRunner()
    done = runner.invoke(app, ["doctor", "tiny"])
    assert done.exit_code == 0 and "good   stop token" in done.stdout
    rows = json.loads(runner.invoke(app, ["doctor", "tiny", "--json"]).stdout)
    assert {"name", "verdict", "found", "advice"} == set(rows[0]) and "context" in {row["name"] for row in rows}


def test_the_command_says_by_its_status_that_something_is_wrong(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in find_model("tiny").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(ENDLESS)
    done = CliRunner().invoke(app, ["doctor", str(folder)])
    assert done.exit_code == 1 and "wrong  stop token" in done.stdout
