"""How fast `kitae ui` answers: seconds to the first page, and milliseconds of every page on a large journal.

Both as a clock has them and as the processor spent them: on a machine with other work to do, only the second is a
property of the program.

    python benchmarks/ui.py [--rollouts 100000] [--folder DIR]
    python benchmarks/ui.py --first-page [--starts 9]       only the first page, on a small journal

Makes a run folder with a synthetic journal once (about 0.7 GB; DIR keeps it for the next time), written by the class
that real runs use, then starts the program as a user would and asks it over HTTP. Also: what the index that the pages
need costs the writer, and the size of the page itself.
"""

import argparse
import asyncio
import json
import random
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import httpx

from kitae.config.recipe import parse_config
from kitae.store.journal import BRIEF, Journal
from kitae.types import Message, Prompt, Rollout, Score, Segment

STATIC = Path(__file__).parent.parent / "kitae" / "ui" / "static"
GROUP, PROMPTS, PER_STEP = 8, 4000, 16
WORDS = ("the", "sum", "of", "these", "two", "numbers", "is", "equal", "to", "so", "we", "carry", "one", "below")


def make_run(folder: Path, rollouts: int) -> Path:
    """A run of `rollouts` samples, about 300 tokens each; a hundredth of them could not be judged."""
    run = folder / f"synthetic-{rollouts}"
    if (run / "done").exists():
        return run
    run.mkdir(parents=True, exist_ok=True)
    config = parse_config({"data": {"task": "reverse"}, "run": {"name": "synthetic"}, "model": {"path": "tiny"}})
    (run / "config.json").write_text(config.to_json())
    journal = Journal(run / "journal.sqlite")
    groups = rollouts // GROUP
    asyncio.run(_fill(journal, groups))
    journal.close()
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, groups // PER_STEP + 1):
            row = {f"metric/{i}": random.random() for i in range(60)}
            row |= {"reward": step / groups * PER_STEP, "step_seconds": 3.0, "train_seconds": 2.0, "wait_seconds": 1.0}
            file.write(json.dumps({"kind": "step", "step": step, **row}) + "\n")
    with (run / "timeline.jsonl").open("w") as file:
        for group in range(groups):
            step, start = group // PER_STEP + 1, group / PER_STEP * 3
            for part, length in (("generate", 2.5), ("verify", 0.1), ("train", 1.0)):
                file.write(json.dumps({"part": part, "step": step, "start": start, "end": start + length}) + "\n")
    (run / "done").touch()
    return run


