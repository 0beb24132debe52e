"""What a sandbox has to do, and the limits on it."""

import marshal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a candidate: `Limits(time_limit=2.0)`.

    time_limit: seconds of processor time for a test, child processes included, and twice that on the clock. memory_mb:
    resident memory of all processes together; and for each of them address space if `limit_address_space`, else data
    only, as some runtimes reserve far more than they use. processes: including threads. tmp_mb: of all files in one
    folder together. file_mb: of one file. files: their number, including folders.
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
    """What to do with a program: check it with tests, run it, or run code cell by cell in one process.

    `{"mode": "run", "variants": ["print(1)"], "files": {}, "compile": None, "command": None}`: Python code is the first
    of its `variants` that compiles, or if `loose` the longest head of one that does. Other languages are in `files`,
    with the commands that compile and run them. `typing`: names of that module which the code uses without an import.
    `setup`: the part of the tests' setup that the code under test sees, statement by statement.
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
    """A complete order for a warden: with the limits, its user, and the folders of packages."""

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
    """Where the names come from that tests use without defining them.

    `library`: name → path and used attributes, `{"isclose": ("math:isclose", [])}`; `aliases`: those of them that are
    packages. `names`: those of the candidate; `shadows`: those of them that hide a name of Python or of the library.
    `imports`: what the tests import.
    """

    library: dict[str, tuple[str, list[str]]]
    aliases: list[str]
    names: list[str]
    shadows: list[str]
    imports: list[str]


class Job(Names):
    """The checker's job, which the candidate must not see: run `tests` one by one, after prompt and setup."""

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
    """An order or a job as a frame."""
    plain: Any = message  # the type checker does not accept a TypedDict as a dict
    return marshal.dumps(plain, version)
