"""The sources of the page: its records are those of the server, and it makes no markup of text."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "ui"


def test_typescript_has_the_records_of_python() -> None:
    spec = importlib.util.spec_from_file_location("ui_records", SOURCES / "records.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (SOURCES / "src" / "records.ts").read_text() == module.typescript(), "make ui writes it anew"


def test_no_source_makes_markup_of_text() -> None:
    for path in (SOURCES / "src").rglob("*.ts*"):
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "dangerouslySet", "document.write", "eval("):
            assert way not in path.read_text(), f"{path.name} uses {way}"
