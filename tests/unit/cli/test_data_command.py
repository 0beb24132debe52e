"""`kitae data`: what it says of prompts and of examples."""

import json
import sys
from pathlib import Path

import pytest

from kitae.cli import main

QUESTION = "How many apples are left when Ann eats three of the nine that Bob has bought for his birthday"


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def say(monkeypatch, capsys, tmp_path, tiny_folder):
    """`say("method.kind=sft", …)`: what the command prints, and its exit status."""
    monkeypatch.chdir(tmp_path)
    folder = tiny_folder("llama")

    def call(recipe, *arguments):
        (tmp_path / "r.toml").write_text(recipe + f'\n[model]\npath = "{folder}"\n')
        monkeypatch.setattr(sys, "argv", ["kitae", "data", "r.toml", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main.run()
        captured = capsys.readouterr()
        return captured.out, captured.err, stopped.value.code or 0

    return call


def test_prompts(say, tmp_path):
    rows = [{"question": q, "answer": "6"} for q in (QUESTION, QUESTION.upper(), "What?")]
    path, held = write(tmp_path / "f.jsonl", rows), write(tmp_path / "h.jsonl", rows[2:])
    suite = write(tmp_path / "suite.jsonl", [{"problem": QUESTION}])
    recipe = f'[data]\npath = "{path}"\neval_path = "{held}"\nshuffle = false\n[verifier]\nname = "number"\n'
    out, err, status = say(recipe, "--against", suite, "--examples", 2)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert "prompts    3" in lines
    assert "duplicates 1 exact, e.g. f.jsonl:2 and f.jsonl:1" in lines
    assert "overlap    1 with what is held out, e.g. f.jsonl:3 and h.jsonl:1" in lines
    assert f"overlap    2 with {suite}, e.g. f.jsonl:1 and suite.jsonl:1" in lines
    assert out.count("\n── f.jsonl:") == 2 and "reference: '6'" in lines


def test_a_task(say):
    out, _, status = say('[data]\ntask = "reverse"\n', "--examples", 0)
    assert status == 0 and "prompts    256 (the first 256 of an endless task)" in out
    assert "overlap    0 with what is held out" in out and "──" not in out


SFT = '[method]\nkind = "sft"\n[data]\nshuffle = false\n'


def test_demonstrations(say, tmp_path):
    rows = [
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": "Hi", "chosen": "Hello", "rejected": "Go"},
        {"text": "x" * 400},
    ]
    path = write(tmp_path / "f.jsonl", rows)
    out, err, status = say(f'{SFT}path = "{path}"\nmax_tokens = 100\n')
    assert (status, err) == (0, "")
    assert "f.jsonl  2 × demonstration  1 × preference" in out
    assert "examples   3\n" in out and "overlap    nothing is held out" in out
    assert "1 of 3 examples are longer than data.max_tokens = 100, and are left out" in out
    assert "duplicates 1 exact, e.g. f.jsonl:2 and f.jsonl:1" in out
    shown = out.partition("── f.jsonl:1 ──\n")[2].partition("\n\n── f.jsonl:2")[0]
    assert shown.count("⟦") == shown.count("⟧") == 1 and "⟦Hello<" in shown and shown.endswith("⟧")
    assert "── f.jsonl:3, too long ──" in out


def test_mixed_files_and_held_out_ones(say, tmp_path):
    ask = {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Six"}]}
    first = write(tmp_path / "a.jsonl", [ask])
    second = write(tmp_path / "b.jsonl", [{"instruction": "Hi", "output": "Hello"}])
    held = write(tmp_path / "h.jsonl", [ask])
    mix = f'mix = [{{path = "{first}", weight = 1}}, {{path = "{second}", weight = 2, format = "alpaca"}}]'
    out, _, status = say(f'{SFT}{mix}\neval_path = "{held}"\n')
    assert status == 0 and "a.jsonl  1 × demonstration\n" in out and "b.jsonl  1 × demonstration\n" in out
    assert "overlap    1 with what is held out, e.g. a.jsonl:1 and h.jsonl:1" in out


def test_what_cannot_be_rendered_ends_with_an_error(say, tmp_path):
    tools = [{"name": "add", "parameters": {}}]
    rows = [{"prompt": "Hi", "completion": "Hello"}, {"prompt": "Hi", "completion": "Ho", "tools": tools}]
    path = write(tmp_path / "f.jsonl", rows)
    out, err, status = say(f'{SFT}path = "{path}"\n')
    assert status == 1 and "examples   2\n" in out
    assert err.startswith("error: 1 of 2 examples cannot be rendered; the first: f.jsonl:2: ") and "tools" in err
    out, err, status = say(f'{SFT}path = "{path}"\n', "data.skip_bad_rows=true")
    assert (status, err) == (0, "") and "they are left out (data.skip_bad_rows)" in out
