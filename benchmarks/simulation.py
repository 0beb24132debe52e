"""Does `kitae simulate` predict what runs do? Real runs of a small model, and the same schedules simulated.

    python benchmarks/simulation.py [--steps 20] [--staleness 0,1,2] [--repeat 2]

The model is random and made on the spot; a few letters end a response, so lengths have a long tail (the cap is about
8 × the median). It is not trained in earnest (the learning rate is next to nothing), so every run samples the same
responses, and the simulation is given their lengths. Engine and trainer are processes with cores of their own. What
things take is read from the metrics and the timeline of the runs with max_staleness = 0 alone; those with more are
predictions. Runs are interleaved: a machine that others use makes all of them slower.

Last, without any run: the throughput that docs/performance.md gives for one H200 and responses of mixed lengths, from
the model of time that was fitted to responses of equal length and to a single one.
"""

import argparse
import asyncio
import itertools
import math
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kitae.clock import VirtualLoop, now
from kitae.config import Config, parse_config
from kitae.engines.base import Request, SamplingParams
from kitae.engines.fake import FakeEngine, Pace
from kitae.engines.native.sampler import stream_seed
from kitae.models.tiny import make_tiny
from kitae.observe import timeline
from kitae.observe.observer import Silent
from kitae.pipeline.session import prepare, train
from kitae.pipeline.simulate import Hardware, Schedule, Times, Work, simulate
from kitae.store.journal import Journal
from kitae.store.run import Metrics, RunStore

PUBLISHED = 46_000  # tokens/s: docs/performance.md, log-normal lengths of 16 to 2,048

Lengths = dict[int, int]


def config(model: Path, runs: Path, bound: int, steps: int) -> Config:
    return parse_config(
        {
            "run": {"dir": str(runs), "name": f"staleness-{bound}"},
            "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
            "data": {"task": "reverse"},
            "sampling": {"max_tokens": 160, "stop": list("abcdefgh")},
            "algorithm": {"preset": "grpo"},
            "verifier": {"check_gold": False, "workers": 1},
            "training": {"steps": steps + 2 * (bound + 1), "prompts_per_step": 4, "group_size": 8, "lr": 1e-12},
            "pipeline": {"placement": "process", "max_staleness": bound},
            "checkpoint": {"every": 1000},
            "eval": {"prompts": 0},
        }
    )


def run(config: Config) -> Path:
    return train(RunStore.create(config), prepare(config, print), Silent()).folder


def step_seconds(folder: Path, bound: int, steps: int) -> float:
    """Over the steps that count in a simulation."""
    ends = {row["step"]: row["end"] for row in timeline.read(folder) if row["part"] == "sync"}
    return float(ends[bound + 1 + steps] - ends[bound + 1]) / steps


def measure(folders: list[Path], seed: int) -> tuple[Times, Lengths, int]:
    """What things took in runs that took turns; the lengths by the seeds of their requests; tokens of a prompt."""
    rows = [row for folder in folders for row in Metrics(folder / "metrics.jsonl").rows("step") if row["step"] > 1]
    spans = [span for folder in folders for span in timeline.read(folder)]
    lengths, prompts = {}, []
    journal = Journal(folders[0] / "journal.sqlite", read_only=True)
    for group, *_ in journal.groups():
        for rollout in journal.rollouts(group):
            lengths[stream_seed(seed, "train", group, rollout.index, 0)] = rollout.response_length
            prompts.append(len(rollout.prompt_tokens))
    journal.close()
    # A batch begins at once, so it takes as many steps as its longest response.
    step, sequence = fit(
        [(row["length_max"], row["generated_tokens"]) for row in rows], [row["generate_seconds"] for row in rows]
    )
    fixed, token = fit([(1.0, row["train_tokens"]) for row in rows], [row["train_seconds"] for row in rows])
    waits = [b["end"] - a["end"] for a, b in pairs(spans)]
    times = Times(
        step=step,
        sequence=sequence,
        prefill=math.inf,  # part of what a token takes
        train=1 / token,
        fixed=fixed + statistics.mean(overhead(row) for row in rows),
        sync=statistics.mean(row["sync_seconds"] for row in rows),
        verify=max(0.0, statistics.median(waits)),
    )
    return times, lengths, round(statistics.mean(prompts))


