"""What recording single tokens (`observe.tokens`) costs a training step.

    OMP_NUM_THREADS=1 python benchmarks/token_records.py [--model smollm2-135m] [--share 0.05] [--seconds 180]

Forward and backward passes over the same samples, with and without records, in one process and in turn (with, without,
without, with), in processor seconds, which count on a busy machine. With records, the files are written too. Goes on
for so many seconds of the processor, then prints the medians and the median of the differences with its 95 % interval;
and what choosing, joining and writing take by themselves.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from stages import make_groups
from training import make_worker, prepared

from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.observe.token_numbers import TokenChoice, TokenFiles, with_samples
from kitae.trainer.base import Conditions, Role
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import pack_rows
from kitae.trainer.training_worker import Worker
from kitae.types import Sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=180.0)
    a = parser.parse_args()
    samples = prepared(make_groups(a.prompts, a.group, a.tokens), a.tokens)
    worker = make_worker(load_policy(ModelConfig(path=a.model)), TrainingConfig(steps=1), a.tokens)
    with tempfile.TemporaryDirectory() as folder:

        def timed(share: float) -> float:
            return seconds(lambda: step(worker, samples, share, Path(folder)))

        timed(a.share), timed(0.0)  # warm-up
        pairs = list[tuple[float, float]]()
        while sum(map(sum, pairs)) < a.seconds or len(pairs) < 4:
            if len(pairs) % 2:
                without = timed(0.0)
                pairs.append((without, timed(a.share)))
            else:
                recorded = timed(a.share)
                pairs.append((timed(0.0), recorded))
        size = (Path(folder) / "tokens" / "step-000001.npz").stat().st_size
        apart = median(seconds(lambda: around(worker, samples, a.share, Path(folder))) for _ in range(50))
    plain = median(without for without, _ in pairs)
    shares = np.array([(recorded - without) / plain for without, recorded in pairs])
    means = np.random.default_rng(0).choice(shares, (2000, len(shares)))
    low, high = np.percentile(np.median(means, axis=1), [2.5, 97.5])
    print(f"{len(samples)} samples of {a.tokens} tokens, {a.share:.0%} of them recorded: {size / 1000:.1f} kB a step")
    print(f"without {plain:.3f} s, with {median(recorded for _, recorded in pairs):.3f} s; {len(pairs)} pairs")
    print(f"median difference {np.median(shares):+.2%} of a step [{low:+.2%}, {high:+.2%}]")
    print(f"choosing, joining and writing by themselves: {1000 * apart:.2f} ms, {apart / plain:.3%} of a step")


def around(worker: Worker, samples: tuple[Sample, ...], share: float, folder: Path) -> None:
    """What is done for records outside of the passes."""
    observed = TokenChoice(share, 65536, seed=0).among(1, samples)
    columns = {
        s.key: {"logp": s.loss("advantage"), "entropy": s.loss("advantage")} for s in samples if s.key in observed
    }
    TokenFiles(folder, 256, print).write(1, with_samples(columns, samples))


def step(worker: Worker, samples: tuple[Sample, ...], share: float, folder: Path) -> None:
    """What a trainer does for one update, and what follows for the records."""
    observed = TokenChoice(share, 65536, seed=0).among(1, samples)
    rows = pack_rows(samples, worker.training, worker.policy.device, worker.policy.dtype, observed=observed)[1]
    totals = worker.forward_backward(rows, Conditions(1), [Role.POLICY])
    TokenFiles(folder, 256, print).write(1, with_samples(totals.tokens, samples))


def seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    main()
