"""A page of the documentation, done as a reader would do it: files are written, commands run, their output compared.

| fenced block | what is done with it |
|---|---|
| `python`, `toml` with a first line `# name` | a file of that name |
| `python` without | a program, run |
| `bash` | commands, run; each must end with status 0, or with 1 if the comment after it is `# refused` |
| `text`, next after one that ran | its output: each line must occur in what was printed, in this order |

In an output numbers stand for any number, spaces for any run of them, and … for any text. A block after
`<!-- slow -->` takes minutes, or needs what a machine may lack: it is done only where slow blocks are asked for. All
other blocks are there to be read.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"(?P<slow><!-- slow -->\n+)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"# (\S+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    """Example: Block("bash", "kitae recipes\\n", "docs/tutorial/01-first-run.md:12", slow=False)."""

    language: str
    text: str
    place: str
    slow: bool

    @property
    def file(self) -> str | None:
        """The name of the file that this block is, if it is one."""
        named = NAME.match(self.text) if self.language in ("python", "toml") else None
        return named and named[1]


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        yield Block(found["language"], found["text"], f"{page.name}:{line}", found["slow"] is not None)


def write_files(page: Path, folder: Path) -> None:
    for block in blocks(page):
        if block.file is not None:
            (folder / block.file).write_text(block.text, encoding="utf-8")


def follow(page: Path, folder: Path, kitae: Callable[[str, int], str], *, slow: bool) -> int:
    """Do what the page says, in `folder`. Returns how many outputs were compared.

    `kitae("kitae recipes", 0)` runs one command of the program, which must end with this status, and gives what it
    printed.
    """
    printed: str | None = None
    compared = 0
    for block in blocks(page):
        if block.slow and not slow:
            printed = None
        elif block.file is not None:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            printed = _shell([sys.executable, "-c", block.text], 0, folder, block)
        elif block.language == "bash":
            printed = "".join(
                kitae(line, status)
                if line.startswith("kitae ")
                else _shell(["bash", "-c", line], status, folder, block)
                for line, status in commands(block.text)
            )
        elif block.language == "text" and printed is not None:
            assert (missing := absent(block.text, printed)) is None, f"{block.place}: {missing!r} is not in\n{printed}"
            printed = None
            compared += 1
    return compared


def commands(text: str) -> list[tuple[str, int]]:
    """One for each line, with its exit status; a backslash at its end joins the next to it.

    commands("ls   # what is here\\ncat nothing  # refused")  →  [("ls", 0), ("cat nothing", 1)]
    """
    lines = (re.split(r"(?:^|\s+)#\s*", line) for line in re.sub(r"\\\n\s*", "", text).splitlines())
    return [(line.strip(), int(comment == ["refused"])) for line, *comment in lines if line.strip()]


def absent(shown: str, printed: str) -> str | None:
    """The first line of a shown output that was not printed; None if all were, in order.

    absent("reward 0.3\\n…\\ndone in … s", "reward 0.25\\nstep 2\\ndone in 12 s\\n")  →  None
    """
    lines = iter(_plain(line) for line in printed.splitlines())
    for line in filter(lambda line: line.strip(" …"), shown.splitlines()):
        pattern = ".*".join(map(re.escape, _plain(line).split("…")))
        if not any(re.fullmatch(pattern, found) for found in lines):
            return line
    return None


def _plain(line: str) -> str:
    return " ".join(re.sub(r"\d+([.,]\d+)*", "0", line).split())


def _shell(command: list[str], status: int, folder: Path, block: Block) -> str:
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    assert done.returncode == status, f"{block.place}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr
