"""What a sandbox is asked to do, and what it may use for that."""

import marshal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a candidate may use; `Limits(time_limit=2.0)`.

    time_limit: seconds of processor time for a test, those of child processes included, and twice that on the clock.
    memory_mb: what all processes together have in memory; and for each of them address space, where
    `limit_address_space` says so, else data alone, since some runtimes reserve far more than they use. processes:
    threads count too. tmp_mb: all files in one folder together; file_mb: one of them; files: how many, with folders.
    """

    time_limit: float = 4.0
    memory_mb: int = 1024
    processes: int = 64
    output_mb: int = 16
    file_mb: int = 64
    tmp_mb: int = 128
    files: int = 8192
    stack_mb: int = 0
    limit_address_space: bool = True


class Order(TypedDict):
    """What to do with a program: check it by questions, run it, or run code as it comes, cell by cell, in one process.

    `{"mode": "run", "variants": ["print(1)"], "files": {}, "compile": None, "command": None}`: Python code, as the
    first of its `variants` that compiles, or the longest head of one where they are `loose`; in other languages it is
    in `files`, with the commands that compile and run it. `typing`: names of that module which the code uses without
    an import. `setup`: what the code under check sees of the tests, statement by statement.
    """

    mode: Literal["check", "run", "console"]
    variants: list[str]
    loose: NotRequired[bool]
    typing: NotRequired[list[str]]
    setup: NotRequired[list[str]]
    files: NotRequired[dict[str, str]]
    compile: NotRequired[list[str] | None]
    compile_limit: NotRequired[float]
    command: NotRequired[list[str] | None]


class FullOrder(Order):
    """An order with all that a warden wants to know: the limits, its user, and the folders of packages."""

    become_nobody: bool
    packages: list[str]
    time_limit: float
    memory_mb: int
    processes: int
    output_limit: int
    file_mb: int
    files_limit: int
    stack_mb: int
    limit_address_space: bool


class Names(TypedDict):
    """Where tests take names from that they do not define.

    `library`: name → path and wanted attributes, `{"isclose": ("math:isclose", [])}`; `aliases` of it are packages.
    `names`: the candidate's; `shadows`: those of them that hide something of Python's or of the library's. `imports`:
    what the tests import. `constants`: their texts, where they run any.
    """

    library: dict[str, tuple[str, list[str]]]
    aliases: list[str]
    names: list[str]
    shadows: list[str]
    imports: list[str]
    constants: list[str]


class Job(Names):
    """What the checker does, which the candidate must not see: run `tests` one by one, after prompt and setup."""

    prompt: str
    setup: str
    entry_point: str
    tests: list[str]
    time_limit: float


def complete_order(
    order: Order, limits: Limits, packages: Sequence[str] = (), become_nobody: bool = False
) -> FullOrder:
    return {
        **order,
        "become_nobody": become_nobody,
        "packages": list(packages),
        "time_limit": limits.time_limit,
        "memory_mb": limits.memory_mb,
        "processes": limits.processes,
        "output_limit": limits.output_mb * 2**20,
        "file_mb": limits.file_mb,
        "files_limit": limits.files,
        "stack_mb": limits.stack_mb,
        "limit_address_space": limits.limit_address_space,
    }


def packed(message: FullOrder | Job, version: int = marshal.version) -> bytes:
    """The frame in which an order or a job travels."""
    plain: Any = message  # to the type checker no TypedDict is a dict
    return marshal.dumps(plain, version)
