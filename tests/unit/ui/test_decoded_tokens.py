"""Tokens as text: pieces that make up the whole again, characters of several tokens, and runs without a tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kitae.ui import samples


def run_with(folder: Path, model: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"model": {"path": model}}))
    return folder


@pytest.mark.parametrize("text", ["Hello, world\n  two", "naïve – 鍛える 🔨 end"])
def test_pieces_make_up_the_text(tmp_path: Path, tiny_folder: Callable[[str], Path], text: str) -> None:
    from tokenizers import Tokenizer

    model = tiny_folder("llama")
    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    found = samples.pieces(run_with(tmp_path, str(model)), tokens)
    assert found is not None and len(found) == len(tokens)
    assert "".join(found) == text


@pytest.mark.parametrize("model", ["/nowhere/at/all", "no such model", ""])
def test_a_model_that_is_not_here_gives_none(tmp_path: Path, model: str) -> None:
    assert samples.pieces(run_with(tmp_path, model), [1, 2]) is None


def test_a_broken_tokenizer_gives_none(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    assert samples.pieces(run_with(tmp_path, ""), [1]) is None
