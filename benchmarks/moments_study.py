"""Whether AdamW learns as well with moments in 16 bits: supervised, so that rows and their order are the same.

    python benchmarks/moments_study.py --data gsm8k [--folder runs/moments]     make the runs that are missing
    python benchmarks/moments_study.py                                          tell what docs/moments.csv has

SmolLM2-135M is trained on short GSM8K problems (at most 80 tokens, question and answer as one text, without calculator
marks), one a step, less than one pass over them: 160 steps, learning rate 2e-5, warm-up, then linearly to 0. A seed is
an order of rows. Variants of a seed see the same rows in the same order, so that differences are paired. What is
compared is the loss of held-out problems in the end, and that of the last 50 steps, each on a row not seen before.

Beside moments in fp32 and in bfloat16, which is rounded by chance, there are changes to weigh the difference with: sums
in another order, which changes nothing but chance; a learning rate 0.1 % higher; and moments rounded by chance to 4
bits of significand instead of 8, patched in here: an error of the same kind, 16 times as large.

docs/moments.csv has a line for every ten steps of each run, and a run that is in it is not made again. About 4
minutes a run on a core of its own (OMP_NUM_THREADS=1).

A run with fp32 also keeps the gradients of 100 weights of each tensor. They are then given to AdamW again, with moments
rounded in each way and two β₂, over and over for 3,200 steps, and the updates compared with those of fp32 moments: this
is what rounding itself does, without what training makes of it. Written to docs/moments_updates.csv.
"""

import argparse
import asyncio
import csv
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from findings import cell, interval, read_lines
from torch import Tensor

from kitae.config.recipe import parse_config
from kitae.config.root import StageConfig
from kitae.kernels.adamw import adamw
from kitae.kernels.base import AdamWPace, AdamWPart, AdamWStep
from kitae.models.config import ModelConfig
from kitae.models.load import load_tokenizer
from kitae.offline.example_batches import ExampleBatches
from kitae.offline.methods import make_method
from kitae.trainer import optim
from kitae.trainer.start_trainer import supervised
from kitae.types import FloatArray

DOCS = Path(__file__).parent.parent / "docs"
COLUMNS = ("beta2", "variant", "seed", "step", "loss", "held_out")
STEPS, LAST, BLOCK = 160, 50, 10
LR, LONGEST = 2e-5, 80
PICKED = 100  # weights of a tensor whose gradients are kept


def to_nearest(moment: Tensor) -> None:
    """fp32 that a bfloat16 could hold."""
    moment.copy_(moment.bfloat16())


def to_four_bits(moment: Tensor) -> None:
    """By chance, as `kitae.kernels.adamw.rounded` does, but 20 bits are cut off and not 16."""
    noise, start = _noise(), int(torch.randint(1 << 22, ()))
    bits = moment.view(-1).view(torch.int32)
    bits.add_(noise[start : start + len(bits)]).bitwise_and_(-(1 << 20))


@cache
def _noise() -> Tensor:
    """Drawn once, since drawing for each moment and step takes longer than a step; each begins somewhere in it."""
    return torch.randint(1 << 20, ((1 << 25) + (1 << 22),), dtype=torch.int32)


class Variant(NamedTuple):
    """rounding: what is done, after a step, to moments in fp32."""

    settings: Mapping[str, Any]
    rounding: Callable[[Tensor], None] | None = None


VARIANTS = {
    "fp32": Variant({}),
    "bf16": Variant({"moments": "bfloat16"}),
    "fp32, sums in another order": Variant({"token_budget": 32}),
    "fp32, learning rate × 1.001": Variant({"lr": LR * 1.001}),
    "4 bits, by chance": Variant({}, to_four_bits),
}
FP32, BF16, ORDER, FASTER, COARSE = VARIANTS
NEAREST = "bf16, to nearest"


class Run(NamedTuple):
    """`Run("0.99", "bf16", 2)`: β₂ as it is written in the table."""

    beta2: str
    variant: str
    seed: int


