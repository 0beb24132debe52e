"""How speed grows with batch, context and group size, and whether the bookkeeping stays flat with many rollouts.

    python benchmarks/growth.py [--device cpu] [--max-batch 256] [--max-context 4096] [--output docs/growth.png]
    python benchmarks/growth.py --device cuda --model qwen --max-batch 512 --max-context 32768 --tokens 64 --experts 128
    python benchmarks/growth.py --from docs/gpu_growth.json --output docs/gpu_growth.png   # draw it again

Tokens per second of the native engine: against the batch (1, 2, 4, … one-sample groups, 64-token prompts); against the
context (one group of 8, answers of 32 tokens behind prompts of growing length; the prompt's own time is not counted);
against the group size (as many sequences in all as the largest group, prompts of 256 tokens: what sharing a prompt is
worth). Then 10³, 10⁴, 10⁵ rollouts of 16 tokens through the scheduler, the buffer and the journal, without a model:
microseconds for each rollout, which must not grow; and 16 answers of 1,024 to 32,768 tokens, also through the stages of
the algorithm and the packing of rows: nanoseconds for each token, which must not grow either. Prints tables and draws
one PNG. With `--experts`, 512 sequences of 4 layers of the shape of Qwen3-30B-A3B as well, with 8, 16, … experts, of
which a token takes 8. Dashed is what an H200 allows (`gpu_rollouts.py`).

`--model`: a short name, a folder or a hub id; `qwen` is a random model of the shape of Qwen2.5-1.5B.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_rollouts import Workload, floor, mixture_policy, qwen_policy
from training import prepared

from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.engines.native.page_cache import PagePool
from kitae.engines.native.scheduler import Scheduler
from kitae.engines.native.sequence import Decoding
from kitae.models.config import ModelConfig
from kitae.models.fuse import fuse
from kitae.models.load import load_policy, pick_device
from kitae.observe.plots import load_pyplot
from kitae.rl.buffer import Buffer, SlotResult
from kitae.store.journal import Journal
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import pack_rows
from kitae.types import Group, Message, Prompt, Rollout, Score, Segment

Curve = dict[int, float]


def doubled(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


class Speed:
    """Tokens per second of one engine."""

    def __init__(self, engine: NativeEngine, tokens: int, repeats: int) -> None:
        self.engine = engine
        self.tokens = tokens
        self.repeats = repeats
        self._runs = 0

    async def by_batch(self, largest: int) -> Curve:
        return {n: await self._rate(groups=n, size=1, prompt=64) for n in doubled(1, largest)}

    async def by_context(self, longest: int) -> Curve:
        found = {}
        for n in doubled(128, longest):
            prompt = n - self.tokens
            alone = await self._seconds(groups=1, size=8, prompt=prompt, tokens=1)
            found[n] = 8 * (self.tokens - 1) / max(1e-9, await self._seconds(1, 8, prompt, self.tokens) - alone)
        return found

    def context_limit(self, longest: int) -> Curve:
        found = {}
        for n in doubled(128, longest):
            prompt = (0,) * (n - self.tokens)
            work: list[Workload] = [[(0, prompt, tokens)] * 8 for tokens in (self.tokens, 1)]
            whole, alone = (floor(w, self.engine.policy) for w in work)
            found[n] = 8 * (self.tokens - 1) / (whole - alone)
        return found

    async def by_group(self, largest: int) -> Curve:
        return {n: await self._rate(groups=largest // n, size=n, prompt=256) for n in doubled(1, largest)}

    async def _rate(self, groups: int, size: int, prompt: int) -> float:
        return groups * size * self.tokens / await self._seconds(groups, size, prompt, self.tokens)

    async def _seconds(self, groups: int, size: int, prompt: int, tokens: int) -> float:
        """The best of several runs, after one that builds and warms what it needs."""
        return min([await self._once(groups, size, prompt, tokens) for _ in range(self.repeats + 1)][1:])

    async def _once(self, groups: int, size: int, prompt: int, tokens: int) -> float:
        self._runs += 1
        generator = torch.Generator().manual_seed(self._runs)
        texts = torch.randint(100, self.engine.policy.vocabulary, (groups, prompt), generator=generator).tolist()
        sampling = SamplingParams(max_tokens=tokens)
        requests = [
            Request(f"{self._runs}/{g}/{i}", tuple(text), sampling, seed=g * 1000 + i, share=f"{self._runs}/{g}")
            for g, text in enumerate(texts)
            for i in range(size)
        ]
        began = time.perf_counter()
        done = await asyncio.gather(*(self.engine.generate(r) for r in requests))
        seconds = time.perf_counter() - began
        assert all(len(c.tokens) == tokens for c in done)
        return seconds


TOKENS, GROUP = 16, 8  # of a rollout without a model; rollouts of a prompt


def schedule(rollouts: int, tokens: int = TOKENS) -> float:
    """Seconds to admit, grow and remove that many sequences, all of them waiting from the start."""
    scheduler = Scheduler(PagePool(4096 + tokens * GROUP), 16, max_batch=256, prefill_tokens=8192)
    finished: list[Completion | Exception] = []
    sampling = SamplingParams(max_tokens=tokens)
    began = time.perf_counter()
    for i in range(rollouts):
        request = Request(str(i), tuple(range(i // GROUP, i // GROUP + 40)), sampling, i, share=str(i // GROUP))
        scheduler.add(Decoding(request, i, tokens, finished.append))
    while not scheduler.idle:
        admission = scheduler.admit()
        if not admission.any:
            scheduler.grow()
        for sequence in admission.fresh if admission.any else list(scheduler.running):
            sequence.tokens.append(1)
            if len(sequence.tokens) == tokens:
                scheduler.remove(sequence)
                sequence.done(sequence.completion("length"))
    assert len(finished) == rollouts
    return time.perf_counter() - began


def _rollout(group: int, sample: int, tokens: int = TOKENS) -> Rollout:
    segment = Segment("model", (1,) * tokens, (-1.0,) * tokens, (0,) * tokens)
    return Rollout.of(group, sample, tuple(range(40)), (segment,), "length", "a" * tokens, Score(float(sample % 2)))


async def pass_buffer(rollouts: int) -> float:
    """Seconds to issue, fill and take the slots of that many rollouts; the batch grows with them, to 16 steps."""
    groups = rollouts // GROUP
    size = max(1, groups // 16)
    buffer = Buffer(size, max_staleness=1)
    nothing = SlotResult(Group(0, Prompt("0", (), ""), ()), ())

    async def produce() -> None:
        for number in range(groups // size * size):
            buffer.put(await buffer.reserve(number), nothing)
            if number % 8 == 0:
                await asyncio.sleep(0)  # as real rollouts do: the consumer looks in between

    async def consume() -> None:
        for step in range(groups // size):
            assert len(await buffer.take()) == size
            buffer.train(step + 1)
            buffer.release(step + 1)

    began = time.perf_counter()
    await asyncio.gather(produce(), consume())
    return time.perf_counter() - began


async def write_journal(rollouts: int, tokens: int = TOKENS) -> float:
    """Seconds to journal prompts, rollouts and fates, and to read back what is pending."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal.sqlite")
        prompt = Prompt("0", (Message("user", "how many?"),), "42")
        groups = rollouts // GROUP
        began = time.perf_counter()
        for first in range(0, groups, 64):
            batch = range(first, min(groups, first + 64))
            await asyncio.gather(*(journal.add_prompt(g, prompt, 0, g) for g in batch))
            await asyncio.gather(*(journal.add_rollout(_rollout(g, i, tokens)) for g in batch for i in range(GROUP)))
            await journal.add_fates(first // 64, list(batch)[:-1], [])
        waiting = journal.pending()
        assert len(waiting) == -(-groups // 64) and len(journal.rollouts(waiting[-1].groups[0])) == GROUP
        seconds = time.perf_counter() - began
        journal.close()
    return seconds


def bookkeeping(largest: int) -> dict[str, Curve]:
    """Microseconds for each rollout."""
    sizes = [n for n in (1_000, 10_000, 100_000, 1_000_000) if n <= largest]
    parts = {
        "scheduler": schedule,
        "buffer": lambda n: asyncio.run(pass_buffer(n)),
        "journal": lambda n: asyncio.run(write_journal(n)),
    }
    return {name: {n: run(n) / n * 1e6 for n in sizes} for name, run in parts.items() if sizes}


def prepare(rollouts: int, tokens: int) -> float:
    """Seconds from groups to what the trainer computes: advantages, weights of tokens, rows."""
    prompt = Prompt("0", (Message("user", "how many?"),), "42")
    groups = [Group(g, prompt, tuple(_rollout(g, i, tokens) for i in range(GROUP))) for g in range(rollouts // GROUP)]
    training = TrainingConfig(token_budget=4 * tokens)
    began = time.perf_counter()
    parts, _ = pack_rows(prepared(groups, tokens), training, torch.device("cpu"), torch.float32)
    seconds = time.perf_counter() - began
    assert sum(map(len, parts)) == rollouts
    return seconds


def long_answers(longest: int, rollouts: int = 2 * GROUP) -> dict[str, Curve]:
    """Nanoseconds for each token of answers, the best of three."""
    parts = {
        "scheduler": schedule,
        "journal": lambda n, tokens: asyncio.run(write_journal(n, tokens)),
        "stages and packing": prepare,
    }
    return {
        name: {n: min(run(rollouts, n) for _ in range(3)) / (rollouts * n) * 1e9 for n in doubled(1024, longest)}
        for name, run in parts.items()
    }


LIMIT = ", limit"  # of the name of a curve: what the hardware allows


async def by_experts(largest: int, tokens: int, memory_gb: float) -> dict[str, Curve]:
    """512 sequences in groups of 8."""
    rates: Curve = {}
    limits: Curve = {}
    work: Workload = [(i // 8, (0,) * 64, tokens) for i in range(512)]
    for n in doubled(8, largest):
        policy = mixture_policy(4, experts=n)
        fuse(policy.model, policy.device, policy.dtype)
        engine = NativeEngine(policy, EngineConfig(memory_gb=memory_gb, max_batch=512, prefill_tokens=4096))
        rates[n] = 512 * tokens / await Speed(engine, tokens, 2)._seconds(64, 8, 64, tokens)
        limits[n] = 512 * tokens / floor(work, policy)
        await engine.close()
        del engine, policy
        torch.cuda.empty_cache()
    return {"experts": rates, "experts" + LIMIT: limits}


async def speeds(arguments: argparse.Namespace) -> dict[str, Curve]:
    device = pick_device(arguments.device)
    policy = (
        qwen_policy(str(device))
        if arguments.model == "qwen"
        else load_policy(ModelConfig(path=arguments.model, device=str(device)))
    )
    config = EngineConfig(
        memory_gb=arguments.memory_gb, max_batch=max(arguments.max_batch, 64), prefill_tokens=4096, speculation=False
    )  # fmt: skip
    engine = NativeEngine(policy, config)
    speed = Speed(engine, arguments.tokens, arguments.repeats)
    context = min(arguments.max_context, policy.max_context)
    found = {"batch": await speed.by_batch(arguments.max_batch)}
    print_table("tok/s against the batch", found["batch"])
    found["context"] = await speed.by_context(context)
    print_table("tok/s against the context, 8 sequences", found["context"])
    if device.type == "cuda":
        found["context" + LIMIT] = speed.context_limit(context)
    found["group size"] = await speed.by_group(arguments.max_group)
    print_table(f"tok/s against the group size, {arguments.max_group} sequences", found["group size"])
    await engine.close()
    if arguments.experts:
        del engine, policy, speed
        torch.cuda.empty_cache()
        found |= await by_experts(arguments.experts, arguments.tokens, arguments.memory_gb)
        for name in ("experts", "experts" + LIMIT):
            print_table(f"tok/s of 512 sequences against the number of {name}", found[name])
    return found


def print_table(title: str, curve: Curve) -> None:
    print(f"\n{title}\n| {' | '.join(f'{n:,}' for n in curve)} |\n|{'---|' * len(curve)}")
    print(f"| {' | '.join(f'{value:,.0f}' for value in curve.values())} |", flush=True)


def draw(rates: dict[str, Curve], costs: dict[str, Curve], title: str, target: Path) -> None:
    pyplot = load_pyplot()
    plain = {name: curve for name, curve in rates.items() if not name.endswith(LIMIT)}
    figure, axes = pyplot.subplots(1, len(plain) + bool(costs), figsize=(14, 3.5), constrained_layout=True)
    for axis, (name, curve) in zip(axes, plain.items(), strict=False):
        axis.plot(list(curve), list(curve.values()), "o-")
        if limit := rates.get(name + LIMIT):
            axis.plot(list(limit), list(limit.values()), "--", color="0.6")
        axis.set(xscale="log", xlabel=name, title=f"tokens per second, {name}")
        axis.set_xticks(list(curve)[::2], [f"{x:,}" for x in list(curve)[::2]])
    for name, curve in costs.items():
        axes[-1].plot(list(curve), list(curve.values()), "o-", label=name)
        axes[-1].set(xscale="log", xlabel="rollouts", title="bookkeeping, µs for a rollout")
        axes[-1].legend()
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--max-context", type=int, default=4096)
    parser.add_argument("--max-group", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--memory-gb", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=100_000, help="Most rollouts of the bookkeeping part; 0: none.")
    parser.add_argument("--max-answer", type=int, default=32768, help="Longest answer of that part; 0: none.")
    parser.add_argument("--experts", type=int, default=0, help="Most experts of a mixture; on a GPU.")
    parser.add_argument("--from", dest="kept", type=Path, metavar="JSON", help="Draw what --json has kept.")
    parser.add_argument("--no-speed", action="store_true", help="Only the bookkeeping.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--output", type=Path, default=Path("growth.png"))
    arguments = parser.parse_args()
    if arguments.kept:
        kept = json.loads(arguments.kept.read_text())
        curves = {name: {int(n): value for n, value in curve.items()} for name, curve in kept["rates"].items()}
        draw(curves, {}, kept["title"], arguments.output)
        return
    costs = bookkeeping(arguments.rollouts)
    for name, curve in costs.items():
        print_table(f"{name}: µs for a rollout, against the number of rollouts", curve)
    for name, curve in long_answers(arguments.max_answer).items():
        print_table(f"{name}: ns for a token, against the length of answers", curve)
    rates = {} if arguments.no_speed else asyncio.run(speeds(arguments))
    device = pick_device(arguments.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU cores"
    title = f"{arguments.model} on {where}"
    if arguments.json:
        arguments.json.write_text(json.dumps({"title": title, "rates": rates, "bookkeeping": costs}, indent=1) + "\n")
    if rates:
        draw(rates, costs, title, arguments.output)


if __name__ == "__main__":
    main()
