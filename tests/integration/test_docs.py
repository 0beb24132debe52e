"""What the README and the tutorial say, done as a reader would do it: in an empty folder, block by block."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import book
import pytest

from kitae.cli import main
from kitae.store.run_folder import Metrics

pytestmark = pytest.mark.usefixtures("warm_posts")

ROOT = Path(__file__).parents[2]
Kitae = Callable[[str, int], str]
README = ROOT / "README.md"
TUTORIAL = sorted((ROOT / "docs" / "tutorial").glob("0*.md"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, to which commands are relative; `python` is the one that runs the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def kitae(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kitae:
    """The program, in this process: its imports take longer than most of its commands."""

    def run(command: str, status: int) -> str:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main.run()
        said = capsys.readouterr()
        assert (stopped.value.code or 0) == status, f"{command}: {said.out}{said.err}"
        return said.out + said.err

    return run


def test_the_first_program_of_the_readme(folder: Path, kitae: Kitae) -> None:
    [program] = [block.text for block in book.blocks(README) if block.file == "reverse.py"]
    small = program.replace('"smollm2-135m"', '"tiny"').replace("steps=15", "steps=2")
    assert small.count("tiny") == 1 and "steps=2" in small
    (folder / "reverse.py").write_text(small)
    subprocess.run([sys.executable, "reverse.py"], cwd=folder, check=True, timeout=120)
    [run] = (folder / "runs").iterdir()
    assert Metrics(run / "metrics.jsonl").rows()[-1]["step"] == 2
    kitae(f"kitae resume {run} training.steps=3", 0)
    assert Metrics(run / "metrics.jsonl").rows()[-1]["step"] == 3


def test_the_tutorial(folder: Path, kitae: Kitae) -> None:
    """All pages one after the other, in one folder: later ones use the files of earlier ones."""
    assert [book.follow(page, folder, kitae, slow=False) > 0 for page in TUTORIAL] == [True] * len(TUTORIAL)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_tutorial_with_what_takes_minutes(folder: Path, kitae: Kitae) -> None:
    for page in TUTORIAL:
        book.follow(page, folder, kitae, slow=True)


PAGE = """
```python
# three.py
print(1 + 2)
```
```bash
python three.py   # prints a number
cat four.py   # refused
```
```text
7
cat: four.py: …
```
<!-- slow -->
```bash
false
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "page.md").write_text(text)
        return tmp_path / "page.md"

    return write


def test_a_page_is_followed(folder: Path, kitae: Kitae, page: Callable[[str], Path]) -> None:
    assert book.follow(page(PAGE), folder, kitae, slow=False) == 1
    with pytest.raises(AssertionError, match=r"page\.md:15"):
        book.follow(page(PAGE), folder, kitae, slow=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("7\n", "seven\n"),
        ("python three.py", "python four.py"),
        ("1 + 2", "1 +"),
        ("   # refused", ""),
        ("cat four.py", "cat three.py"),
    ],
)
def test_a_page_that_is_wrong_is_found(
    old: str, new: str, folder: Path, kitae: Kitae, page: Callable[[str], Path]
) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:6|page\.md:10"):
        book.follow(page(PAGE.replace(old, new)), folder, kitae, slow=False)


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        ("reward 0.3\n", None),
        ("reward 0.3\n…\ndone in … s", None),
        ("reward    0.3\n\nstep 2", None),
        ("step 2\nreward 0.3", "reward 0.3"),  # the other way round
        ("reward 0.3\nreward 0.3", "reward 0.3"),
        ("reward", "reward"),
    ],
)
def test_outputs_are_compared_in_order_but_for_numbers(shown: str, missing: str | None) -> None:
    assert book.absent(shown, "reward 0.25\nstep 2\n\ndone in 1 min 12 s\n") == missing
