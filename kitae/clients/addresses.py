"""Where servers of this machine listen, and whom a request means by the name that it gives."""

import ipaddress
import socket

from kitae.errors import ConfigError

_BACKLOG = 1024  # clients that may arrive in one moment


def is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def host_name(header: str) -> str:
    """Without the port: `"[::1]:8000"` is `"::1"`."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


def means(host: str, name: str) -> bool:
    """Whether a Host header, without its port, means the server that listens on `host`. A name that anybody can point
    here (DNS rebinding) does not."""
    if name == "localhost" or is_loopback(name):
        return True
    if is_loopback(host):
        return False
    return name in (host, socket.gethostname()) or _address(name) is not None


def listen(host: str, port: int) -> socket.socket:
    """Takes the port at once, so that whoever reads the address is answered as soon as the server runs."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, so that answers are sent at once
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((host, port))
        taken.listen(_BACKLOG)
    except OSError as error:
        taken.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port") from None
    return taken


def address_of(taken: socket.socket, host: str) -> str:
    """`"http://127.0.0.1:8000"`."""
    return f"http://{f'[{host}]' if ':' in host else host}:{taken.getsockname()[1]}"


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None
