"""What recording single tokens (`observe.tokens`) costs a training step.

    OMP_NUM_THREADS=1 python benchmarks/token_records.py [--model smollm2-135m] [--share 0.05] [--pairs 12]

Forward and backward passes over the same samples, in turn with and without records, in processor seconds, which count
on a busy machine. With records, the files are written too. Prints the medians and the median of the differences.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from stages import make_groups
from training import make_worker, prepared

from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.observe.tokens import TokenChoice, TokenFiles, with_samples
from kitae.trainer.base import Conditions, Role
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import pack_rows
from kitae.trainer.worker import Worker
from kitae.types import Sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=12)
    a = parser.parse_args()
    samples = prepared(make_groups(a.prompts, a.group, a.tokens), a.tokens)
    worker = make_worker(load_policy(ModelConfig(path=a.model)), TrainingConfig(steps=1), a.tokens)
    with tempfile.TemporaryDirectory() as folder:
        step(worker, samples, a.share, Path(folder))  # warm-up
        pairs = []
        for _ in range(a.pairs):
            without = seconds(lambda: step(worker, samples, 0.0, Path(folder)))
            pairs.append((without, seconds(lambda: step(worker, samples, a.share, Path(folder)))))
        size = (Path(folder) / "tokens" / "step-000001.npz").stat().st_size
    plain = median(a for a, _ in pairs)
    extra = median(b - a for a, b in pairs)
    print(f"{len(samples)} samples of {a.tokens} tokens, {a.share:.0%} of them recorded: {size / 1000:.1f} kB a step")
    print(f"without {plain:.3f} s, with {median(b for _, b in pairs):.3f} s; median difference {extra / plain:+.2%}")


def step(worker: Worker, samples: tuple[Sample, ...], share: float, folder: Path) -> None:
    """What a trainer does for one update, and what follows for the records."""
    observed = TokenChoice(share, 65536, seed=0).among(1, samples)
    rows = pack_rows(samples, worker.training, worker.policy.device, observed=observed)[1]
    totals = worker.forward_backward(rows, Conditions(1), [Role.POLICY])
    TokenFiles(folder, 256, print).write(1, with_samples(totals.tokens, samples))


def seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    main()
