"""Attention of packed rows on one GPU: torch's flash attention, and Kitae's kernels under several settings of tiles.

    python benchmarks/gpu_spans.py [--heads 12/2,32/8] [--repeats 10] [--softcap 50] [--window 1024] [--workers 12]

Rows of 16,384 tokens in bfloat16: groups (prompts of 128 tokens with 8 answers of 512 each), ragged (the same with
answers of log-normal lengths), and one sequence. Flash attention is timed as the trainer called it before, with the
gathering of keys and the sum of what prompts get. Of the kernels, each one alone under each setting, then all under
those that were best. TFLOP/s count what is seen, twice the size of each product: 2 products forward, 3 for queries, 4
for keys, and 7 for all, as if nothing were computed twice. With `--softcap` or a window, flash is left out where it
cannot.

Kernels are compiled in several processes beforehand, which share Triton's cache.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kitae.data.packing import Span
from kitae.kernels.base import SpanTable
from kitae.kernels.cuda import spans
from kitae.kernels.cuda.spans import Tile, Tiles
from kitae.trainer.packed_attention import PackedAttention

TOKENS = 16384
SETTINGS = {
    "forward": [Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2),
                Tile(64, 128, 4, 2)],
    "queries": [Tile(128, 64, 8, 2), Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3),
                Tile(64, 32, 4, 3)],
    "keys": [Tile(64, 128, 8, 2), Tile(64, 128, 8, 3), Tile(32, 128, 8, 2), Tile(32, 128, 8, 3), Tile(64, 64, 8, 2),
             Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)],
}  # fmt: skip
PRODUCTS = {"forward": 2, "queries": 3, "keys": 4, "all": 7}


def rows() -> Iterator[tuple[str, list[Span]]]:
    rng = random.Random(0)

    def groups(length: Callable[[], int]) -> list[Span]:
        found: list[Span] = []
        end = 0
        while end < TOKENS:
            prompt = Span(end, min(128, TOKENS - end))
            found.append(prompt)
            end += prompt.length
            for _ in range(8):
                if end < TOKENS:
                    found.append(Span(end, min(length(), TOKENS - end), prompt.start, prompt.length))
                    end += found[-1].length
        return found

    yield "groups", groups(lambda: 512)
    yield "ragged", groups(lambda: min(2048, max(16, int(rng.lognormvariate(5.8, 0.9)))))
    yield "one", [Span(0, TOKENS)]


class Case(NamedTuple):
    """What all of the kernels need, for one row."""

    row: list[Span]
    heads: tuple[int, int]
    window: int | None
    softcap: float | None
    x: Tensor  # queries, keys and values side by side, as the projection leaves them
    grad: Tensor
    table: SpanTable

    @classmethod
    def of(cls, row: list[Span], heads: tuple[int, int], dim: int, window: int | None, softcap: float | None) -> "Case":
        tokens = row[-1].start + row[-1].length
        x = torch.randn(tokens, heads[0] + 2 * heads[1], dim, device="cuda", dtype=torch.bfloat16)
        grad = torch.randn(tokens, heads[0], dim, device="cuda", dtype=torch.bfloat16)
        return cls(row, heads, window, softcap, x, grad, PackedAttention(row, x.device, heads[0]).table)

    def sides(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = torch.split(x, [self.heads[0], self.heads[1], self.heads[1]], 1)
        return q, k, v

    @property
    def dim(self) -> int:
        return self.x.shape[2]

    @property
    def flops(self) -> float:
        """Of one product, over all pairs that are seen."""
        window = self.window or TOKENS
        seen = sum(min(s.prefix_length + i + 1, window) for s in self.row for i in range(s.length))
        return 2.0 * seen * self.dim * self.heads[0]

    def calls(self, out: Tensor, lse: Tensor) -> dict[str, Callable[[Tile], object]]:
        """Each kernel alone; the latter ones read what the forward pass has left."""
        q, k, v = self.sides(self.x)
        scale, settings = self.dim**-0.5, {"window": self.window, "softcap": self.softcap, "sinks": None}
        made, delta = torch.empty_like(self.x), torch.zeros_like(lse)
        told = spans._Call.of(q, k, self.table, scale, self.window, self.softcap)
        rest = self.table, told, scale
        dq, dkv = made[:, : self.heads[0]], made[:, self.heads[0] :]
        return {
            "forward": lambda t: spans.forward(q, k, v, self.table, scale=scale, tiles=Tiles(t, t, t), **settings),
            "queries": lambda t: spans.query_gradient(dq, delta, self.grad, q, k, v, out, lse, *rest, t),
            "keys": lambda t: spans.key_gradient(dkv, delta, self.grad, q, k, v, lse, *rest, t),
        }

    def flash(self) -> tuple[Callable[[], object], Callable[[], object]] | None:
        """Forward, and with backward."""
        if self.softcap is not None:
            return None
        x = self.x.requires_grad_()
        context = PackedAttention(self.row, x.device, self.heads[0], compiled=False)

        def forward() -> Tensor:
            q, k, v = (t.transpose(0, 1) for t in self.sides(x))
            return context.attend(0, q, k, v, scale=self.dim**-0.5, window=self.window, softcap=None, sinks=None)

        return forward, lambda: torch.autograd.grad(forward(), x, self.grad)

    def both(self, tiles: Tiles | None) -> tuple[Callable[[], tuple[Tensor, Tensor]], Callable[[], object]]:
        q, k, v = self.sides(self.x.detach())
        settings = {
            "scale": self.dim**-0.5,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": None,
            "tiles": tiles,
        }

        def forward() -> tuple[Tensor, Tensor]:
            return spans.forward(q, k, v, self.table, **settings)

        return forward, lambda: spans.backward(self.grad, q, k, v, *forward(), self.table, **settings)


def milliseconds(step: Callable[[], object], repeats: int) -> float:
    for _ in range(2):
        step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(2_000_000)  # launches are ahead of the device
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def compile_some(
    share: list[tuple[tuple[int, int], str, Tile]], dim: int, window: int | None, softcap: float | None
) -> None:
    for heads, name, tile in share:
        case = Case.of([Span(0, 32), Span(32, 32, 0, 32)], heads, dim, window if window is None else 16, softcap)
        with contextlib.suppress(OutOfResources):
            case.calls(case.grad, torch.zeros(heads[0], 64, device="cuda"))[name](tile)


def compile_all(
    heads: list[tuple[int, int]], dim: int, window: int | None, softcap: float | None, workers: int
) -> None:
    jobs = [(h, name, tile) for h in heads for name, tiles in SETTINGS.items() for tile in tiles]
    context = multiprocessing.get_context("spawn")
    shares = [(jobs[i::workers], dim, window, softcap) for i in range(workers)]
    processes = [context.Process(target=compile_some, args=share) for share in shares]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def show(label: str, time_ms: float, flops: float, note: str = "") -> None:
    print(f"    {label:<28}{time_ms:9.3f} ms {flops / time_ms / 1e9:8.0f} TFLOP/s  {note}", flush=True)


def measure(case: Case, repeats: int) -> Tiles:
    out, lse = case.both(None)[0]()
    best: dict[str, Tile] = {}
    for name, call in case.calls(out, lse).items():
        found: dict[Tile, float] = {}
        for tile in SETTINGS[name]:
            try:
                found[tile] = milliseconds(lambda call=call, tile=tile: call(tile), repeats)  # type: ignore[misc]
            except OutOfResources as error:
                print(f"    {name:<10}{tuple(tile)!s:<18} does not fit: {error}")
        best[name] = min(found, key=lambda tile: found[tile])
        for tile, took in found.items():
            note = "best" if tile == best[name] else ""
            show(f"{name:<10}{tuple(tile)!s}", took, PRODUCTS[name] * case.flops, note)
    return Tiles(**best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="12/2,32/8")
    parser.add_argument("--dim", type=int, default=128, help="of a head")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--softcap", type=float)
    parser.add_argument("--window", type=int)
    parser.add_argument("--workers", type=int, default=12)
    args = parser.parse_args()
    start = time.monotonic()
    heads = [(int(a), int(b)) for a, b in (pair.split("/") for pair in args.heads.split(","))]
    compile_all(heads, args.dim, args.window, args.softcap, args.workers)
    print(f"{torch.cuda.get_device_name()}; compiled in {time.monotonic() - start:.0f} s")
    print("tiles: rows of queries, rows of keys, warps, stages")
    for pair, (name, row) in itertools.product(heads, rows()):
        case = Case.of(row, pair, args.dim, args.window, args.softcap)
        print(f"\n{name}, {len(row)} spans, heads {pair[0]}/{pair[1]}")
        best = measure(case, args.repeats)
        runs = {"kernels": case.both(best), "flash": case.flash()}
        for label, run in runs.items():
            if run is not None:
                show(f"{label}, forward", milliseconds(run[0], args.repeats), 2 * case.flops)
                show(f"{label}, with backward", milliseconds(run[1], args.repeats), PRODUCTS["all"] * case.flops)
    print(f"\nall of it took {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
