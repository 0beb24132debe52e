"""How much faster is running ahead, on this machine, when response lengths have a long tail?

    python benchmarks/async_speedup.py [--model smollm2-135m] [--median 64] [--steps 10] [--staleness 4]
        [--transport ipc] [--decided 0.5] [--variants on-policy,active,…]

Real runs of the same work, one after the other: on-policy; with active sampling, which replaces groups without a
gradient by new prompts (`pipeline.refill`), one after the other or three at once (`pipeline.refill.oversample`);
running ahead
with engine and trainer on the same cores; ahead with what is in flight computed again after each update of the weights
(`pipeline.in_flight = "recompute"`); and with the engine in a process of its own. `--decided` is the share of prompts
whose answers are all right or all wrong. Response lengths are drawn from a log-normal distribution with the given
median, cut at eight times the median, the same for every run; the model computes every token of them. Rewards are a
hash of the text: the point is the time, not what is learnt. The time of a step is taken in the steady state: not while
the buffer fills, and not after the last prompt was issued. Prints a table and writes the timelines into one PNG.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from kitae.engines.base import Completion, Request

ROOT = Path(__file__).parent.parent
SPREAD = 0.9  # of the logarithm of lengths
SCORE = """import zlib

def score(response, reference, context):
    drawn = zlib.crc32(reference.encode()) % 1000
    return float(drawn % 2 if drawn < {decided} else zlib.crc32(response.encode()) % 2)
"""
WARM = 2  # steps


class Lengths:
    """An engine whose responses have the lengths they are told."""

    def __init__(self, engine: Any, median: int) -> None:
        self._engine = engine
        self._median = median

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: Request) -> Completion:
        drawn = random.Random(request.id).lognormvariate(0, SPREAD) * self._median
        length = max(4, min(8 * self._median, int(drawn)))
        sampling = replace(request.sampling, max_tokens=length, stop_tokens=(), stop_strings=())
        done: Completion = await self._engine.generate(replace(request, sampling=sampling))
        return done


def train(settings: list[str], median: int) -> None:
    """One run, in this process."""
    from kitae.config.recipe import load_config
    from kitae.observe.observer import Bystander, Silent
    from kitae.run import assembly, train_run

    start = assembly.start_engine

    async def start_with_lengths(*arguments: Any) -> Any:
        return Lengths(await start(*arguments), median)

    assembly.start_engine = start_with_lengths
    config = load_config(ROOT / "kitae" / "recipes" / "quickstart.toml", settings)
    train_run.train(config, Bystander(Silent()))


def measure(name: str, settings: list[str], arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    (folder / "score.py").write_text(SCORE.format(decided=int(1000 * arguments.decided)))
    stale = next((int(s.partition("=")[2]) for s in settings if "max_staleness" in s), 0)
    settings = [
        f"run.dir={folder}", f"run.name={name}", f"model.path={arguments.model}", "eval.prompts=0",
        f"verifier.name={folder / 'score.py'}:score", "verifier.check_gold=false", "checkpoint.every=1000",
        f"training.steps={WARM + arguments.steps + 2 * stale}", f"training.prompts_per_step={arguments.prompts}",
        f"sampling.max_tokens={8 * arguments.median}", "training.lr=1e-6",
        f"algorithm.filter={'zero-variance' if arguments.decided else 'none'}", "pipeline.refill=0",
        *arguments.setting, *settings,
    ]  # fmt: skip
    command = [sys.executable, __file__, "--run", str(arguments.median), *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    run = folder / f"{name}-001"
    spans = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ends = {s["step"]: s["end"] for s in spans if s["part"] == "sync"}
    first, last = WARM + stale, WARM + stale + arguments.steps
    steady = [r for r in rows if r["kind"] == "step" and first < r["step"] <= last]
    seconds = (ends[last] - ends[first]) / arguments.steps
    return {
        "run": run,
        "seconds": seconds,
        "tokens": sum(r["generated_tokens"] for r in steady) / (ends[last] - ends[first]),
        "trained": sum(r["samples_trained"] for r in steady) / (ends[last] - ends[first]),
        "engine idle": sum(r["engine_idle"] for r in steady) / len(steady),
        "trainer idle": sum(r["trainer_idle"] for r in steady) / len(steady),
        "staleness": sum(r["staleness"] for r in steady) / len(steady),
        "largest": max(r["staleness_max"] for r in steady),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--median", type=int, default=64, help="tokens in a response; the longest has 8 times as many")
    parser.add_argument("--prompts", type=int, default=4, help="in a step, with 8 samples each")
    parser.add_argument("--steps", type=int, default=10, help="measured, of each run")
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--transport", default="auto", help="of weights to the process: memory, ipc, …")
    parser.add_argument("--decided", type=float, default=0.0, help="share of prompts whose answers score all the same")
    parser.add_argument("--variants", default="on-policy,ahead-same-cores,ahead-own-process")
    parser.add_argument("--setting", action="append", default=[], help="of all runs: section.key=value")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "async_timeline.png")
    arguments = parser.parse_args()
    ahead = [f"pipeline.max_staleness={arguments.staleness}"]
    active = ["pipeline.refill=3"] if arguments.decided else []
    all_of_them = {
        "on-policy": [],
        "active": active,
        "active-oversampled": [*active, "pipeline.refill.oversample=3"],
        "ahead-same-cores": [*ahead, *active],
        "ahead-recomputed": [*ahead, *active, "pipeline.in_flight=recompute"],
        "ahead-own-process": [*ahead, *active, "engine.kind=process", f"cluster.transport={arguments.transport}"],
    }
    variants = {name: all_of_them[name] for name in arguments.variants.split(",")}
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, settings in variants.items():
            print(f"running {name}", file=sys.stderr)
            found[name] = measure(name, settings, arguments, Path(scratch))
        base = next(iter(found.values()))["seconds"]
        print(
            "| run | a step | faster | tokens/s | trained/s | engine idle | trainer idle | staleness, mean; largest |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for name, row in found.items():
            print(
                f"| {name} | {row['seconds']:.1f} s | {base / row['seconds']:.2f} × | {row['tokens']:.0f} | "
                f"{row['trained']:.2f} | {row['engine idle']:.0%} | "
                f"{row['trainer idle']:.0%} | {row['staleness']:.2f}; {row['largest']} |"
            )
        draw({name: row["run"] for name, row in found.items()}, arguments.picture)


def draw(runs: dict[str, Path], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from kitae.observe import timeline

    figure, columns = plt.subplots(len(runs), 1, figsize=(11, 3.2 * len(runs)), sharex=True, squeeze=False)
    axes = columns[:, 0]
    for axis, (name, run) in zip(axes, runs.items(), strict=True):
        timeline.draw_on(axis, timeline.read(run))
        axis.set_title(name.replace("-", " "), fontsize=10, loc="left")
    axes[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        train(sys.argv[3:], int(sys.argv[2]))
    else:
        main()
