"""The text and the bytes of single tokens, as clients get them."""

import re
from functools import cache
from typing import Any

_BROKEN = "\ufffd"
_SPACE = "\u2581"  # as SentencePiece writes it
_BYTE_RE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """`TokenText(tokenizer).text(42)`.

    A token that is a part of a character is spelled `bytes:\\xe2\\x82`, as in OpenAI's API, so that different tokens
    have different texts.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self._special |= set(tokenizer.all_special_ids)
        self._known: dict[int, tuple[str, tuple[int, ...]]] = {}

    def piece(self, token: int) -> str:
        """The token as the vocabulary spells it."""
        found: str | None = self._tokenizer.convert_ids_to_tokens(token)
        return found or ""

    def is_special(self, token: int) -> bool:
        """Whether the token is left out of texts."""
        return token in self._special

    def text(self, token: int) -> str:
        return self._spell(token)[0]

    def bytes(self, token: int) -> list[int]:
        return list(self._spell(token)[1])

    def _spell(self, token: int) -> tuple[str, tuple[int, ...]]:
        if token not in self._known:
            self._known[token] = self._make(token)
        return self._known[token]

    def _make(self, token: int) -> tuple[str, tuple[int, ...]]:
        text: str = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if _SPACE in (piece := self.piece(token)):  # alone, it would lose the space that it begins with
            text = piece.replace(_SPACE, " ")
        if _BROKEN not in text:
            return text, tuple(text.encode())
        found = self._bytes_of(piece)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found), found

    def _bytes_of(self, piece: str) -> tuple[int, ...]:
        if one := _BYTE_RE.fullmatch(piece):
            return (int(one[1], 16),)
        alphabet = byte_alphabet()
        return tuple(alphabet[c] for c in piece) if all(c in alphabet for c in piece) else tuple(piece.encode())


@cache
def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes with: printable ones as they are, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
