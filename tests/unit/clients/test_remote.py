"""The HTTP client, against a real server on loopback that is slow, broken or hostile."""

import asyncio
import functools
import json
import logging
import multiprocessing
import socket
import sqlite3
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_server import KEY, FakeServer, Reply, run, run_tidily, script

from kitae.clients import http_client
from kitae.clients.http_client import ask, close_clients
from kitae.clients.service import Service
from kitae.clock import VirtualLoop, now
from kitae.errors import RemoteError


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def service(url: str, **options: Any) -> Service:
    return Service(**{"base_url": url, "model": "m", "backoff": 0.01, "request_timeout": 5.0, **options})


async def number(which: Service, body: Any = None) -> Any:
    return await ask(which, "/n", {"q": 1} if body is None else body, lambda answer: answer["n"])


def test_one_request_has_path_body_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", f" {KEY}\n")

    async def body() -> None:
        async with FakeServer(script(Reply({"n": 7}))) as server:
            assert await number(service(server.url, key_env="SOME_KEY"), {"text": "日本 \ud800"}) == 7
            (request,) = server.requests
            assert (request.path, request.body) == ("/v1/n", {"text": "日本 \ud800"})
            assert request.headers["authorization"] == f"Bearer {KEY}"

    run(body())


@pytest.mark.parametrize("key_env", ["", "UNSET_KEY"])
def test_without_a_key_none_is_sent(key_env: str) -> None:
    async def body() -> None:
        async with FakeServer(script(Reply({"n": 7}))) as server:
            await number(service(server.url, key_env=key_env))
            assert "authorization" not in server.requests[0].headers

    run(body())


@pytest.mark.parametrize(
    "failure",
    [
        Reply(status=429),
        Reply(status=429, headers={"Retry-After": "nonsense"}),
        Reply(status=408),
        Reply(status=500, body=b"<html>oops</html>"),
        Reply(status=503),
        Reply(reset=True),
        Reply({"n": "long enough to be cut"}, half=True),
        Reply(b"", headers={"Broken header": "x"}),
        Reply({"n": 1}, delay=60),
        Reply({"n": 1}, drip=0.2),
    ],
)
def test_what_may_pass_is_tried_again(failure: Reply) -> None:
    async def body() -> None:
        async with FakeServer(script(failure, failure, Reply({"n": 7}))) as server:
            assert await number(service(server.url, request_timeout=0.5 if failure.delay or failure.drip else 5)) == 7
            assert len(server.requests) == 3

    run(body())


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply({"error": "no such model"}, status=404), r"refused the request: HTTP 404: .*no such model"),
        (Reply(status=400), "HTTP 400"),
        (Reply(status=401), "no key was sent: set key_env"),
        (Reply(status=403), "no key was sent"),
        (Reply(status=422), "HTTP 422"),
        (Reply(status=302, headers={"Location": "http://127.0.0.1:9/"}), "HTTP 302"),
        (Reply(b""), "must answer with JSON, got ''"),
        (Reply(b"<html>"), "must answer with JSON, got '<html>'"),
        (Reply(b"\xff\xfe\xff"), "must answer with JSON"),
        (Reply(b"[" * 100_000), "must answer with JSON"),
        (Reply(b"9" * 10_000), "must answer with JSON"),
        (Reply(b"no gzip, really", headers={"Content-Encoding": "gzip"}), "failed: DecodingError"),
        (Reply(b" " * (2**23 + 1)), "must be at most 8388608 bytes"),
    ],
)
def test_what_will_not_pass_is_not_tried_again(reply: Reply, reason: str) -> None:
    async def body() -> None:
        async with FakeServer(script(reply)) as server:
            with pytest.raises(RemoteError, match=reason):
                await number(service(server.url))
            assert len(server.requests) == 1

    run(body())


def test_retries_end_and_give_the_last_reason() -> None:
    async def body() -> None:
        async with FakeServer(script(Reply({"error": "overloaded"}, status=503))) as server:
            with pytest.raises(RemoteError, match=r"within 2 retries: HTTP 503: .*overloaded.* \(try 3\)"):
                await number(service(server.url, retries=2))
            assert len(server.requests) == 3

    run(body())


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

    async def body() -> None:
        with pytest.raises(RemoteError, match="within 1 retries: ConnectError"):
            await number(service(url, retries=1))

    run(body())


