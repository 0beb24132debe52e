"""The way into a Ray cluster: Ray itself, without its habits, and a connection with a cluster that runs."""

import logging
import os
import signal
import socket
import warnings
from typing import Any

from kitae.errors import ConfigError

LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 for the address that others know the machine by
_KNOCK = 5.0  # seconds in which a running cluster must answer


def import_ray() -> Any:
    """With its habit turned off to start a cluster whenever it is used without one: after a `close`, say."""
    try:
        with episode_context(RAY_ENABLE_AUTO_CONNECT="0"):
            import ray
    except ImportError:
        raise ConfigError("cluster.backend = 'ray' needs the package ray: pip install 'kitae[cluster]'") from None
    return ray


def connect(ray: Any, address: str) -> None:
    """Become a part of a cluster; Ray itself would try for minutes where there is none."""
    if ray.is_initialized():
        raise ConfigError("this process is a part of a Ray cluster already, and can be one of another no more")
    if "://" in address:
        raise ConfigError(
            f"cluster.address must be auto or HOST:PORT of a cluster that this machine is a node of, got {address!r}"
        )
    _knock(address)
    local = {"_node_ip_address": LOOPBACK} if address.startswith(LOOPBACK) else {}
    try:
        with episode_context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, **local
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"cluster.address: no Ray cluster at {address!r}: {first_line(error)}") from None


def _knock(address: str) -> None:
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"cluster.address must be auto or HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host, int(port)), _KNOCK).close()
    except OSError as error:
        raise ConfigError(f"cluster.address: no Ray cluster answers at {address!r}: {error}") from None


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class episode_context:
    """Variables of the environment, for a while; and the handler of SIGTERM as it was before."""

    def __init__(self, **given: str) -> None:
        self._given = given

    def __enter__(self) -> None:
        self._before = {key: os.environ.get(key) for key in self._given}
        self._handler = signal.getsignal(signal.SIGTERM)
        os.environ.update(self._given)

    def __exit__(self, *_: object) -> None:
        for key, value in self._before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        if signal.getsignal(signal.SIGTERM) is not self._handler:
            signal.signal(signal.SIGTERM, self._handler)
