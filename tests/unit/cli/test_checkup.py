"""`kitae doctor MODEL`."""

import json

import pytest
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
from typer.testing import CliRunner

from kitae.cli.checkup import examine
from kitae.cli.main import app


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


def test_the_command():
    runner = CliRunner()
    done = runner.invoke(app, ["doctor", "tiny"])
    assert done.exit_code == 0 and "good   stop token" in done.stdout
    rows = json.loads(runner.invoke(app, ["doctor", "tiny", "--json"]).stdout)
    assert {"name", "verdict", "found", "advice"} == set(rows[0]) and "context" in {row["name"] for row in rows}


def test_the_command_says_by_its_status_that_something_is_wrong(tmp_path):
    from kitae.models.load import find_model

    folder = tmp_path / "model"
    folder.mkdir()
    for file in find_model("tiny").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(ENDLESS)
    done = CliRunner().invoke(app, ["doctor", str(folder)])
    assert done.exit_code == 1 and "wrong  stop token" in done.stdout