def test_retry_after_is_honoured() -> None:
    async def body() -> None:
        async with FakeServer(script(Reply(status=429, headers={"Retry-After": "0.4"}), Reply({"n": 7}))) as server:
            assert await number(service(server.url)) == 7
            assert server.times[1] - server.times[0] >= 0.4

    run(body())


def test_a_wait_past_the_deadline_is_refused_at_once() -> None:
    async def body() -> None:
        async with FakeServer(script(Reply(status=429, headers={"Retry-After": "86400"}))) as server:
            start = time.monotonic()
            with pytest.raises(
                RemoteError, match=r"deadline of 5 s: HTTP 429.*the next try is due only in 8.64e\+04 s"
            ):
                await number(service(server.url, deadline=5))
            assert time.monotonic() - start < 30

    run(body())


def test_the_deadline_covers_all_tries() -> None:
    async def body() -> None:
        async with FakeServer(script(Reply({"n": 1}, delay=60))) as server:
            start = time.monotonic()
            with pytest.raises(RemoteError, match=r"within the deadline of 0.5 s: no answer within 0.2 s \(try \d\)"):
                await number(service(server.url, request_timeout=0.2, deadline=0.5, retries=100))
            assert 0.4 < time.monotonic() - start < 30

    run(body())


def test_waiting_for_a_slot_has_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated clock, with a server that needs none of the world outside."""

    async def answer(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(3)
        return httpx.Response(200, json={"n": 1})

    client = functools.partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "AsyncClient", client)

    async def body() -> None:
        which = service("http://nowhere/v1", concurrency=1, deadline=4)
        assert await asyncio.gather(*(number(which, {"q": i}) for i in range(10))) == [1] * 10
        assert now() >= 30
        await close_clients()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(body())


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3), ("0.5", 0.5), ("-1", 0), ("inf", 0), ("nan", 0), ("", 0), ("soon", 0), ("1e999", 0)],
)
def test_retry_after(header: str, seconds: float) -> None:
    assert http_client._retry_after(header) == seconds


def test_retry_after_of_a_date() -> None:
    later = datetime.now(UTC) + timedelta(seconds=20)
    assert 15 < http_client._retry_after(format_datetime(later, usegmt=True)) <= 20
    assert 15 < http_client._retry_after(later.strftime("%a, %d %b %Y %H:%M:%S -0000")) <= 20
    assert http_client._retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0


def test_pauses_grow_and_differ() -> None:
    for tries, most in ((1, 1.0), (2, 2.0), (4, 8.0), (50, 30.0)):
        pauses = {http_client._pause(1.0, tries) for _ in range(50)}
        assert len(pauses) > 40 and most / 2 <= min(pauses) and max(pauses) <= most


@pytest.mark.parametrize("concurrency", [1, 3])
def test_concurrency_holds(concurrency: int) -> None:
    async def body() -> None:
        async with FakeServer(script(Reply({"n": 1}, delay=0.02))) as server:
            which = service(server.url, concurrency=concurrency)
            await asyncio.gather(*(number(which, {"q": i}) for i in range(12)))
            assert (server.peak, len(server.requests)) == (concurrency, 12)

    run(body())


def test_a_call_that_waits_to_try_again_keeps_its_slot() -> None:
    async def body() -> None:
        async with FakeServer(script(Reply(status=503), Reply({"n": 1}))) as server:
            which = service(server.url, concurrency=1)
            await asyncio.gather(*(number(which, {"q": i}) for i in range(3)))
            assert [request.body["q"] for request in server.requests] == [0, 0, 1, 2]

    run(body())


def test_the_pace_holds_for_retries_too() -> None:
    async def body() -> None:
        async with FakeServer(script(Reply(status=503), Reply({"n": 1}))) as server:
            which = service(server.url, requests_per_minute=600)
            start = time.monotonic()
            await asyncio.gather(*(number(which, {"q": i}) for i in range(4)))
            assert len(server.times) == 5
            assert all(when - start > 0.1 * i - 0.01 for i, when in enumerate(server.times))

    run(body())


def test_limits_of_one_model_must_agree() -> None:
    async def body() -> None:
        async with FakeServer(script(Reply({"n": 1}))) as server:
            await number(service(server.url, concurrency=2))
            await number(service(server.url, concurrency=3, model="another"))
            with pytest.raises(RemoteError, match=r"'m' at .* must be the same everywhere, got \(3, 0.0\)"):
                await number(service(server.url, concurrency=3))

    run(body())


def test_cancelling_frees_the_slot_and_the_connection() -> None:
    async def body() -> None:
        replies = script(Reply({"n": 1}, delay=60), Reply({"n": 7}))
        async with FakeServer(replies) as server:
            which = service(server.url, concurrency=1)
            stuck = asyncio.create_task(number(which))
            while not server.requests:
                await asyncio.sleep(0.01)
            waiting = asyncio.create_task(number(which))
            await asyncio.sleep(0.05)
            for task in (waiting, stuck):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert await number(which) == 7

    run_tidily(body())


def test_an_event_loop_that_ends_closes_what_is_open() -> None:
    async def body() -> None:
        server = FakeServer(script(Reply({"n": 1}, delay=0.2)))
        await server.__aenter__()
        try:
            await number(service(server.url))
            forgotten = asyncio.create_task(number(service(server.url)))
            await asyncio.sleep(0.05)
            assert not forgotten.done()
        finally:
            server._server.close()

    run_tidily(body())


def test_closing_ends_calls_with_an_error_and_the_next_call_opens_again() -> None:
    async def body() -> None:
        async with FakeServer(script(Reply({"n": 1}, delay=60), Reply({"n": 7}))) as server:
            call = asyncio.create_task(number(service(server.url)))
            while not server.requests:
                await asyncio.sleep(0.01)
            await close_clients()
            with pytest.raises(RemoteError):
                await call
            assert await number(service(server.url)) == 7

    run_tidily(body())


def test_each_event_loop_has_its_own_client() -> None:
    async def body() -> None:
        async with FakeServer(script(Reply({"n": 7}))) as server:
            assert await number(service(server.url)) == 7

    for _ in range(2):
        run_tidily(body())


def test_the_cache_answers_without_the_server(tmp_path: Path) -> None:
    async def body() -> None:
        async with FakeServer(lambda request: Reply({"n": request.body["q"]})) as server:
            which = service(server.url, cache=str(tmp_path / "deep" / "folder"))
            for _ in range(2):
                assert [await number(which, {"q": i}) for i in range(3)] == [0, 1, 2]
            assert len(server.requests) == 3
            await ask(which, "/other", {"q": 0}, lambda answer: answer["n"])
            assert len(server.requests) == 4

    run(body())


def test_equal_requests_at_the_same_time_are_sent_once(tmp_path: Path) -> None:
    async def body() -> None:
        async with FakeServer(script(Reply({"n": 7}, delay=0.05))) as server:
            which = service(server.url, cache=str(tmp_path))
            first = asyncio.create_task(number(which))
            others = [asyncio.create_task(number(which)) for _ in range(8)]
            await asyncio.sleep(0.02)
            first.cancel()
            assert await asyncio.gather(*others) == [7] * 8
            assert len(server.requests) <= 2

    run(body())


def test_failures_are_not_cached(tmp_path: Path) -> None:
    async def body() -> None:
        replies = script(Reply(status=400), Reply({"x": 1}), Reply({"n": 7}))
        async with FakeServer(replies) as server:
            which = service(server.url, cache=str(tmp_path))

            def read(answer: Any) -> Any:
                if "n" not in answer:
                    raise RemoteError("no n")
                return answer["n"]

            for _ in range(2):
                with pytest.raises(RemoteError):
                    await ask(which, "/n", {}, read)
            assert await ask(which, "/n", {}, read) == 7

    run(body())


def test_a_broken_cache_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "replies.sqlite3").write_bytes(b"this is no database, " * 100)

    async def body() -> None:
        async with FakeServer(script(Reply({"n": 7}))) as server:
            assert await number(service(server.url, cache=str(tmp_path))) == 7

    run(body())
    assert "cannot be read and is passed over" in caplog.text


def test_a_cache_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def body() -> None:
        async with FakeServer(script(Reply({"n": 7}))) as server:
            with pytest.raises(RemoteError, match="the cache must be a folder, got"):
                await number(service(server.url, cache=str(tmp_path / "file")))
            assert server.requests == []

    run(body())


def _write_many(folder: str, first: int) -> None:
    for i in range(first, first + 40):
        http_client.remember(Path(folder), f"key {i}", json.dumps(i))


def test_several_processes_share_a_cache(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write_many, args=(str(tmp_path), first)) for first in (0, 20)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert [http_client.recall(tmp_path, f"key {i}") for i in range(60)] == [str(i) for i in range(60)]


@pytest.mark.parametrize("key", [KEY, 'sk-"quoted"\\and\\back', "sk-" + "a" * 300])
def test_the_key_is_nowhere(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A hostile server sends the key back in every way that it can be read."""
    monkeypatch.setenv("SOME_KEY", key)
    caplog.set_level(logging.DEBUG)
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in key)
    answers = [
        Reply({"n": [f"your key is {key}", {key: key}]}, headers={"X-Echo": key}, reason=key),
        Reply(f'{{"n": "{escaped}"}}'.encode(), headers={"Retry-After": key}),
        Reply({"error": key}, status=401),
        Reply({"error": f"{'x' * 180}{key}"}, status=400),
        Reply({"error": key}, status=500, headers={"Retry-After": key}),
        Reply(f"<html>{key}".encode()),
        Reply(b"", headers={key: key}),
        Reply(b"", headers={f"broken {key}": key}),
    ]
    said: list[str] = []

    async def body() -> None:
        for i, answer in enumerate(answers):
            async with FakeServer(script(answer)) as server:
                try:
                    found = await number(
                        service(server.url, key_env="SOME_KEY", retries=1, cache=str(tmp_path)), {"q": i}
                    )
                    said.append(json.dumps(found))
                except RemoteError as error:
                    said.append(f"{error!r} {error.__cause__!r}")
                assert server.requests[0].headers["authorization"] == f"Bearer {key}"

    run(body())
    assert len(said) == len(answers) and "[key]" in said[0] and "[key]" in said[1] and "$SOME_KEY" in said[2]
    with sqlite3.connect(tmp_path / "replies.sqlite3") as database:
        rows = database.execute("SELECT * FROM replies").fetchall()
    database.close()
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir()).decode(errors="replace")
    for form in (key[:24], json.dumps(key)[1:25], escaped[:24]):
        assert form not in "\n".join(said) + caplog.text + str(rows) + stored


