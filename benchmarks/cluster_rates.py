"""What the controller of a run can carry, on this machine: the measured half of docs/scale.md.

    python benchmarks/cluster_rates.py [--rounds 5] [--groups 64] [--samples 8] [--lengths 64 512 4096]
                                       [--megabytes 256]

    requests   frames of requests written to engines, prompts of 128 tokens
    answers    frames of answers read from engines, as the process that holds the loops does
    checks     frames of answers to verifier hosts, and of their verdicts
    rows       judged groups into advantages and weights, samples shared out, and into frames for the ranks of a trainer
    journal    rollouts into SQLite; bytes are those of its files
    loops      everything else of a rollout: issuing, episode, buffer, stages, metrics. It is a simulated run, so the
               fake engine is in it and tokenizer and verifier are not
    memory     weights published and loaded through memory, in full and as a delta of 0.4 % of the values, checksums
               included; bytes are those of all weights
    http       the same weights served by HTTP to one receiver, both ends in this process

Answers are filed by engines on a cluster (`kitae.store.columns`): the controller hears where they lie. "By value" is
what it is where they come to the controller, as from servers of other people. `all` adds up what the controller
receives, sends and keeps of a rollout.

All by processor seconds of one process, which other programs on the machine disturb less than the clock. Rounds go
through all of it by turns. Medians, and the lowest and highest of the rounds. The last line is what
`kitae simulate --scale` takes.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from training import prepared

from kitae.config.recipe import parse_config
from kitae.data.packing import pack
from kitae.engines.base import Request, Sampled, SamplingParams
from kitae.engines.process.engine_frames import kept, pack_request, pack_sampled, sampled_of
from kitae.store.columns import ColumnWriter, Filed, LazyColumn, StoredText
from kitae.store.journal import Journal
from kitae.study.simulate import Hardware, LogNormal, Schedule, Times, Work, simulate
from kitae.trainer.sample_wire import samples_to_wire
from kitae.types import Group, Message, Prompt, Rollout, Runs, Sample, Score, Segment
from kitae.verifiers.remote_pool import wired
from kitae.weights.transports import make_publisher, make_receiver
from kitae.workers.frames import pack_frame, read_frame

PROMPT = 128
CHARACTERS = 4  # of a token
RANKS = 8
CHANGED = 0.004  # share of the bf16 values that a step at a learning rate of 1e-6 changes


@dataclass(frozen=True)
class Load:
    """`Load(64, 8, 512, folder)`: 64 groups of 8 answers of 512 tokens, filed in a folder; None: by value."""

    groups: int
    samples: int
    length: int
    folder: Path | None

    @property
    def answers(self) -> int:
        return self.groups * self.samples

    @property
    def tokens(self) -> int:
        return self.answers * self.length

    def __str__(self) -> str:
        return f"{self.length} tokens" if self.folder else f"{self.length} tokens by value"


@dataclass(frozen=True)
class Found:
    """One measurement: `Found("answers", bytes=6.3e6, tokens=262144, rollouts=512, seconds=0.1)`."""

    what: str
    bytes: float
    tokens: int
    rollouts: int
    seconds: float


def cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def sampled(load: Load) -> Sampled:
    rng = np.random.default_rng(0)
    tokens = tuple(rng.integers(0, 150_000, load.length).tolist())
    found = Sampled(tokens, tuple((-rng.exponential(size=load.length)).tolist()), (7,) * load.length)
    if load.folder is None:
        return found
    place = asyncio.run(_file(load.folder, found))
    return kept(load.folder, ((place, 0, place.tokens),), Runs.of(found.versions))


async def _file(folder: Path, found: Sampled) -> Filed:
    return await ColumnWriter(folder, "engine-0").add(found.tokens, found.logprobs, text_of(len(found.tokens)))


def text_of(length: int) -> str:
    return "word" * (length * CHARACTERS // 4)


def answers(load: Load) -> Found:
    """The final frame alone: an engine also reports tokens on their way, by value the same bytes once more."""
    frames = pack_sampled({"done": 7, "finish": "stop"}, sampled(load)) * load.answers

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(frames)
        reader.feed_eof()
        while (frame := await read_frame(reader)) is not None:
            sampled_of(frame)

    return Found("answers", len(frames), load.tokens, load.answers, cpu(lambda: asyncio.run(read())))


def requests(load: Load) -> Found:
    request = Request("17/3", tuple(range(PROMPT)), SamplingParams(max_tokens=load.length), seed=1 << 62, share="17")
    size = len(pack_request(0, request)) * load.answers
    seconds = cpu(lambda: [pack_request(n, request) for n in range(load.answers)])
    return Found("requests", size, load.tokens, load.answers, seconds)


def said(load: Load, one: Sampled) -> str | StoredText:
    if load.folder is None or not isinstance(one.tokens, LazyColumn) or one.tokens.text is None:
        return text_of(load.length)
    return one.tokens.text


def checks(load: Load) -> Found:
    job = {"check": 7, "reference": "42", "contexts": [{"question": "how many?"}]}
    text = said(load, sampled(load))
    verdict = pack_frame({"done": 7, "score": asdict(Score(1.0))})
    size = (len(pack_frame({**job, "responses": [wired(text)]})) + len(verdict)) * load.answers
    seconds = cpu(lambda: [pack_frame({**job, "responses": [wired(text)]}) for _ in range(load.answers)])
    return Found("checks", size, load.tokens, load.answers, seconds)


def rollouts(load: Load, group: int, one: Sampled) -> tuple[Rollout, ...]:
    text = said(load, one)
    prompt, segment = tuple(range(group, group + PROMPT)), Segment("model", one.tokens, one.logprobs, one.versions)
    return tuple(
        Rollout.of(group, i, prompt, (segment,), "stop", text, Score(float(i % 2))) for i in range(load.samples)
    )


def framed(parts: list[list[Sample]]) -> int:
    """Bytes of the frames, one for each rank."""
    return sum(len(pack_frame(*samples_to_wire(parts[rank::RANKS]))) for rank in range(RANKS))


def rows(load: Load) -> Found:
    """From judged groups: advantages, weights, samples of each row, frames."""
    asked = Prompt("0", (Message("user", "how many?"),), "42")
    one = sampled(load)
    groups = [Group(g, asked, rollouts(load, g, one)) for g in range(load.groups)]
    sizes: list[int] = []

    def send() -> None:
        sizes.append(framed(pack(prepared(groups, load.length), 8192, multiple=RANKS)))

    seconds = cpu(send)
    return Found("rows", sizes[0], load.tokens, load.answers, seconds)


def journal(load: Load) -> Found:
    with TemporaryDirectory() as folder:
        store = Journal(Path(folder) / "journal.sqlite")
        one = sampled(load if load.folder is None else replace(load, folder=store.columns.folder))
        groups = [rollouts(load, g, one) for g in range(load.groups)]

        async def write() -> None:
            for group in groups:
                await asyncio.gather(*map(store.add_rollout, group))
                await asyncio.gather(*map(store.update_score, group))

        seconds = cpu(lambda: asyncio.run(write()))
        store.close()
        size = sum(path.stat().st_size for path in Path(folder).iterdir() if path.is_file())
    return Found("journal", size, load.tokens, load.answers, seconds)


def loops(load: Load) -> Found:
    """Three steps in all; lengths of 16, because the fakes take longer for more and the loops do not."""
    config = parse_config(
        {
            "data": {"task": "reverse"},
            "sampling": {"max_tokens": 16},
            "training": {"prompts_per_step": load.groups, "group_size": load.samples},
        }
    )
    work = Work(LogNormal(16, 16, 0.0), PROMPT)
    seconds = cpu(lambda: simulate(Schedule(config, Hardware(8, 0), Times(), work, steps=1)))
    return Found("loops", 0.0, 3 * load.answers * 16, 3 * load.answers, seconds)


def publishing(kind: str, megabytes: int) -> Iterator[Found]:
    """In full and as a delta. A first version reserves memory and does not count."""
    weights = {f"layer.{n}": torch.randn(2**23).to(torch.bfloat16) for n in range(max(1, megabytes // 16))}
    size = sum(w.nbytes for w in weights.values())
    parameters = {name: torch.empty_like(w) for name, w in weights.items()}
    with closing(make_publisher(kind, "delta")) as publisher:
        receiver = None
        for version, mode in enumerate(("first", "full", "delta")):
            for w in weights.values():
                w[:: round(1 / CHANGED)] += 1
            began = time.process_time()
            manifest = publisher.publish(version, weights, in_full=mode != "delta")
            published = time.process_time()
            receiver = receiver or make_receiver(publisher.address, parameters)
            assert not receiver.fetch(manifest)
            if mode != "first":
                yield Found(f"{kind}: publish {mode}", size, 0, 0, published - began)
                yield Found(f"{kind}: load {mode}", size, 0, 0, time.process_time() - published)
        assert receiver is not None
        receiver.close()


def measure(load: Load) -> Iterator[tuple[str, Found]]:
    """One round, each with the name of its line."""
    found = [work(load) for work in (requests, answers, checks, rows, journal)]
    yield from ((f"{load}: {one.what}", one) for one in found)
    total = (sum(one.bytes for one in found), load.tokens, load.answers, sum(one.seconds for one in found))
    yield f"{load}: all", Found("all", *total)


def measure_once(load: Load, megabytes: int) -> Iterator[tuple[str, Found]]:
    """What does not depend on lengths."""
    yield "loops", loops(load)
    for kind in ("memory", "http"):
        for found in publishing(kind, megabytes):
            yield found.what, found


def spread(values: list[float]) -> str:
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def show(name: str, found: list[Found]) -> str:
    first = found[0]
    each = f"{first.bytes / first.rollouts:,.0f}" if first.bytes and first.rollouts else ""
    rollout = f"{spread([f.seconds / f.rollouts * 1e6 for f in found])}" if first.rollouts else ""
    rate = spread([f.bytes / f.seconds / 1e6 for f in found]) if first.bytes else ""
    return f"| {name} | {each} | {rate} | {rollout} |"


def links(found: dict[str, list[Found]], load: Load) -> str:
    """Of answers that are filed, at one length: what the controller does for a rollout does not depend on it."""
    parts = [found[f"{load}: {what}"] for what in ("answers", "checks", "rows", "journal")]
    heard, checked, sent, written = (rounds[0].bytes / rounds[0].rollouts for rounds in parts)
    whole = (found["loops"], found[f"{load}: all"])
    names = {
        "pack": "memory: publish full",
        "compare": "memory: publish delta",
        "load": "memory: load full",
        "check": "memory: load delta",
        "serve": "http: load full",
    }
    rates = {key: median(f.bytes / f.seconds for f in found[name]) for key, name in names.items()}
    rates |= {"answer": heard + checked, "row": sent, "record": written}
    rates["rollout"] = sum(median(f.seconds / f.rollouts for f in rounds) for rounds in whole)
    return ",".join(f"{key}={rate:.2g}" for key, rate in rates.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 4096], help="of answers")
    parser.add_argument("--megabytes", type=int, default=256, help="of the weights that are published")
    a = parser.parse_args()
    found: dict[str, list[Found]] = {}
    with TemporaryDirectory() as folder:
        loads = [Load(a.groups, a.samples, n, where) for where in (Path(folder), None) for n in a.lengths]
        for _ in range(a.rounds):
            for work in (*(measure(load) for load in loads), measure_once(loads[0], a.megabytes)):
                for name, one in work:
                    found.setdefault(name, []).append(one)
    print(f"{a.groups} x {a.samples} answers, {a.rounds} rounds, median (lowest to highest)\n")
    print("| what | bytes a rollout | MB/s | µs a rollout |\n|---|---|---|---|")
    for name, rounds in found.items():
        print(show(name, rounds))
    print(f"\n--links {links(found, loads[0])}")


if __name__ == "__main__":
    main()