RUNS = tuple(
    Run(beta2, variant, seed)
    for beta2, seeds, variants in (
        ("0.99", (0,), (FP32, BF16, FASTER, COARSE)),
        ("0.99", (1, 2), (FP32, BF16)),
        ("0.99", (0,), (ORDER,)),
        ("0.999", (0,), (FP32, BF16)),
        ("0.99", (1, 2), (COARSE, FASTER, ORDER)),
        ("0.999", (1, 2), (FP32, BF16)),
    )
    for seed in seeds
    for variant in variants
)  # what matters most comes first, so that the table says something before all are made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--folder", type=Path, default=Path("runs/moments"), help="of the rows that are taken")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the tables are")
    arguments = parser.parse_args()
    table, updates = arguments.docs / "moments.csv", arguments.docs / "moments_updates.csv"
    if arguments.data:
        make(arguments.data, arguments.folder, table)
    if kept := sorted(arguments.folder.glob("gradients_*.npy")):
        write_updates(updates, kept)
    tell(read(table))
    tell_updates(updates)


# Runs.


def make(data: Path, folder: Path, table: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        take_rows(data / f"{name}.jsonl", folder / f"{name}.jsonl")
    for run in RUNS:
        if run not in read(table):
            began = time.perf_counter()
            lines = asyncio.run(train(run, folder))
            append(table, run, lines)
            print(f"{run}: {lines[-1]['held_out']}, {time.perf_counter() - began:.0f} s", flush=True)


def take_rows(source: Path, target: Path) -> None:
    tokenizer, _ = load_tokenizer(ModelConfig(path="smollm2-135m"))
    rows = map(json.loads, source.read_text(encoding="utf-8").splitlines())
    texts = [f"{row['question']}\n{re.sub('<<.*?>>', '', row['answer'])}" for row in rows]
    short = [text for text in texts if len(tokenizer.encode(text)) <= LONGEST]
    target.write_text("".join(json.dumps({"text": text}) + "\n" for text in short), encoding="utf-8")


def settings(run: Run, folder: Path) -> StageConfig:
    config = parse_config(
        {
            "run": {"seed": run.seed},
            "method": {"kind": "sft"},
            "model": {"path": "smollm2-135m", "device": "cpu", "dtype": "float32"},
            "data": {"path": str(folder / "train.jsonl"), "eval_path": str(folder / "test.jsonl")},
            "training": {
                "steps": STEPS, "batch": 1, "lr": LR, "warmup_steps": 10, "schedule": "linear",
                "betas": (0.9, float(run.beta2)), **VARIANTS[run.variant].settings,
            },
        }
    )  # fmt: skip
    assert isinstance(config, StageConfig)
    return config


async def train(run: Run, folder: Path) -> list[dict[str, Any]]:
    """As `kitae train` does, but for checkpoints and reports."""
    torch.manual_seed(run.seed)
    config = settings(run, folder)
    data, method = ExampleBatches(config), make_method(config)
    function, kept = VARIANTS[run.variant].rounding, Gradients()
    with after_each_step(rounding(function) if function else kept):
        trainer = supervised(method.make_objective(), config.training)
        before, losses = await method.evaluate(trainer, data.held_out) if run == RUNS[0] else None, []
        for step in range(1, STEPS + 1):
            totals = await trainer.forward_backward(await method.batch(trainer, data.batch(step)))
            await trainer.optim_step()
            losses.append(totals.numbers()["loss"])
        after = await method.evaluate(trainer, data.held_out)
        await trainer.close()
    if run[:2] == ("0.99", FP32):
        np.save(folder / f"gradients_{run.seed}.npy", kept.as_array())
    lines: list[dict[str, Any]] = [
        {"step": end, "loss": f"{np.mean(losses[end - BLOCK : end]):.6f}"} for end in range(BLOCK, STEPS + 1, BLOCK)
    ]
    lines[-1]["held_out"] = f"{after.mean(dtype=float):.6f}"
    first = [] if before is None else [{"step": 0, "held_out": f"{before.mean(dtype=float):.6f}"}]
    return first + lines


Hook = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor]], None]


