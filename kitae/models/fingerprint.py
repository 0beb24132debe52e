"""What the files of a model say, as checksums: to tell whether they still are those that a run began with.

All bytes are read once by each process, by several threads: a size and a date would not tell a file that was put in the
place of another one, and loading reads the same bytes a moment later, from memory then.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from kitae.errors import ModelError
from kitae.store.sealed import file_seal

_ENDINGS = (".safetensors", ".json", ".model", ".txt", ".jinja", ".bin", ".py", ".tiktoken")
"""Endings of what loading a model and its tokenizer may read."""


def fingerprint_files(folders: Iterable[Path]) -> dict[str, str]:
    """`{"/models/qwen/model.safetensors": "9f3c…", …}`"""
    found = [
        path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in _ENDINGS and path.is_file()
    ]
    try:
        with ThreadPoolExecutor() as pool:
            return dict(zip(map(str, found), pool.map(_known, found), strict=True))
    except OSError as error:
        raise ModelError(f"a file of the model cannot be read: {error}") from error


def _known(path: Path) -> str:
    seen = path.stat()
    return _read(path, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)


@lru_cache
def _read(path: Path, *_: int) -> str:
    return file_seal(path)
