"""Buckets by HTTP from a server that dies, stalls or lies: what arrives is right, and what is wrong is said."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import Tensor

from kitae.weights.base import Bucket
from kitae.weights.bucket_server import ChunkServer, Shop
from kitae.weights.http_transport import Downloads, Haste
from kitae.weights.layout import Chunk
from kitae.weights.publisher import checksum_of

DATA = torch.randint(0, 256, (300_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
CHUNK = Chunk("image", 0, Bucket(len(DATA), checksum_of(DATA)), ((0, len(DATA)),))
SECRET = "open sesame"
HASTE = Haste(silence=1.0, connections=2)


class OneBucket(Shop):
    def __init__(self, data: Tensor | None = DATA) -> None:
        self.data = data

    def chunk(self, version: int, name: str) -> Tensor | None:
        return self.data if name == CHUNK.name else None


@contextmanager
def serving(data: Tensor | None = DATA) -> Iterator[str]:
    server = ChunkServer(OneBucket(data), SECRET)
    yield f"http://127.0.0.1:{server.port}"
    server.close()


@contextmanager
def raw_server(answer: Callable[[socket.socket, bytes, int], None]) -> Iterator[str]:
    """Whoever connects gets `answer(connection, request, number)` for each request."""
    listener = socket.create_server(("127.0.0.1", 0))
    requests = iter(range(1_000))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while request := connection.recv(65536):
                answer(connection, request, next(requests))

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def head(length: int, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode()


@contextmanager
def downloads(source: str, secret: str = SECRET) -> Iterator[Downloads]:
    made = Downloads(source, secret, HASTE)
    yield made
    made.close()


def test_a_bucket() -> None:
    with serving() as url, downloads(url) as reader:
        for _ in range(3):
            found = reader.get(4, CHUNK)
            assert found is not None and torch.equal(found, DATA)
        assert reader.failed == 0


def test_without_the_secret_nothing_is_given() -> None:
    with serving() as url, downloads(url, secret="open barley") as reader:
        assert reader.get(4, CHUNK) is None and reader.failed == 1
        assert reader.post("/handle", {}) is None


def test_a_server_that_dies_in_the_middle_is_taken_up_where_it_broke_off() -> None:
    ranges = []

    def dies(connection: socket.socket, request: bytes, number: int) -> None:
        lines = request.decode().split("\r\n")
        asked = next((line.split("=")[1] for line in lines if line.lower().startswith("range")), "0-")
        ranges.append(start := int(asked.removesuffix("-")))
        rest = DATA.numpy().tobytes()[start:]
        connection.sendall(head(len(rest), "206 Partial" if start else "200 OK") + rest[:100_000])
        connection.close()

    with raw_server(dies) as url, downloads(url) as reader:
        found = reader.get(4, CHUNK)
    assert found is not None and torch.equal(found, DATA)
    assert ranges == [0, 100_000, 200_000] and reader.failed == 0


def test_what_a_bad_server_does_not_give_is_left_out_and_the_reason_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def dies(connection: socket.socket, request: bytes, number: int) -> None:
        connection.sendall(head(len(DATA)) + b"x")
        connection.close()

    def silent(connection: socket.socket, request: bytes, number: int) -> None:
        pass

    wrong = DATA.clone()
    wrong[1234] ^= 1
    with (
        raw_server(dies) as dying,
        raw_server(silent) as quiet,
        serving(wrong) as liar,
        serving(DATA[:-1].clone()) as short,
        serving(None) as empty,
    ):
        for bad, reason in (
            (dying, "it has 300000 bytes in place of 299999"),
            ("http://127.0.0.1:9", "ConnectionRefusedError"),
            (quiet, "TimeoutError"),
            (liar, "its bytes are not those that were published"),
            (short, "it has 299999 bytes in place of 300000"),
            (empty, "it answers 404"),
        ):
            caplog.clear()
            with downloads(bad) as reader:
                assert list(reader.get_all(4, [CHUNK, CHUNK])) == [] and reader.failed == 2
                assert len(caplog.messages) == 1, "said once"
                assert re.search(f"{bad} does not give {CHUNK.name}: {reason}", caplog.messages[0])


def test_a_server_may_be_slow() -> None:
    def slow(connection: socket.socket, request: bytes, number: int) -> None:
        connection.sendall(head(len(DATA)))
        for start in range(0, len(DATA), 30_000):
            connection.sendall(DATA.numpy().tobytes()[start : start + 30_000])
            time.sleep(0.2)

    with raw_server(slow) as url, downloads(url) as reader:
        found = reader.get(4, CHUNK)
        assert found is not None and torch.equal(found, DATA) and reader.failed == 0


def test_many_buckets_come_in_order_and_not_too_far_ahead() -> None:
    asked = []

    class Many(Shop):
        def chunk(self, version: int, name: str) -> Tensor | None:
            asked.append(name)
            return DATA

    chunks = [Chunk("image", number, CHUNK.bucket, CHUNK.spans) for number in range(20)]
    server = ChunkServer(Many(), SECRET)
    with downloads(f"http://127.0.0.1:{server.port}") as reader:
        coming = reader.get_all(4, chunks)
        assert next(coming)[0] == 0
        time.sleep(0.3)
        assert len(asked) <= 2 * HASTE.connections
        assert [number for number, _ in coming] == list(range(1, 20))
    server.close()


def test_closing_breaks_off_what_is_being_downloaded() -> None:
    over = threading.Event()

    class Thinking(Shop):
        def chunk(self, version: int, name: str) -> Tensor | None:
            over.wait(60)
            return None

    server = ChunkServer(Thinking(), SECRET)
    reader = Downloads(f"http://127.0.0.1:{server.port}", SECRET, Haste(silence=100.0))
    threading.Timer(0.2, reader.close).start()
    began = time.monotonic()
    assert list(reader.get_all(4, [CHUNK])) == [] and time.monotonic() - began < 50
    over.set()
    server.close()