def test_a_dummy_key_is_left_in_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "EMPTY")

    async def body() -> None:
        async with FakeServer(script(Reply({"n": "EMPTY"}))) as server:
            assert await number(service(server.url, key_env="SOME_KEY")) == "EMPTY"

    run(body())


@pytest.mark.parametrize("key", ["sk-schlüssel-geheim", "sk-line\r\nX-Other: 1", "sk-\x00secret"])
def test_a_key_that_is_no_header_is_refused_unseen(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"SOME_KEY": key})

    async def body() -> None:
        async with FakeServer(script(Reply({"n": 7}))) as server:
            with pytest.raises(RemoteError, match=r"the key in \$SOME_KEY must be printable ASCII") as caught:
                await number(service(server.url, key_env="SOME_KEY"))
            assert key not in str(caught.value) and server.requests == []

    run(body())


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"base_url": "ftp://host"}, "must be an http or https URL"),
        ({"base_url": "localhost:8000"}, "must be an http or https URL"),
        ({"base_url": ""}, "must be an http or https URL"),
        ({"base_url": "http://host:port"}, "cannot be read"),
        ({"base_url": "http://[::1"}, "cannot be read"),
        ({"base_url": "https://me:SECRET@host/v1"}, "no user, password"),
        ({"base_url": "https://host/v1?api_key=SECRET"}, "no user, password"),
        ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
        ({"requests_per_minute": -1}, "requests_per_minute must be at least 0"),
        ({"requests_per_minute": float("nan")}, "requests_per_minute must be at least 0"),
        ({"retries": -1}, "retries must be at least 0"),
        ({"deadline": 0}, "deadline must be above 0"),
        ({"request_timeout": -3}, "request_timeout must be above 0"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(RemoteError, match=rule) as caught:
        Service(**{"base_url": "http://host", "model": "m", **options})
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("base", "path", "url"),
    [
        ("http://h/v1", "/chat/completions", "http://h/v1/chat/completions"),
        ("http://h/v1/", "/chat/completions", "http://h/v1/chat/completions"),
        ("http://h/v1/chat/completions", "/chat/completions", "http://h/v1/chat/completions"),
        ("http://h/reward/", "", "http://h/reward"),
    ],
)
def test_urls(base: str, path: str, url: str) -> None:
    assert Service(base_url=base, model="m").url(path) == url


def test_a_url_that_only_the_client_refuses() -> None:
    async def body() -> None:
        with pytest.raises(RemoteError):
            await number(service("http://a b.invalid/v1", retries=0))

    run(body())
