"""Does `kitae simulate` predict what runs do? Real runs of a small model, and the same schedules simulated.

    python benchmarks/simulation.py [--steps 12] [--staleness 1,2] [--rounds 2]

The model is random and made on the spot; a few letters end a response, so lengths have a long tail (the cap is about
8 × the median). It is not trained in earnest (the learning rate is next to nothing), so every run samples the same
responses, and the simulation is given their lengths. Engine and trainer are processes with cores of their own. What
things take is read from the metrics and the timeline of the runs with max_staleness = 0 alone, one before and one after
the others in each round; the others are predictions. On a machine that others use too, cores are slower while both
processes work; so there is a second prediction, from the rates that each run itself had: it tests the schedule alone.

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kitae.clock import VirtualLoop, now
from kitae.config.recipe import parse_config
from kitae.config.root import RLConfig
from kitae.engines.base import Request, SamplingParams, stream_seed
from kitae.engines.fake import FakeEngine, Pace
from kitae.models.tiny import make_tiny
from kitae.observe import timeline
from kitae.observe.observer import Bystander, Silent
from kitae.run.train_run import train
from kitae.store.journal import Journal
from kitae.store.run_folder import Metrics
from kitae.study.simulate import Hardware, Schedule, Times, Work, simulate

PUBLISHED = 46_100  # tokens/s: docs/performance.md, log-normal lengths of 16 to 2,048

Lengths = dict[int, int]


def config(model: Path, runs: Path, bound: int, steps: int) -> RLConfig:
    return parse_config(
        {
            "run": {"dir": str(runs), "name": f"staleness-{bound}"},
            "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
            "data": {"task": "reverse"},
            "sampling": {"max_tokens": 160, "stop": list("abcdefgh")},
            "algorithm": {"preset": "grpo"},
            "verifier": {"check_gold": False, "workers": 1},
            "training": {"steps": steps + 2 * (bound + 1), "prompts_per_step": 4, "group_size": 8, "lr": 1e-12},
            "engine": {"kind": "process"},
            "pipeline": {"max_staleness": bound},
            "checkpoint": {"every": 1000},
            "eval": {"prompts": 0},
        }
    )


def run(config: RLConfig) -> Path:
    return train(config, Bystander(Silent())).folder


def step_seconds(folder: Path, bound: int, steps: int) -> float:
    """Over the steps that count in a simulation."""
    ends = {row["step"]: row["end"] for row in timeline.read(folder) if row["part"] == "sync"}
    return float(ends[bound + 1 + steps] - ends[bound + 1]) / steps


def sampled(folder: Path, seed: int) -> tuple[Lengths, int]:
    """Lengths by the seeds of their requests, which a simulated run has too, and tokens of a prompt."""
    journal = Journal(folder / "journal.sqlite", read_only=True)
    rollouts = [r for group, *_ in journal.groups() for r in journal.rollouts(group)]
    journal.close()
    lengths = {stream_seed(seed, "train", r.group, r.index, 0): r.response_length for r in rollouts}
    return lengths, round(statistics.mean(len(r.chains[0].prompt_tokens) for r in rollouts))


def measure(folders: list[Path]) -> Times:
    """What things took in runs that took turns."""
    rows = [row for folder in folders for row in Metrics(folder / "metrics.jsonl").rows("step") if row["step"] > 1]
    spans = [span for folder in folders for span in timeline.read(folder)]
    # A batch begins at once, so it takes as many steps as its longest response.
    step, sequence = fit(
        [(row["length_max"], row["generated_tokens"]) for row in rows], [row["generate_seconds"] for row in rows]
    )
    fixed, token = fit([(1.0, row["train_tokens"]) for row in rows], [row["train_seconds"] for row in rows])
    waits = [b["end"] - a["end"] for a, b in pairs(spans)]
    return Times(
        step=step,
        sequence=sequence,
        prefill=math.inf,  # part of what a token takes
        train=1 / token,
        fixed=fixed + statistics.mean(overhead(row) for row in rows),
        sync=statistics.mean(row["sync_seconds"] for row in rows),
        verify=max(0.0, statistics.median(waits)),
    )


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


def own_rates(folder: Path, schedule: Schedule) -> Times:
    """The rates of this run: training and sync as measured, decoding scaled until the engine is busy as long."""
    rows = Metrics(folder / "metrics.jsonl").rows("step")
    edge = schedule.config.pipeline.max_staleness + 1
    rows = rows[edge : edge + schedule.steps]
    seconds, tokens = (sum(row[key] for row in rows) for key in ("train_seconds", "train_tokens"))
    times = replace(
        schedule.times,
        train=tokens / seconds,
        fixed=statistics.mean(overhead(row) for row in rows),
        sync=statistics.mean(row["sync_seconds"] for row in rows),
    )
    found = simulate(replace(schedule, times=times))
    busy = (1 - found.engine_idle) * found.step_seconds
    factor = statistics.mean(row["generate_seconds"] for row in rows) / busy
    return replace(times, step=times.step * factor, sequence=times.sequence * factor)


def compare(configs: dict[int, RLConfig], steps: int) -> list[tuple[int, float, float, float]]:
    """One round: `(max_staleness, seconds of a step measured, predicted, predicted from its own rates)`."""
    bounds = sorted(configs)
    folders = [(bound, run(configs[bound])) for bound in (*bounds, 0)]
    times = measure([folder for bound, folder in folders if bound == 0])
    lengths, prompt = sampled(dict(folders)[bounds[-1]], configs[0].run.seed)  # the longest run has those of all
    drawn = sorted(lengths.values())
    print(f"lengths   median {drawn[len(drawn) // 2]}, mean {statistics.mean(drawn):.0f}, longest {drawn[-1]}")
    print(f"measured  {times}", flush=True)
    work = Work(lambda seed: lengths[seed], prompt)
    found = []
    for bound in bounds:
        mine = [folder for b, folder in folders if b == bound]
        measured = statistics.mean(step_seconds(folder, bound, steps) for folder in mine)
        schedule = Schedule(configs[bound], Hardware(1, 1), times, work, steps)
        own = [simulate(replace(schedule, times=own_rates(folder, schedule))).step_seconds for folder in mine]
        found.append((bound, measured, simulate(schedule).step_seconds, statistics.mean(own)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--staleness", default="1,2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    bounds = sorted({0, *(int(part) for part in options.staleness.split(","))})
    with tempfile.TemporaryDirectory() as scratch:
        model = make_tiny(Path(scratch) / "model", hidden=options.hidden, layers=4)
        configs = {bound: config(model, Path(scratch), bound, options.steps) for bound in bounds}
        rounds = [compare(configs, options.steps) for _ in range(options.rounds)]
    print(
        "\nround  staleness ≤  s/step: measured  predicted   error  with its own rates   error  "
        "speed-up: real  predicted"
    )
    for number, found in enumerate(rounds, 1):
        (_, real, simulated, _), *_ = found
        for bound, measured, predicted, own in found:
            print(
                f"{number:5}  {bound:11}  {measured:16.3f}  {predicted:9.3f}  {predicted / measured - 1:+6.1%}  "
                f"{own:18.3f}  {own / measured - 1:+6.1%}  {real / measured:14.2f}  {simulated / predicted:9.2f}"
            )
    predicted = h200()
    print(
        f"\nH200, mixed lengths: {PUBLISHED:,} tokens/s measured, {predicted:,.0f} simulated "
        f"({predicted / PUBLISHED - 1:+.1%})"
    )


if __name__ == "__main__":
    main()
