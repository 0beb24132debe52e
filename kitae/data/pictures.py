"""Pictures: where they come from, where they are kept, and how they stand among tokens.

A picture is known by a number that is made of its content. Among the tokens of a sequence, each place of a picture is
`PICTURE` plus this number, above every vocabulary. So whatever compares, keeps or sends tokens knows which picture
they show, and nothing else need travel: prompts that look alike and show different pictures differ as tokens. The
content lies once in the folder `pictures` of a run, beside its journal, under the number.

In messages a picture is a part, `{"type": "image", "image": "picture:1a2b3c4d"}`. What people give (paths,
bytes, `data:` URLs, pictures of PIL) becomes such a name where it is read. Addresses on the network are refused.
"""

import base64
import binascii
import hashlib
import io
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kitae.errors import DataError, StoreError
from kitae.types import Message

PICTURE = 1 << 30
"""The first token that is a place of a picture. Tokens stay below 2³¹, since the journal keeps them in 32 bits."""

FOLDER = "pictures"
"""Of a run."""

MARK = "\U000ffffd"
"""A character that nobody uses. In a text, it begins what stands for places of a picture: its number, and how many."""

MARKED = re.compile(f"{MARK}([0-9a-f]{{8}})([0-9a-f]{{6}})")

_KEPT = "picture:"
_MOST_BYTES = 64 << 20  # of one picture
_MOST_PIXELS = 1 << 27


def is_picture(token: int) -> bool:
    return token >= PICTURE


def name_of(token: int) -> str:
    """The source that names the kept picture of a token: `"picture:1a2b3c4d"`."""
    return f"{_KEPT}{token - PICTURE:08x}"


def token_named(name: str) -> int | None:
    """The inverse of `name_of`; None: the source is another one."""
    return PICTURE + int(name[len(_KEPT) :], 16) if re.fullmatch(_KEPT + "[0-9a-f]{8}", name) else None


