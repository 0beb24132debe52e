"""The kinds of server, and the model that they serve."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("llama")
