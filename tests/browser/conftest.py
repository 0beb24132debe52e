"""A real browser at a real server: chromium by playwright, `kitae ui` in a process of its own."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = os.environ.get("KITAE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
NEEDED = ("playwright", "starlette", "uvicorn")


def missing() -> str:
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return ", ".join([*absent, *([] if CHROMIUM else ["chromium (apt install chromium, or set KITAE_CHROMIUM)"])])


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """For one module: while it is open, the thread has an event loop, which tests elsewhere do not expect."""
    if found := missing():
        pytest.skip(f"tests in a browser need {found}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def serve(browser: "Browser") -> Iterator[Callable[[Path], str]]:
    """`serve(folder)` starts the program and gives its address."""
    processes = []

    def start(folder: Path) -> str:
        program = [sys.executable, "-c", "from kitae.cli.main import run; run()", "ui", str(folder), "--port", "0"]
        process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        return found[0]

    yield start
    for process in processes:
        process.terminate()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def page(browser: "Browser") -> Iterator["Page"]:
    """A window of 1280 × 860 points that tolerates no error on its console."""
    context = browser.new_context(viewport={"width": 1280, "height": 860}, color_scheme="light")
    made = context.new_page()
    made.set_default_timeout(20_000)
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    yield made
    context.close()
    assert problems == []
