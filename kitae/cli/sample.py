"""`kitae sample`: answers to a recipe's prompts, sampled and verified, as a file to train on."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kitae.cli.arguments import Overrides
from kitae.errors import Interrupted
from kitae.observe.plain_output import terminal_of, visible

if TYPE_CHECKING:
    from kitae.offline.sampling import SampleWatcher, Tally


def sample(
    target: Annotated[
        str, typer.Argument(help="A recipe (its untrained model), or a run (its trained one).", metavar="RECIPE-OR-RUN")
    ],
    overrides: Overrides = None,
    keep: Annotated[
        str, typer.Option(help="Of each prompt: its best answer, all correct ones, all, or pairs of best and worst.")
    ] = "correct",
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSONL file to write.")] = Path("samples.jsonl"),
    n: Annotated[
        int | None, typer.Option("--n", min=1, help="Answers to each prompt; default: training.group_size.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts to ask; default: all of a file.")] = None,
    first: Annotated[int, typer.Option(min=0, help="Prompts of the data to pass over.")] = 0,
    model: Annotated[str | None, typer.Option(help="Another model: a folder, a run, a hub id or a short name.")] = None,
    min_score: Annotated[
        float | None, typer.Option(help="Least score of an example; default: 1 for correct, else any.")
    ] = None,
    min_margin: Annotated[float, typer.Option(min=0, help="Least difference of scores in a pair.")] = 0.0,
    match_lengths: Annotated[
        bool, typer.Option("--match-lengths", help="Of equally good answers, pair those of similar length.")
    ] = False,
    truncated: Annotated[
        bool, typer.Option("--truncated", help="Keep answers that were cut off at sampling.max_tokens too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The counts as one line of JSON, and nothing else.")] = False,
) -> None:
    """Sample and verify answers, as data to train on.

    If it is killed, the same command goes on from there.
    """
    from kitae import api
    from kitae.offline.answer_selection import Selection

    select = Selection(keep, min_score, min_margin, match_lengths, truncated)  # type: ignore[arg-type]  # it says which
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
                overrides=overrides or [],
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

    console = Console(file=terminal_of(sys.stderr))
    with console.status("preparing") as status:

        class OnScreen(SampleWatcher):
            def note(self, text: str) -> None:
                console.print(visible(text), markup=False, highlight=False)

            def sampled(self, done: int, total: int) -> None:
                status.update(f"{done} of {total} prompts")
                if not sys.stderr.isatty() and done * 10 // total > (done - 1) * 10 // total:
                    self.note(f"{done} of {total} prompts")

        yield OnScreen()
