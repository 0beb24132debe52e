"""A server under clients that behave badly, for long: does its memory stay flat, and is everybody else answered?

    python benchmarks/serving_soak.py [--seconds 900] [--connections 10000] [--concurrent 300] [--model tiny]

The server is a process of its own, with the connections, limits and patience of `kitae serve`. Each connection draws
what it does: a whole answer, a stream, one of the two given up in the middle, headers or a body that never end, a
stream read slowly or not at all, a request that is malformed or far too large. A request of a client that behaves is
lost if it gets no answer, half of one, or a status of 5xx; 429 is an answer. `/health` is asked every half second.

Prints the memory of the server as it goes, the outcomes by kind, and, when all is over, what the server still holds:
answers under way, connections, and pages of the cache, of which all must be free. Exits with 1 where something is lost
or held, or where the memory grew by more than --growth from the end of the first quarter on.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_WELL = ("whole", "stream", "slow")  # clients of these kinds must be answered
_KINDS = {
    "whole": 30, "stream": 25, "slow": 4, "cancelled": 15, "half head": 4, "half body": 5, "deaf": 3, "malformed": 10,
    "huge": 4,
}  # fmt: skip


# The server.


async def be_server(model: str) -> None:
    """Serve until standard input ends; then print what is still held."""
    from kitae.clients.addresses import address_of, listen
    from kitae.engines.config import EngineConfig
    from kitae.engines.native.engine import NativeEngine
    from kitae.kernels.allocation import gc_frozen
    from kitae.models.config import ModelConfig
    from kitae.models.load import load_policy
    from kitae.serving.model_app import ServerSettings, app_of
    from kitae.serving.running_server import serving
    from kitae.serving.text_scoring import TextScorer

    policy = load_policy(ModelConfig(path=model))
    engine, scorer = NativeEngine(policy, EngineConfig(memory_gb=0.05)), TextScorer(policy)
    taken = listen("127.0.0.1", 0)
    async with serving(app_of(policy, engine, scorer, ServerSettings("soak")), taken):
        print(address_of(taken, "127.0.0.1"), flush=True)
        with gc_frozen():
            await asyncio.to_thread(sys.stdin.read)
        stats, pool = engine.stats(), engine.scheduler.pool
        open_files = len(list(Path("/proc/self/fd").iterdir()))
        held = {"running": stats.running, "waiting": stats.waiting, "tokens": stats.generated_tokens}
        print(json.dumps(held | {"pages": pool.total, "free": pool.free, "files": open_files}), flush=True)
    await scorer.close()
    await engine.close()


def memory(process: int) -> float:
    """Of a process, in MB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


# The clients.


