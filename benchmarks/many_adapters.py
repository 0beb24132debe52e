"""What several adapters at once cost: the same work for one adapter and spread over many, in turns, in one process.

    python benchmarks/many_adapters.py [MODEL] [--adapters 8] [--rows 32] [--tokens 32] [--rank 32] [--rounds 3]

Prints JSON: tokens a second of sampling and of training for one adapter and for all of them, the ratios of both, and
how far the log-probs of an adapter in company are from those that it has alone.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kitae.engines.base import SamplingParams
from kitae.primitives import AdamParams, Datum, Trainable, Workbench
from kitae.primitives.core import Snapshot
from kitae.primitives.service import open as open_bench

PROMPT = tuple(range(100, 140))
LENGTH = 128  # tokens of a datum


def datum(seed: int) -> Datum:
    tokens = [(7919 * (i + seed)) % 250 for i in range(LENGTH + 1)]
    return Datum(tokens[:-1], tokens[1:])


def learn_something(model: Trainable, seed: int) -> None:
    for _ in range(2):
        model.forward_backward([datum(seed)])
        model.optim_step(AdamParams(1e-3))


def sampling(bench: Workbench, used: list[Snapshot], rows: int, tokens: int) -> float:
    """Tokens a second of so many answers, spread evenly over the snapshots."""
    each = rows // len(used)
    params = SamplingParams(max_tokens=tokens)

    async def all_of_them() -> None:
        await asyncio.gather(*(bench.core.sample(s, PROMPT, params, each, i) for i, s in enumerate(used)))

    began = time.perf_counter()
    bench.wait(all_of_them())
    return rows * tokens / (time.perf_counter() - began)


def training(models: list[Trainable], rows: int) -> float:
    """Tokens a second of passes and updates of so many data, spread evenly over the models."""
    each = rows // len(models)

    def step(model: Trainable) -> None:
        model.forward_backward([datum(i) for i in range(each)])
        model.optim_step(AdamParams(0.0))

    began = time.perf_counter()
    with ThreadPoolExecutor(len(models)) as threads:
        list(threads.map(step, models))
    return rows * LENGTH / (time.perf_counter() - began)


def gap(bench: Workbench, snapshots: list[Snapshot]) -> float:
    """The largest difference of a log-prob between all at once and each alone: scored, and as it was sampled."""
    text = [*PROMPT, *range(60, 90)]
    params = SamplingParams(max_tokens=16)

    def everything(s: Snapshot) -> Coroutine[Any, Any, Any]:
        async def both() -> list[float]:
            scored = await bench.core.score(s, text)
            (answer,) = await bench.core.sample(s, PROMPT, params, 1, 5)
            return [*scored.logprobs, *answer.logprobs]

        return both()

    async def at_once() -> list[list[float]]:
        return await asyncio.gather(*map(everything, snapshots))

    together = bench.wait(at_once())
    alone = [bench.wait(everything(s)) for s in snapshots]
    return max(abs(a - b) for x, y in zip(together, alone, strict=True) for a, b in zip(x, y, strict=True))


def in_turns(rounds: int, one: Callable[[], float], many: Callable[[], float]) -> dict[str, float]:
    one(), many()
    pairs = [(one(), many()) for _ in range(rounds)]
    return {
        "one": round(statistics.median(a for a, _ in pairs), 1),
        "many": round(statistics.median(b for _, b in pairs), 1),
        "ratio": round(statistics.median(b / a for a, b in pairs), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    for name, usual in (("adapters", 8), ("rows", 32), ("tokens", 32), ("rank", 32), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    with open_bench(given.model, dtype=given.dtype) as bench:
        models = [bench.create_lora(given.rank, seed=i) for i in range(given.adapters)]
        for i, model in enumerate(models):
            learn_something(model, i)
        snapshots = [bench.wait(bench.core.snapshot(model.model)) for model in models]
        found = {
            "model": given.model, "adapters": given.adapters, "rank": given.rank, "rows": given.rows,
            "device": str(bench.core.policy.device), "dtype": str(bench.core.policy.dtype),
            "logprob_gap": gap(bench, snapshots),
            "sampling": in_turns(
                given.rounds,
                lambda: sampling(bench, snapshots[:1], given.rows, given.tokens),
                lambda: sampling(bench, snapshots, given.rows, given.tokens),
            ),
            "training": in_turns(
                given.rounds, lambda: training(models[:1], given.rows), lambda: training(models, given.rows)
            ),
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