class Shelf:
    """The pictures that a process knows: `token = shelf.put("digit.png")`, `shelf.content(token)`.

    Contents that came as bytes are in memory, and files are read again, until a picture is used in a run: then it is
    kept in the folder of the run, where other processes and a resumed run find it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.most_bytes: int | None = None  # of contents in memory; the oldest are forgotten
        self._contents: dict[int, bytes | Path] = {}
        self._lock = threading.Lock()

    def keep_in(self, folder: Path) -> None:
        """Keep pictures that are used from now on in this folder."""
        self.folder = folder

    def put(self, source: str) -> int:
        """The token of a picture."""
        if (token := token_named(source)) is not None:
            return token
        content = read_source(source)
        with self._lock:
            token = self._place(content)
            if token not in self._contents:
                self._contents[token] = content if source.startswith("data:") else Path(source)
                self._forget_oldest()
        return token

    def _forget_oldest(self) -> None:
        if self.most_bytes is not None:
            held = {token: len(found) for token, found in self._contents.items() if isinstance(found, bytes)}
            for token in list(held)[:-1]:
                if sum(held.values()) <= self.most_bytes:
                    break
                del held[token], self._contents[token]

    def keep(self, token: int) -> None:
        """Put a picture that is used into the folder, if there is one."""
        with self._lock:
            if self.folder is None or self._contents.get(token) == (file := self._file(token)):
                return
            if not file.exists():
                content = self._content(token)
                file.parent.mkdir(parents=True, exist_ok=True)
                scratch = file.with_suffix(f".{os.getpid()}")
                scratch.write_bytes(content)
                scratch.replace(file)
            self._contents[token] = file

    def content(self, token: int) -> bytes:
        """The bytes of the picture's file."""
        with self._lock:
            return self._content(token)

    def _content(self, token: int) -> bytes:
        place = self._contents.get(token) or (self._file(token) if self.folder is not None else None)
        try:
            if place is None:
                raise FileNotFoundError("this process has not put it there")
            return place if isinstance(place, bytes) else place.read_bytes()
        except OSError as error:
            raise StoreError(f"the picture {name_of(token)} must be on the shelf, got none: {error}") from error

    def _place(self, content: bytes) -> int:
        """The token that the content makes; the next free one where another picture has it."""
        token = PICTURE + int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "big") % PICTURE
        while True:
            there = token in self._contents or (self.folder is not None and self._file(token).exists())
            if not there or self._content(token) == content:
                return token
            token = PICTURE + (token - PICTURE + 1) % PICTURE

    def _file(self, token: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{token - PICTURE:08x}"


SHELF = Shelf()
"""That of this process. Pictures never change and are known by their content, so whoever uses them may share it."""


def read_source(source: str) -> bytes:
    """The file of a picture that a source names."""
    if source.startswith("data:"):
        head, comma, body = source.partition(",")
        if not comma or not head.endswith(";base64"):
            raise DataError(f"a picture as data: must be data:image/png;base64,…, got {source[:60]!r}")
        try:
            content = base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            raise DataError("a picture as data: must be valid base64, got something else") from None
    else:
        try:
            content = Path(source).read_bytes()
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read the picture {source[:200]!r}: {error}") from None
    if len(content) > _MOST_BYTES:
        raise DataError(f"a picture must have at most {_MOST_BYTES >> 20} MiB, got {len(content) >> 20}")
    return content


def opened(content: bytes) -> Any:
    """The picture as PIL has it, in colours and the right way up."""
    with _open(content) as found:
        try:
            from PIL import ImageOps

            return ImageOps.exif_transpose(found).convert("RGB")
        except Exception as error:
            raise DataError(f"a picture must be whole, got one that PIL cannot read to its end ({error})") from None


def _open(content: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("pictures need the package pillow: pip install 'kitae[vision]'") from None
    try:
        found = Image.open(io.BytesIO(content))
    except Exception as error:  # PIL raises what it likes for what is no picture
        raise DataError(f"a picture must be a file that PIL reads, got {content[:8]!r}… ({error})") from None
    if found.width * found.height > _MOST_PIXELS:
        raise DataError(f"a picture must have at most {_MOST_PIXELS} pixels, got {found.width}×{found.height}")
    return found


def check_picture(content: bytes) -> None:
    """Raise `DataError` for what is no picture, or too large a one, as far as the beginning of the file says it."""
    _open(content).close()


def is_pil(given: object) -> bool:
    return hasattr(given, "save") and hasattr(given, "convert") and hasattr(given, "getpixel")


def as_source(given: object, folder: Path | None = None) -> str:
    """What people give as a picture, as a source: a path, an object with `path` or `bytes` as data sets have it, a
    picture of PIL, or a `data:` URL. folder: that relative paths begin in."""
    if isinstance(given, Mapping):  # of a column of pictures; paths may be those of another machine
        given = given.get("bytes") or given.get("path") or given.get("url") or given.get("image")
    if isinstance(given, bytes | bytearray | memoryview):
        return as_data(bytes(given))
    if is_pil(given):
        picture: Any = given
        buffer = io.BytesIO()
        picture.convert("RGB").save(buffer, format="PNG")
        return as_data(buffer.getvalue())
    if not isinstance(given, str | os.PathLike) or not str(given):
        raise DataError(f"a picture must be a path, bytes, a data: URL or a picture of PIL, got {repr(given)[:60]}")
    text = os.fspath(given)
    if text.startswith("file://"):
        text = text[len("file://") :]
    if re.match(r"[a-z][a-z0-9+.-]*://", text, re.IGNORECASE):
        raise DataError(f"a picture must not be an address on the network (fetch it first), got {text[:80]!r}")
    if text.startswith("data:") or token_named(text) is not None:
        return text
    return str((folder or Path()).absolute() / Path(text).expanduser())


def as_data(content: bytes) -> str:
    """The source of a picture that is no file."""
    return f"data:{media_type(content)};base64,{base64.b64encode(content).decode()}"


_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}


def looks_like_picture(content: bytes) -> bool:
    return content.startswith(tuple(_KINDS))


def media_type(content: bytes) -> str:
    """What a browser must be told of a picture's file."""
    return "image/" + next((kind for start, kind in _KINDS.items() if content.startswith(start)), "png")


IMAGES = ("image", "image_url")
"""What the type of a part that is a picture may be called."""


def image_part(source: str) -> dict[str, str]:
    return {"type": "image", "image": source}


def given_of(part: Mapping[str, Any]) -> object:
    """What a part gives as its picture: `{"type": "image_url", "image_url": {"url": …}}` is OpenAI's way; None: it is a
    placeholder for one that is given elsewhere."""
    names = ("image", "image_url", "url", "path", "bytes", "data")
    found = next((part[name] for name in names if part.get(name) is not None), None)
    return found.get("url", found) if isinstance(found, Mapping) else found


def read_part(part: Mapping[str, Any], folder: Path | None = None, shelf: "Shelf | None" = None) -> dict[str, str]:
    """The part of a picture, with its name on the shelf; a picture that cannot be read is refused."""
    return shown(given_of(part), folder, shelf)


def shown(given: object, folder: Path | None = None, shelf: "Shelf | None" = None) -> dict[str, str]:
    """A part that shows what people gave as a picture."""
    shelf = SHELF if shelf is None else shelf
    source = as_source(given, folder)
    token = shelf.put(source)
    if token_named(source) is None:
        check_picture(shelf.content(token))
    return image_part(name_of(token))


def mark(token: int, places: int) -> str:
    """What stands for places of a picture in a text."""
    return f"{MARK}{token - PICTURE:08x}{places:06x}"


def sources_of(messages: Iterable[Message]) -> Iterator[str]:
    """The sources of all pictures in messages, in their order."""
    for message in messages:
        for part in message.parts:
            if part.get("type") in IMAGES:
                yield str(given_of(part))


def kept(messages: Sequence[Message], shelf: Shelf = SHELF) -> tuple[Message, ...]:
    """Messages in which pictures, whatever people gave for them, are names of what is on the shelf."""

    def named(part: Mapping[str, Any]) -> Mapping[str, Any]:
        return read_part(part, shelf=shelf) if part.get("type") in IMAGES else part

    return tuple(replace(m, parts=tuple(map(named, m.parts))) if m.parts else m for m in messages)
