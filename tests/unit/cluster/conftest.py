"""One Ray cluster of three nodes for all tests that need one: its start takes longest."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="session")
def nodes() -> Iterator[Any]:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'kitae[cluster]'")
    from kitae.cluster.ray.entry import import_ray
    from kitae.cluster.ray.nodes import OwnNodes

    import_ray()
    own = OwnNodes.start(3)
    yield own
    own.close()


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs at posts lies beside the tests."""
    monkeypatch.syspath_prepend(HERE)
