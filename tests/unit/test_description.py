"""What a package index shows leads nowhere that is not there."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def described() -> Any:
    spec = importlib.util.spec_from_file_location("kitae_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.described


def test_without_an_address_links_are_text(described: Any) -> None:
    text = "see [data](docs/data.md#rows), ![a picture](docs/a.png), [a site](https://example.org) and [below](#limits)"
    assert described(text, "") == "see data, , [a site](https://example.org) and [below](#limits)"


def test_with_an_address_links_lead_there(described: Any) -> None:
    home = "https://example.org/kitae/raw/v1/"
    assert described("![p](docs/a.png) [d](docs/d.md)", home) == (
        "![p](https://example.org/kitae/raw/v1/docs/a.png) [d](https://example.org/kitae/raw/v1/docs/d.md)"
    )


def test_the_readme_links_to_files_that_are_there(described: Any) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?![a-z]+:|#)([^()#\s]+)", readme)
    assert len(targets) > 20
    assert [t for t in targets if not (ROOT / t).exists()] == []
    assert not re.search(r"\]\((?![a-z]+:|#)", described(readme, ""))
    assert len(readme.splitlines()) <= 150
