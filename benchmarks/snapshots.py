"""What a copy of unfinished responses into the journal costs: how long the event loop stands still, and bytes written.

    python benchmarks/snapshots.py [--responses 512] [--tokens 16000] [--grown 1000]

Each response has so many tokens, which the journal has already, and has grown by `grown` since the last copy.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kitae.engines.base import Request, SamplingParams
from kitae.engines.native.engine import NativeEngine
from kitae.engines.native.sequence import Decoding
from kitae.envs.base import SingleTurn
from kitae.envs.episode import Episode
from kitae.envs.rollouts import Episodes
from kitae.store.journal import Journal
from kitae.types import Prompt, Rollout


def in_flight(count: int, tokens: int) -> list[Decoding]:
    def one(i: int) -> Decoding:
        request = Request(f"train/{i // 8}/{i % 8}/0", (1,) * 200, SamplingParams(max_tokens=10**6), i)
        return Decoding(request, i, 10**6, lambda _: None, [7] * tokens, [-0.5] * tokens, [3] * tokens)

    return [one(i) for i in range(count)]


async def measure(count: int, tokens: int, grown: int, folder: Path) -> None:
    sequences = in_flight(count, tokens)
    stand_in = SimpleNamespace(in_flight=lambda: sequences)  # the engine's own function, without a model
    engine = SimpleNamespace(progress=lambda known: NativeEngine.progress(cast(NativeEngine, stand_in), known))
    unused = cast(Any, None)
    episodes = Episodes(cast(Any, engine), unused, unused, unused, SamplingParams(), 0)
    for i, sequence in enumerate(sequences):
        prompt = Prompt("p", (), None)
        begun = Rollout.of(i // 8, i % 8, (1,) * 200, (), "suspended", "")
        episode = Episode(episodes, SingleTurn(prompt), i // 8, i % 8, prompt, begun)
        episode.asking = sequence.request.id
        episodes.running.episodes[episode.id] = episode
    journal = Journal(folder / "journal.sqlite")
    for copy in ("all of them", f"{grown:,} tokens more"):
        before = sum(p.stat().st_size for p in folder.iterdir())
        began = time.perf_counter()
        written = asyncio.ensure_future(journal.extend_suspended(*episodes.grown(32)))
        await asyncio.sleep(0)  # here the rows are made; the writing is another thread's
        stood = time.perf_counter() - began
        await written
        took = time.perf_counter() - began
        size = sum(p.stat().st_size for p in folder.iterdir()) - before
        print(f"{copy:20} loop stood {stood:6.3f} s, written after {took:6.3f} s, {size / 1e6:8.1f} MB")
        for s in sequences:
            s.tokens += [7] * grown
            s.logprobs += [-0.5] * grown
            s.versions += [3] * grown
    journal.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--grown", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(arguments.responses, arguments.tokens, arguments.grown, Path(folder)))


if __name__ == "__main__":
    main()