class Gradients:
    """Of some weights of each tensor, step by step, as AdamW gets them: clipped."""

    def __init__(self) -> None:
        self._places: dict[int, Tensor] = {}
        self._found: dict[int, list[Tensor]] = defaultdict(list)

    def __call__(self, master: Tensor, grad: Tensor, scale: Tensor, moments: Sequence[Tensor]) -> None:
        places = self._places.setdefault(id(master), torch.randint(grad.numel(), (PICKED,)))
        self._found[id(master)].append(grad.view(-1)[places] * scale)

    def as_array(self) -> FloatArray:
        """`[steps, weights]`"""
        return torch.cat([torch.stack(rows) for rows in self._found.values()], dim=1).numpy()


def rounding(function: Callable[[Tensor], None]) -> Hook:
    def both(master: Tensor, grad: Tensor, scale: Tensor, moments: Sequence[Tensor]) -> None:
        for moment in moments:
            function(moment)

    return both


@contextmanager
def after_each_step(hook: Hook) -> Iterator[None]:
    """Within it, the hook gets weights, gradient, what clipping scales it by, and moments, when AdamW is done."""
    plain = optim._step_of

    def chosen(part: AdamWPart) -> AdamWStep:
        return followed(plain(part), hook)

    with patch.object(optim, "_step_of", chosen):
        yield


def followed(step: AdamWStep, hook: Hook) -> AdamWStep:
    def both(parts: Sequence[AdamWPart], scale: Tensor, pace: AdamWPace) -> None:
        step(parts, scale, pace)
        for part in parts:
            hook(part.parameter, part.grad, scale, (part.mean, part.square))

    return both


# Updates from kept gradients.

Lines = Sequence[Mapping[str, str]]

ROUNDINGS: dict[str, tuple[torch.dtype, Callable[[Tensor], None] | None]] = {
    FP32: (torch.float32, None),
    BF16: (torch.bfloat16, None),
    COARSE: (torch.float32, to_four_bits),
    NEAREST: (torch.float32, to_nearest),
}
UPDATE_COLUMNS = ("beta2", "variant", "seed", "steps", "length", "apart")
TIMES = (160, 800, 3200)


def write_updates(table: Path, kept: Sequence[Path]) -> None:
    """length: of an update along that of fp32, which has 1. apart: how far it is from it, for a length of 1."""
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, UPDATE_COLUMNS, lineterminator="\n")
        writer.writeheader()
        for path in kept:
            gradients = torch.from_numpy(np.load(path))
            for beta2 in (0.99, 0.999):
                exact, *others = (updates(gradients, beta2, *how) for how in ROUNDINGS.values())
                for name, found in zip(list(ROUNDINGS)[1:], others, strict=True):
                    for steps, one, other in zip(TIMES, exact, found, strict=True):
                        length = float((one * other).sum() / one.square().sum())
                        apart = float((other - one).norm() / one.norm())
                        seed = path.stem.rpartition("_")[2]
                        line = (beta2, name, seed, steps, f"{length:.5f}", f"{apart:.5f}")
                        writer.writerow(dict(zip(UPDATE_COLUMNS, line, strict=True)))


def updates(
    gradients: Tensor, beta2: float, dtype: torch.dtype, function: Callable[[Tensor], None] | None
) -> list[Tensor]:
    """Those of the 50 steps before each of TIMES: `[50, weights]`."""
    mean, square = torch.zeros(2, gradients.shape[1]).to(dtype)
    moved, found = torch.zeros(gradients.shape[1]), []
    for step in range(1, TIMES[-1] + 1):
        moved.zero_()
        grad = gradients[(step - 1) % len(gradients)]
        pace = AdamWPace(step=step, rate=1.0, betas=(0.9, beta2), eps=1e-8, weight_decay=0.0)
        adamw([AdamWPart(moved, None, grad, mean, square)], torch.tensor(1.0), pace)
        if function:
            function(mean)
            function(square)
        found += [moved.clone()] if any(end - LAST < step <= end for end in TIMES) else []
    return list(torch.stack(found).split(LAST))


