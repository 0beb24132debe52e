"""What the files of a model say, as checksums: to tell whether they still are those that a run began with.

All bytes are read each time, by several threads: a size and a date would not tell a file that was put in the place of
another one, and loading reads the same bytes a moment later, from memory then.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kitae.errors import ModelError
from kitae.store.sealed import file_seal

_READ = (".safetensors", ".json", ".model", ".txt", ".jinja", ".bin", ".py", ".tiktoken")
"""Endings of what loading a model and its tokenizer may read."""


def fingerprint_files(folders: Iterable[Path]) -> dict[str, str]:
    """`{"/models/qwen/model.safetensors": "9f3c…", …}`"""
    found = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in _READ and path.is_file()]
    try:
        with ThreadPoolExecutor() as pool:
            return dict(zip(map(str, found), pool.map(file_seal, found), strict=True))
    except OSError as error:
        raise ModelError(f"a file of the model cannot be read: {error}") from error