def overhead(row: dict[str, Any]) -> float:
    """What a step takes beside waiting for its batch and the forward and backward passes."""
    return float(row["step_seconds"] - row["wait_seconds"] - row["train_seconds"])


def pairs(spans: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Generation and verification of each group: they are written one after the other."""
    return [(a, b) for a, b in itertools.pairwise(spans) if (a["part"], b["part"]) == ("generate", "verify")]


def fit(inputs: list[tuple[float, float]], seconds: list[float]) -> tuple[float, float]:
    """Least squares with coefficients that are not negative."""
    x, y = np.array(inputs), np.array(seconds)
    both = np.linalg.lstsq(x, y, rcond=None)[0]
    if min(both) >= 0:
        return float(both[0]), float(both[1])
    alone = [float(column @ y / (column @ column)) for column in x.T]
    errors = [float(((column * a - y) ** 2).sum()) for column, a in zip(x.T, alone, strict=True)]
    return (alone[0], 1e-12) if errors[0] < errors[1] else (0.0, alone[1])


def h200() -> float:
    """Tokens a second of the defaults on 512 responses with the lengths of benchmarks/gpu_rollouts.py."""
    rng = random.Random(0)
    for _ in range(64 * 128):
        rng.randrange(1000, 150000)  # its prompts
    lengths = [min(2048, max(16, int(rng.lognormvariate(5.8, 0.9)))) for _ in range(512)]
    times, answer = Times(), (0,) * 2048

    async def body() -> float:
        engine = FakeEngine(lambda r: answer[: lengths[r.seed]], Pace(times.step, times.sequence, times.prefill))
        sampling = SamplingParams(max_tokens=2048)
        asked = [Request(str(i), (1,) * 128, sampling, seed=i, share=str(i // 8)) for i in range(512)]
        await asyncio.gather(*map(engine.generate, asked))
        return now()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return sum(lengths) / runner.run(body())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--staleness", default="0,1,2")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    bounds = sorted({0, *(int(part) for part in options.staleness.split(","))})
    with tempfile.TemporaryDirectory() as scratch:
        model = make_tiny(Path(scratch) / "model", hidden=options.hidden, layers=4)
        configs = {bound: config(model, Path(scratch), bound, options.steps) for bound in bounds}
        folders: dict[int, list[Path]] = {bound: [] for bound in bounds}
        for _ in range(options.repeat):
            for bound in bounds:
                folders[bound].append(run(configs[bound]))
        measured = {b: [step_seconds(f, b, options.steps) for f in found] for b, found in folders.items()}
        # Later runs have more steps, so their lengths cover those of all.
        times, _, prompt = measure(folders[0], configs[0].run.seed)
        *_, (_, lengths, _) = [measure(found, configs[b].run.seed) for b, found in folders.items()]
    drawn = sorted(lengths.values())
    print(f"lengths   median {drawn[len(drawn) // 2]}, mean {statistics.mean(drawn):.0f}, longest {drawn[-1]}")
    print(f"measured  {times}\n")
    print("staleness ≤   s/step measured (runs)      simulated   error   speed-up measured   simulated")
    work = Work(lambda seed: lengths[seed], prompt)
    found = {b: simulate(Schedule(configs[b], Hardware(1, 1), times, work, options.steps)).step_seconds for b in bounds}
    middle = {b: statistics.mean(values) for b, values in measured.items()}
    for b in bounds:
        runs = " ".join(f"{value:.3f}" for value in measured[b])
        print(
            f"{b:11}   {middle[b]:7.3f}  ({runs})".ljust(42)
            + f"{found[b]:9.3f}  {found[b] / middle[b] - 1:+6.1%}   {middle[0] / middle[b]:17.2f}   "
            f"{found[0] / found[b]:9.2f}"
        )
    predicted = h200()
    print(
        f"\nH200, mixed lengths: {PUBLISHED:,} tokens/s measured, {predicted:,.0f} simulated "
        f"({predicted / PUBLISHED - 1:+.1%})"
    )


if __name__ == "__main__":
    main()