class Client:
    """One connection, and what it does with it."""

    def __init__(self, port: int, draw: random.Random) -> None:
        self.port, self.draw = port, draw

    async def be(self, kind: str) -> str:
        """What came of it."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**16)
        try:
            return await getattr(self, kind.replace(" ", "_"))()
        except (ConnectionError, asyncio.IncompleteReadError):
            return "connection closed"
        finally:
            self.writer.close()

    def request(self, stream: bool, **more: object) -> bytes:
        chat = self.draw.random() < 0.5
        words = " ".join(self.draw.choices(["one", "two", "three", "é", "<|im_end|>"], k=self.draw.randrange(1, 40)))
        body = {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
        sampling = {"max_tokens": self.draw.randrange(1, 48), "n": self.draw.choice([1, 1, 1, 2]), "stream": stream}
        return self.wrapped(CHAT if chat else TEXT, json.dumps({**body, **sampling, **more}).encode())

    def wrapped(self, path: str, body: bytes, kind: str = "application/json") -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def status(self) -> int:
        self.head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 120)
        return int(self.head.split()[1])

    async def rest(self, pause: float = 0.0) -> bytes:
        """The body of the answer."""
        if found := re.search(rb"content-length: (\d+)", self.head.lower()):
            return await self.reader.readexactly(int(found[1]))
        parts = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            parts.append((await self.reader.readexactly(size + 2))[:-2])
            await asyncio.sleep(pause)
        return b"".join(parts)

    async def whole(self) -> str:
        for _ in range(self.draw.choice([1, 1, 3])):  # some keep their connection
            self.writer.write(self.request(stream=False))
            if (status := await self.status()) != 200:
                return f"{status}"
            found = json.loads(await self.rest())
            assert (
                found["usage"]["completion_tokens"] >= len(found["choices"]) and found["choices"][-1]["finish_reason"]
            )
        return "answered"

    async def stream(self, pause: float = 0.0, **more: object) -> str:
        self.writer.write(self.request(stream=True, **more))
        if (status := await self.status()) != 200:
            return f"{status}"
        return "answered" if (await self.rest(pause)).endswith(b"data: [DONE]\n\n") else "half an answer"

    async def slow(self) -> str:
        return await self.stream(pause=0.1)

    async def cancelled(self) -> str:
        self.writer.write(self.request(stream=self.draw.random() < 0.7, max_tokens=400, ignore_eos=True))
        await asyncio.sleep(self.draw.random() * 2)
        if self.draw.random() < 0.3:
            self.writer.transport.abort()
        return "gone"

    async def half_head(self) -> str:
        whole = self.request(stream=False)
        self.writer.write(whole[: self.draw.randrange(1, whole.index(b"\r\n\r\n"))])
        return await self.given_up()

    async def half_body(self) -> str:
        whole = self.request(stream=False, user="x" * self.draw.choice([0, 1000, 300_000]))
        start = whole.index(b"\r\n\r\n") + 4
        self.writer.write(whole[: self.draw.randrange(start, len(whole))])
        return await self.given_up()

    async def given_up(self) -> str:
        """Wait to be closed, or lose patience first."""
        try:
            said = await asyncio.wait_for(self.reader.read(), self.draw.choice([1, 5, 100]))
        except TimeoutError:
            return "gone"
        return f"closed with {said.split()[1].decode()}" if said else "closed"

    async def deaf(self) -> str:
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "n": 4, "stream": True, "logprobs": 0}
        self.writer.write(self.wrapped(TEXT, json.dumps(body).encode()))
        await asyncio.sleep(self.draw.choice([1, 10, 60]))
        return "gone"

    async def malformed(self) -> str:
        bad: list[bytes] = [
            self.wrapped(CHAT, b"{"), self.wrapped(CHAT, b"[]"), self.wrapped(CHAT, b"\xff\x00"),
            self.wrapped(CHAT, b'{"messages": [{"role": "user", "content": "x"}], "x": 1}'),
            self.wrapped(CHAT, b'{"messages": ' + b"[" * 9000 + b"]" * 9000 + b"}"),
            self.wrapped(TEXT, b'{"prompt": "x", "n": 129}'), self.wrapped(TEXT, b'{"prompt": ' + b"9" * 5000 + b"}"),
            self.wrapped(TEXT, b'{"prompt": "x"}', "text/plain"), self.wrapped("/nowhere", b"{}"),
            b"GET " + CHAT.encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"nonsense\r\n\r\n",
            b"\x16\x03\x01\x02\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 99_999 + b"\r\n\r\n",
        ]  # fmt: skip
        self.writer.write(self.draw.choice(bad))
        return f"{await self.status()}"

    async def huge(self) -> str:
        size = self.draw.choice([10**5, 10**6, 7 * 10**6])
        body: dict[str, object] = self.draw.choice(
            [{"prompt": "word " * (size // 5)}, {"prompt": ["x"] * (size // 10)}, {"prompt": [1] * (size // 10)}]
        )
        self.writer.write(self.wrapped(TEXT, json.dumps(body).encode()))
        return f"{await self.status()}"


async def until_quiet(ask: Callable[[str], Awaitable[str]]) -> float:
    for _ in range(120):
        page = await ask("/metrics")
        left = sum(float(x) for x in re.findall(r"^kitae_(?:answers_under_way|engine_running) (\S+)$", page, re.M))
        if not left:
            break
        await asyncio.sleep(0.5)
    return left


async def soak(args: argparse.Namespace) -> int:
    server = subprocess.Popen(
        [sys.executable, __file__, "--be-server", args.model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None and server.stdin is not None
    port = int(server.stdout.readline().rpartition(":")[2])
    outcomes: Counter[tuple[str, str]] = Counter()
    health: list[float] = []
    sizes: list[tuple[float, float]] = []
    began = time.monotonic()

    async def ask(path: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        said = (await asyncio.wait_for(reader.read(), 60)).decode()
        writer.close()
        assert said.startswith("HTTP/1.1 200"), said[:200]
        return said

    async def watch() -> None:
        while True:
            asked = time.monotonic()
            await ask("/health")
            health.append(time.monotonic() - asked)
            sizes.append((time.monotonic() - began, memory(server.pid)))
            if len(sizes) % 60 == 0:
                print(f"{sizes[-1][0]:6.0f} s: {sum(outcomes.values())} connections, {sizes[-1][1]:.0f} MB", flush=True)
            await asyncio.sleep(0.5)

    async def worker(number: int) -> None:
        draw = random.Random(f"{args.seed}/{number}")
        await asyncio.sleep(number / args.concurrent * min(10, args.seconds / 10))
        while time.monotonic() - began < args.seconds and sum(outcomes.values()) < args.connections:
            kind = draw.choices(list(_KINDS), list(_KINDS.values()))[0]
            try:
                came = await Client(port, draw).be(kind)
            except TimeoutError:
                came = "no answer in 120 s"
            outcomes[kind, came] += 1
            await asyncio.sleep(draw.random() * args.pause)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*map(worker, range(args.concurrent)))
    left = await until_quiet(ask)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    end = memory(server.pid)
    server.stdin.close()
    held = json.loads(server.stdout.readline())
    server.wait(60)

    lost = sum(n for (kind, came), n in outcomes.items() if kind in _WELL and came not in ("answered", "429"))
    failed = sum(n for (_, came), n in outcomes.items() if re.search(r"\b5\d\d\b", came))
    quarters = [next((mb for at, mb in sizes if at >= sizes[-1][0] * q / 4), end) for q in range(4)] + [end]
    ordered = sorted(health)
    print("| kind | outcome | connections |\n|---|---|---|")
    for (kind, came), count in sorted(outcomes.items()):
        print(f"| {kind} | {came} | {count} |")
    print(f"connections {sum(outcomes.values())} in {sizes[-1][0]:.0f} s; lost {lost}; answered with 5xx {failed}")
    print(f"memory in MB at the quarters: {', '.join(f'{mb:.0f}' for mb in quarters)}")
    print(f"/health: median {ordered[len(ordered) // 2]:.3f} s, 99 % {ordered[len(ordered) * 99 // 100]:.3f} s, "
          f"slowest {ordered[-1]:.3f} s of {len(ordered)}")  # fmt: skip
    print(f"at the end: {left:.0f} answers under way, {held}")
    grown = quarters[4] - quarters[1]
    good = not lost and not failed and not left and held["free"] == held["pages"] and not held["waiting"]
    return 0 if good and grown <= args.growth else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--connections", type=int, default=10_000, help="end when so many are over")
    parser.add_argument("--concurrent", type=int, default=300)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds of rest of each client, at most")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--growth", type=float, default=64, help="MB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--be-server", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.be_server:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        asyncio.run(be_server(args.be_server))
    else:
        sys.exit(asyncio.run(soak(args)))


if __name__ == "__main__":
    main()
