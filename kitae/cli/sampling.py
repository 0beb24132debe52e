"""`kitae sample`."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kitae.errors import Interrupted

if TYPE_CHECKING:
    from kitae.offline.sampling import SampleWatcher, Tally


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the command line says of what is kept; `Selection` says what is right."""

    keep: str
    min_score: float | None
    min_margin: float
    match_lengths: bool
    truncated: bool


def sample(
    target: str,
    overrides: list[str],
    chosen: Chosen,
    output: Path,
    n: int | None,
    prompts: int | None,
    first: int,
    model: str | None,
    as_json: bool,
) -> None:
    from kitae import api
    from kitae.offline.answer_selection import Selection

    select = Selection(**asdict(chosen))
    with watching() as watcher:
        try:
            tally = api.sample_to_file(
                target,
                output,
                keep=select,
                prompts=prompts,
                n=n,
                first=first,
                model=model,
                overrides=overrides,
                watcher=watcher,
            )
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the same command goes on from here", signal.SIGINT) from None
    if as_json:
        print(json.dumps({"file": str(output), **tally.as_json()}))
    else:
        print(described(tally))
        print(f"written      {output}: {tally.rows} rows")


def described(tally: "Tally") -> str:
    mean = "–" if tally.score is None else f"{tally.score:.3f}"
    lines = [f"answers      {tally.answers} to {tally.prompts} prompts, mean score {mean}, {tally.tokens:,} tokens"]
    out = [
        (tally.errors, "could not be judged and are left out"),
        (tally.truncated, "were cut off at sampling.max_tokens"),
        (tally.empty, "say nothing"),
    ]
    lines += [f"             {count} {what}" for count, what in out if count]
    if tally.first_error:
        lines.append(f"             the first error: {tally.first_error}")
    if tally.impossible:
        lines.append(f"             {tally.impossible} prompts could not be asked")
    lines.append(f"kept         {tally.rows} rows; nothing of {tally.without} prompts")
    return "\n".join(lines)


@contextmanager
def watching() -> "Iterator[SampleWatcher]":
    """Shows on the error output how far it is."""
    from rich.console import Console

    from kitae.offline.sampling import SampleWatcher

    console = Console(stderr=True)
    with console.status("preparing") as status:

        class OnScreen(SampleWatcher):
            def note(self, text: str) -> None:
                console.print(text, markup=False, highlight=False)

            def sampled(self, done: int, total: int) -> None:
                status.update(f"{done} of {total} prompts")
                if not sys.stderr.isatty() and done * 10 // total > (done - 1) * 10 // total:
                    self.note(f"{done} of {total} prompts")

        yield OnScreen()
