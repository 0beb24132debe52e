"""The texts of tokens, from the tokenizer of a run, without loading a model or torch."""

import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from kitae.errors import KitaeError
from kitae.ui.settings import raw_settings

_lock = threading.Lock()


def pieces(run: Path, tokens: list[int]) -> list[str] | None:
    """The text of each token; None where the tokenizer is not on this machine.

    Where several tokens make one character together, the last of them gets the character and the others are empty.
    """
    tokenizer = _tokenizer(_file(run))
    if tokenizer is None:
        return None
    with _lock:  # one decoder at a time: decoding is fast, and a tokenizer need not be safe for threads
        return _split(tokenizer, tokens)


def _split(tokenizer: Any, tokens: list[int]) -> list[str]:
    found, start = list[str](), 0
    before = ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[start:end], skip_special_tokens=False)
        if text.endswith("�") and end - start < _LONGEST_CHARACTER:
            found.append("")
            continue
        found.append(text[len(before) :] if text.startswith(before) else text)
        # The next token is decoded with this one before it: some decoders write a space only between tokens.
        start, before = end - 1, tokenizer.decode(tokens[end - 1 : end], skip_special_tokens=False)
    return found


_LONGEST_CHARACTER = 6  # tokens


def _file(run: Path) -> Path | None:
    """The tokenizer file of the trained model if there is one, else that of the model that the run began with."""
    if (own := run / "model" / "tokenizer.json").is_file():
        return own
    from kitae.models.load import find_model

    try:
        base = find_model(str(raw_settings(run).get("model.path", "")), download=False)
    except (KitaeError, OSError, ValueError):
        return None
    return found if base is not None and (found := base / "tokenizer.json").is_file() else None


@lru_cache(maxsize=4)
def _tokenizer(file: Path | None) -> Any:
    if file is None:
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises plain ones for files that it cannot read
        return None
