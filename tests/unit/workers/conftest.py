"""One Ray cluster of three nodes for all tests that need one: its start takes longest."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)


_kept: list[Any] = []


@pytest.fixture
def nodes() -> Any:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'kitae[cluster]'")
    from kitae.workers.ray.ray_session import OwnNodes, import_ray

    if not _kept:
        import_ray()
        _kept.append(OwnNodes.start(3))
    return _kept[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nodes without work cost some of a core: none are left for tests elsewhere."""
    if _kept and (nextitem is None or HERE not in map(str, nextitem.path.parents)):
        _kept.pop().close()


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs at processes lies beside the tests."""
    monkeypatch.syspath_prepend(HERE)
