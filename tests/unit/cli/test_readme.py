"""The example of the README, as a reader would copy it: into an empty folder, file by file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kitae.cli import main
from kitae.config.load import load_config
from kitae.data.prompts import eval_prompts, open_stream

README = Path(__file__).parents[3] / "README.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for text in re.findall(r"```(?:python|toml)\n(.*?)```", README.read_text(), re.DOTALL):
        if named := re.match(r"# (\S+)\n", text):
            (tmp_path / named[1]).write_text(text)
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "make_data.py"], check=True)
    return tmp_path


def test_own_data(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert {p.name for p in folder.iterdir()} == {"make_data.py", "dates.py", "dates.toml", "train.jsonl", "test.jsonl"}
    config = load_config(folder / "dates.toml")
    trained = {open_stream(config.data, 0).at(i).reference for i in range(1000)}
    assert len(trained) == 1000 and not trained & {p.reference for p in eval_prompts(config.data, 0, 128)}
    monkeypatch.setattr(sys, "argv", ["kitae", "validate", "dates.toml", "--limit", "50"])
    with pytest.raises(SystemExit) as stopped:
        main.run()
    assert not stopped.value.code
    assert "50 prompts, 50 with a gold answer; 0 fail" in capsys.readouterr().out


def test_its_verifier_gives_partial_credit(folder: Path) -> None:
    answers = ["1998-03-07 ", "1998-03-08", "1998", "x-y-z"]
    code = f"from dates import score; print([score(answer, '1998-03-07', {{}}) for answer in {answers}])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=folder).strip() == "[1, 0.5, 0, 0.0]"
