"""Parts of a training step on a CPU, each with and without one of the things that make it fast, in turns.

    python benchmarks/cpu_training.py [--parts attention,rows,teams] [--repeats 7]

attention: of packed rows by one kernel, and by gathered copies and batched products; a layer forward and backward with
9 query and 3 key heads of 64, on one thread. rows: forward and backward pass of SmolLM2-135M for 8 groups of 8 answers
of 64 tokens behind prompts of 45, in rows of at most so many tokens. teams: the same, while another thread that has
computed keeps its OpenMP threads, or has dismissed them. Medians and the best, in the dtype Kitae would choose here.
"""

import argparse
import queue
import statistics
import threading
import time
from collections.abc import Callable

import torch
from training import forward_backward, make_worker, prepared

from kitae.data.packing import Span
from kitae.kernels.allocation import dismiss_team
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy, pick_dtype
from kitae.trainer.config import TrainingConfig
from kitae.trainer.packed_attention import PackedAttention
from kitae.types import Group, Prompt, Rollout, Score, Segment

CPU = torch.device("cpu")
ROWS = {"16 answers of 64 to two prompts of 45": (2, 45, 8, 64), "4 of 256 to one of 128": (1, 128, 4, 256),
        "one of 2,048": (1, 2048, 0, 0)}  # fmt: skip


def compare(name: str, ways: dict[str, Callable[[], None]], repeats: int) -> None:
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for way, work in ways.items():
            began = time.perf_counter()
            work()
            seconds[way] += [time.perf_counter() - began] if repeat else []
    for way, found in seconds.items():
        print(f"{name}: {way:36} {statistics.median(found) * 1e3:9.1f} ms, best {min(found) * 1e3:9.1f}", flush=True)


def spans(prompts: int, prompt: int, answers: int, length: int) -> list[Span]:
    found, size = [], prompt + answers * length
    for start in range(0, prompts * size, size):
        found.append(Span(start, prompt))
        found += [Span(start + prompt + i * length, length, start, prompt) for i in range(answers)]
    return found


def attention(repeats: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, shape in ROWS.items():
        row = spans(*shape)
        x = torch.randn(row[-1].start + row[-1].length, 15, 64).to(pick_dtype("auto", CPU))

        def layer(compiled: bool, row: list[Span] = row, x: torch.Tensor = x) -> None:
            q, k, v = (t.transpose(0, 1) for t in torch.split(x.requires_grad_(), [9, 3, 3], 1))
            context = PackedAttention(row, CPU, 9, compiled=compiled)
            out = context.attend(0, q, k, v, scale=0.125, window=None, softcap=None, sinks=None)
            out.backward(out.detach())

        compare(name, {"one kernel": lambda: layer(True), "copies and products": lambda: layer(False)}, 5 * repeats)
    torch.set_num_threads(threads)


def groups() -> list[Group]:
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(100, 49000, (n,), generator=generator).tolist())

    def rollout(p: int, i: int, prompt: tuple[int, ...]) -> Rollout:
        segment = Segment("model", tokens(64), (-5.0,) * 64, (0,) * 64)
        return Rollout.of(p, i, prompt, (segment,), "length", "", Score(float((p + i) % 3 == 0)))

    asked = [tokens(45) for _ in range(8)]
    return [
        Group(p, Prompt(str(p), (), ""), tuple(rollout(p, i, prompt) for i in range(8)))
        for p, prompt in enumerate(asked)
    ]


def rows(repeats: int) -> None:
    policy, samples = load_policy(ModelConfig()), prepared(groups(), 64)
    workers = {budget: make_worker(policy, TrainingConfig(token_budget=budget), 64) for budget in (1024, 2048, 4096)}

    def passes(budget: int) -> None:
        forward_backward(workers[budget], samples)

    ways = {f"of at most {budget:,}": lambda budget=budget: passes(budget) for budget in workers}
    compare("rows", ways, repeats)  # type: ignore[arg-type]


def teams(repeats: int) -> None:
    worker, samples = make_worker(load_policy(ModelConfig()), TrainingConfig(), 64), prepared(groups(), 64)
    wanted: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
    ready = threading.Event()

    def other() -> None:
        x = torch.ones(2**20)
        while (keeps := wanted.get()) is not None:
            x += x
            if not keeps:
                dismiss_team()
            ready.set()

    def passes(keeps: bool) -> None:
        ready.clear()
        wanted.put(keeps)
        ready.wait()
        forward_backward(worker, samples)

    threading.Thread(target=other, daemon=True).start()
    compare("teams", {"kept": lambda: passes(True), "dismissed": lambda: passes(False)}, repeats)
    wanted.put(None)


PARTS: dict[str, Callable[[int], None]] = {"attention": attention, "rows": rows, "teams": teams}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    for part in args.parts.split(","):
        PARTS[part](args.repeats)


if __name__ == "__main__":
    main()