async def _fill(journal: Journal, groups: int) -> None:
    rng = random.Random(0)
    await journal.begin("{}", [("start", "step 0")])
    for group in range(groups):
        prompt = f"reverse/train/{rng.randrange(PROMPTS)}"
        message = Message("user", f"Reverse {group}, {group + 1}, {group + 2}. " + "Think about it first. " * 20)
        await journal.add_prompt(group, Prompt(prompt, (message,), "3, 2, 1"), group // PER_STEP, group)
        await asyncio.gather(*(journal.add_rollout(_rollout(rng, group, index)) for index in range(GROUP)))
        if group % PER_STEP == PER_STEP - 1:
            await journal.add_fates(group // PER_STEP + 1, range(group - PER_STEP + 1, group + 1), [])
    await journal.add_event("finished", "")


def _rollout(rng: random.Random, group: int, index: int) -> Rollout:
    length = rng.randrange(100, 500)
    tokens = tuple(rng.choices(range(250), k=length))
    segment = Segment("model", tokens, tuple(-rng.random() for _ in tokens), (group // PER_STEP,) * length)
    score = Score(float(rng.random() < 0.4), {"exact": 1.0}) if rng.random() > 0.01 else Score.error(f"exit {index}")
    text = " ".join(rng.choices(WORDS, k=length * 3 // 4)) + f" answer-{group}-{index}"
    finish = "stop" if length < 450 else "length"
    return Rollout.of(group, index, tuple(range(100)), (segment,), finish, text, score)


def questions(groups: int) -> dict[str, str]:
    """By name, what a page asks for."""
    middle = groups // 2
    return {
        "runs": "/api/runs",
        "run": "/api/runs/{run}",
        "curves (5 metrics)": "/api/runs/{run}/series?names=reward,metric/1,metric/2,metric/3,metric/4",
        "rollouts: newest": "/api/runs/{run}/rollouts",
        "rollouts: page in the middle": f"/api/runs/{{run}}/rollouts?after=0.0_{middle}_3_{middle * GROUP}",
        "rollouts: one step": "/api/runs/{run}/rollouts?step=40",
        "rollouts: best first": "/api/runs/{run}/rollouts?order=best",
        "rollouts: worst first, page in the middle": f"/api/runs/{{run}}/rollouts?order=worst&after=0.0_{middle}_3_1",
        "rollouts: longest first": "/api/runs/{run}/rollouts?order=longest",
        "rollouts: length and reward": "/api/runs/{run}/rollouts?length_min=200&reward_max=0.5&order=longest",
        "rollouts: cut off": "/api/runs/{run}/rollouts?finish=length",
        "rollouts: errors": "/api/runs/{run}/rollouts?verdict=error",
        "rollouts: text, common": "/api/runs/{run}/rollouts?text=carry",
        "rollouts: text, found nowhere (a piece)": "/api/runs/{run}/rollouts?text=nowhere-to-be-found",
        "rollouts: text, worst first (a piece)": "/api/runs/{run}/rollouts?text=nowhere-to-be-found&order=worst",
        "group": f"/api/runs/{{run}}/groups/{middle}",
        "tokens of a sample": f"/api/runs/{{run}}/groups/{middle}/tokens/3",
        "prompts": "/api/runs/{run}/prompts",
        "prompts: flipping": "/api/runs/{run}/prompts?kind=flipping",
        "errors": "/api/runs/{run}/errors",
        "timeline": "/api/runs/{run}/timeline",
        "events and console": "/api/runs/{run}/console",
    }


def cpu_seconds(process: int) -> float:
    """What all threads of a process have spent so far."""
    spent = (path.read_text().split()[0] for path in Path(f"/proc/{process}/task").glob("*/schedstat"))
    return sum(map(int, spent)) / 1e9


def measure_pages(
    client: httpx.Client, process: int, run: str, groups: int, times: int = 9
) -> dict[str, tuple[float, float, float]]:
    """Milliseconds: the median, the slowest (the first answer included), and the processor's for one."""
    found = {}
    for name, path in questions(groups).items():
        taken, spent = [], cpu_seconds(process)
        for _ in range(times):
            begin = time.perf_counter()
            client.get(path.format(run=run)).raise_for_status()
            taken.append(1000 * (time.perf_counter() - begin))
        found[name] = median(taken), max(taken), 1000 * (cpu_seconds(process) - spent) / times
    return found


def start(folder: Path) -> tuple[subprocess.Popen[str], str, float]:
    """The program, its address, and the seconds until the first page and the list of runs were here."""
    begin = time.perf_counter()
    program = [sys.executable, "-c", "from kitae.cli.main import run; run()", "ui", str(folder), "--port", "0"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = ""
    for line in process.stdout:
        if found := re.search(r"http://\S+", line):
            address = found[0].rstrip("/")
            break
    with httpx.Client(base_url=address) as client:
        page = client.get("/").raise_for_status().text
        for asset in re.findall(r'(?:src|href)="(/[^"]+)"', page):
            client.get(asset).raise_for_status()
        client.get("/api/runs").raise_for_status()
    return process, address, time.perf_counter() - begin


def first_page(folder: Path, count: int) -> None:
    """Seconds from the command to the first page with the list of runs, and how many of them the processor worked."""
    taken, spent = [], []
    for _ in range(count):
        process, _, seconds = start(folder)
        taken.append(seconds)
        spent.append(cpu_seconds(process.pid))
        process.terminate()
        process.wait()
    print(
        f"first page with the list of runs, {count} starts: median {median(taken):.2f} s ({min(taken):.2f} to "
        f"{max(taken):.2f}), processor {median(spent):.2f} s ({min(spent):.2f} to {max(spent):.2f})"
    )


def index_cost(count: int = 4000) -> tuple[float, float]:
    """Microseconds to write a rollout without and with the index."""

    async def write(journal: Journal, rollouts: Sequence[Rollout]) -> float:
        begin = time.perf_counter()
        for first in range(0, len(rollouts), 64):
            await asyncio.gather(*(journal.add_rollout(r) for r in rollouts[first : first + 64]))
        return 1e6 * (time.perf_counter() - begin) / len(rollouts)

    rng = random.Random(1)
    rollouts = [_rollout(rng, group, index) for group in range(count // GROUP) for index in range(GROUP)]
    taken: dict[bool, list[float]] = {False: [], True: []}
    for indexed in (False, True) * 3:
        with tempfile.TemporaryDirectory() as folder:
            journal = Journal(Path(folder) / "journal.sqlite")
            if not indexed:
                with sqlite3.connect(journal.path) as db:
                    db.execute(f"DROP INDEX {BRIEF}")
            taken[indexed].append(asyncio.run(write(journal, rollouts)))
            journal.close()
    return min(taken[False]), min(taken[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "kitae-ui-benchmark")
    parser.add_argument("--first-page", action="store_true", help="measure nothing else")
    parser.add_argument("--starts", type=int, default=5)
    options = parser.parse_args()
    if options.first_page:
        with tempfile.TemporaryDirectory() as folder:
            make_run(Path(folder), 800)
            first_page(Path(folder), options.starts)
        return
    begin = time.perf_counter()
    run = make_run(options.folder, options.rollouts)
    print(
        f"journal: {(run / 'journal.sqlite').stat().st_size / 1e6:.0f} MB, {time.perf_counter() - begin:.0f} s to make"
    )
    sizes = [path.stat().st_size for path in STATIC.rglob("*") if path.is_file()]
    print(f"bundle: {sum(sizes) / 1000:.1f} KB in {len(sizes)} files")
    first_page(options.folder, options.starts)
    process, address, _ = start(options.folder)
    try:
        with httpx.Client(base_url=address, timeout=60) as client:
            pages = measure_pages(client, process.pid, run.name, options.rollouts // GROUP)
            for name, (usual, most, processor) in pages.items():
                print(f"{name:42} {usual:7.1f} ms   slowest {most:7.1f} ms   processor {processor:7.1f} ms")
    finally:
        process.terminate()
        process.wait()
    plain, indexed = index_cost()
    print(f"writing a rollout: {plain:.0f} µs without the index, {indexed:.0f} µs with it")


if __name__ == "__main__":
    main()