def tell_updates(table: Path) -> None:
    found: dict[tuple[str, str], dict[str, list[Mapping[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for line in read_lines(table):
        found[line["beta2"], line["variant"]][line["steps"]].append(line)
    print(f"\n| β₂ | moments | {' | '.join(f'updates after {steps:,} steps' for steps in TIMES)} |")
    print("|---|---|" + "---|" * len(TIMES))
    for (beta2, variant), by_steps in found.items():
        print(f"| {beta2} | {variant} | {' | '.join(map(update_cell, by_steps.values()))} |")


def update_cell(lines: Lines) -> str:
    length, apart = (float(np.mean([float(line[name]) for line in lines])) for name in ("length", "apart"))
    return f"{length:.3f} as long, {apart:.1%} apart".replace("%", " %")


# The table.


def append(table: Path, run: Run, lines: Sequence[Mapping[str, Any]]) -> None:
    new = not table.exists()
    with table.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows({**run._asdict(), **line} for line in lines)


def read(table: Path) -> dict[Run, Lines]:
    found: dict[Run, list[Mapping[str, str]]] = defaultdict(list)
    for line in read_lines(table):
        found[Run(line["beta2"], line["variant"], int(line["seed"]))].append(line)
    return dict(found)


def held_out(run: Lines) -> float:
    return float(run[-1]["held_out"])


def last_steps(run: Lines) -> float:
    return float(np.mean([float(line["loss"]) for line in run[-LAST // BLOCK :]]))


def tell(found: Mapping[Run, Lines]) -> None:
    """A table for each β₂: means over seeds, and paired differences to fp32, in millionths, with 95 % intervals."""
    for beta2 in dict.fromkeys(run.beta2 for run in found):
        print(f"\nβ₂ = {beta2}; differences × 10⁶\n")
        print(
            f"| moments | seeds | held-out loss | from fp32 | seed by seed | from fp32, loss of the last {LAST} steps |"
        )
        print("|---|---|---|---|---|---|")
        runs = {
            name: {run.seed: lines for run, lines in found.items() if (run.beta2, run.variant) == (beta2, name)}
            for name in VARIANTS
        }
        for name in filter(runs.__getitem__, runs):
            print(row(name, runs[name], {} if name == FP32 else runs[FP32]))
    tell_scale(found)


def row(name: str, runs: Mapping[int, Lines], base: Mapping[int, Lines]) -> str:
    held, last = (differences(measure, runs, base) for measure in (held_out, last_steps))
    single = ", ".join(f"{value:+.0f}".replace("-", "−") for value in held)
    mean = f"{np.mean([held_out(lines) for lines in runs.values()]):.4f}"
    cells = (name, f"{len(runs)}", mean, cell([], interval(held), 0), single, cell([], interval(last), 0))
    return f"| {' | '.join(cells)} |"


def differences(measure: Callable[[Lines], float], runs: Mapping[int, Lines], base: Mapping[int, Lines]) -> list[float]:
    return [1e6 * (measure(runs[seed]) - measure(base[seed])) for seed in sorted(runs.keys() & base.keys())]


def tell_scale(found: Mapping[Run, Lines]) -> None:
    """How far the loss falls, and how far apart seeds are."""
    starts = [float(lines[0]["held_out"]) for lines in found.values() if lines[0]["step"] == "0"]
    ends = [held_out(lines) for run, lines in found.items() if run[:2] == ("0.99", FP32)]
    print(f"\nheld-out loss before training {np.mean(starts):.4f}, with fp32 after it {np.mean(ends):.4f};")
    print(f"standard deviation over seeds, of orders of rows, {np.std(ends, ddof=1):.4f}")


if __name__ == "__main__":
    main()
