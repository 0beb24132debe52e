"""The way into a Ray cluster, or why there is none."""

import asyncio
import subprocess
import sys
from importlib.util import find_spec

import pytest

from kitae.errors import ConfigError
from kitae.workers.backends import open_cluster
from kitae.workers.config import ClusterConfig


@pytest.mark.thorough
def test_without_ray() -> None:
    """All else must work, and the one thing that does not says how to help it."""
    program = (
        "import asyncio, sys; sys.modules['ray'] = None; import kitae.run.train_run, kitae.cli.main\n"
        "from kitae.workers.backends import open_cluster; from kitae.workers.config import ClusterConfig\n"
        "asyncio.run(open_cluster(ClusterConfig(backend='ray'), {}))"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert "ConfigError: cluster.backend = 'ray' needs the package ray: pip install 'kitae[cluster]'" in ended.stderr


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at '127.0.0.1:1'"),
        ("somewhere", "must be auto or HOST:PORT, got 'somewhere'"),
        ("ray://a:1", "must be auto or HOST:PORT of a cluster that this machine is a node of, got 'ray://a:1'"),
    ],
)
def test_an_address_where_nobody_is(address: str, why: str) -> None:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'kitae[cluster]'")
    with pytest.raises(ConfigError, match=why):
        asyncio.run(open_cluster(ClusterConfig(backend="ray", address=address), {}))
