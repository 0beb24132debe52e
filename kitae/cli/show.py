"""`kitae show`: sampled answers, by the same filter as the page of rollouts in `kitae ui`.

On a terminal, long output goes through a pager, as much of it as the reader asks for.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kitae.cli.arguments import Run
from kitae.errors import KitaeError, StoreError
from kitae.observe.plain_output import terminal_of, visible
from kitae.store.journal import Journal
from kitae.types import GREEDY
from kitae.ui import samples
from kitae.ui.queries import RolloutFilter, all_rollouts, count_groups
from kitae.ui.records import GroupView, SampleView

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kitae.types import Group


_FEW = 8  # samples, where neither a pager nor a program reads them


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for: `Asked(RolloutFilter(text="sum"), one_per_prompt=True, limit=20)`.

    limit: None is all of them for a pager or a program, else a few.
    """

    filter: RolloutFilter
    one_per_prompt: bool = False
    limit: int | None = None


def show(
    run: Run,
    step: Annotated[
        int | None, typer.Option(help="Only this step; default: the last, unless another option chooses.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first, over all steps.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first, over all steps.")] = False,
    order: Annotated[str | None, typer.Option(help="newest, oldest, best, worst, longest or shortest first.")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Answers that could not be judged.")] = False,
    min_reward: Annotated[float | None, typer.Option(help="Least reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Highest reward.")] = None,
    min_tokens: Annotated[int | None, typer.Option(min=0, help="Least length, in tokens after the prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=0, help="Greatest length.")] = None,
    finish: Annotated[str, typer.Option(help="How the answer ended: stop, length (cut off) or abort.")] = "",
    text: Annotated[str, typer.Option(help="Words in prompt, answer or verdict; capitals do not matter.")] = "",
    prompt: Annotated[str, typer.Option(help="The id of a prompt: all its samples, of all steps.")] = "",
    one_per_prompt: Annotated[
        bool, typer.Option("--one-per-prompt", help="Only the first of each prompt's samples in this order.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="How many samples; default: all in a pager or as JSON, else 8.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, and nothing else.")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Who worked when, as a PNG, and for how long.")] = False,
) -> None:
    """Show sampled answers with their rewards.

    Of the last step, unless an option says otherwise; or the timeline of the run. On a terminal they go through $PAGER,
    or less.
    """
    if timeline:
        _draw_timeline(run)
        return
    wanted = RolloutFilter(
        step=step,
        reward_min=min_reward,
        reward_max=max_reward,
        length_min=min_tokens,
        length_max=max_tokens,
        finish=finish,
        verdict="error" if errors else "",
        prompt=prompt,
        text=text,
        order=order or ("best" if best else "worst" if worst else "newest"),
    )
    show_samples(run, Asked(wanted, one_per_prompt, limit), as_json)


def show_samples(run: Path, asked: Asked, as_json: bool) -> None:
    journal = _journal(run)
    try:
        wanted = _resolved(run, journal, asked.filter)
        found = _found(run, wanted, asked.one_per_prompt)
        advantages = _Advantages(run, journal)
        command = None if as_json else pager()
        limit = asked.limit or (None if as_json or command else _FEW)
        if as_json:
            for one in _first(found, limit):
                print(json.dumps(_as_json(one, advantages), ensure_ascii=False))
        else:
            show_all(_pieces(run, replace(asked, filter=wanted, limit=limit), found, advantages), command)
    finally:
        journal.close()


def _draw_timeline(run: Path) -> None:
    from kitae.observe.timeline import busy_shares, draw, read

    picture = draw(run)
    for part, share in busy_shares(read(run)).items():
        print(f"{part:10} at work {share:6.1%} of the time")
    print(picture)


@dataclass(frozen=True, slots=True)
class _One:
    """A sample, its group, and how many there are."""

    group: GroupView
    sample: SampleView
    total: int


def _resolved(run: Path, journal: Journal, wanted: RolloutFilter) -> RolloutFilter:
    """Of the last step, where nothing else is asked for. What was skipped is never shown."""
    last = journal.last_step()
    errors = wanted.verdict == "error"
    if not last and not (errors and journal.counts()["rollouts"]):
        _refuse_other_kinds(run)
        raise StoreError(f"{run} has no finished step yet: there is nothing to show")
    if wanted == RolloutFilter():
        wanted = replace(wanted, step=last, order="oldest")
    elif wanted.order == "newest" and (wanted.step is not None or errors):
        wanted = replace(wanted, order="oldest")
    if wanted.order in ("best", "worst") and not errors:
        wanted = replace(wanted, verdict="scored")
    return replace(wanted, fate="kept" if errors else "closed")


def _refuse_other_kinds(run: Path) -> None:
    from kitae.config.root import reinforcement
    from kitae.store.run_folder import read_config

    if (run / "config.json").is_file():
        reinforcement(read_config(run), "kitae show")


def _found(run: Path, wanted: RolloutFilter, one_per_prompt: bool) -> Iterator[_One]:
    seen: set[int] = set()
    view: GroupView | None = None
    for row, total in all_rollouts(run, wanted):
        if one_per_prompt and row.group in seen:
            continue
        seen.add(row.group)
        if view is None or view.group != row.group:
            view = samples.group(run, row.group)
        yield _One(view, next(s for s in view.samples if s.sample == row.sample), total)


def _first(found: Iterator[_One], limit: int | None) -> Iterator[_One]:
    for count, one in enumerate(found):
        if count == limit:
            return
        yield one


def _pieces(run: Path, asked: Asked, found: Iterator[_One], advantages: "_Advantages") -> "Iterator[RenderableType]":
    from rich.text import Text

    count, wanted = 0, asked.filter
    for one in found:
        if count == asked.limit:
            total = count_groups(run, wanted) if asked.one_per_prompt else one.total
            of = f"{count} of {total} samples" if not wanted.text else f"the first {count} samples"
            yield Text(f"{of}; --limit shows more, --one-per-prompt one of each prompt")
            return
        count += 1
        yield _panel(one, advantages)
    if not count:
        yield Text(_nothing(run, wanted))


def _nothing(run: Path, wanted: RolloutFilter) -> str:
    if wanted.verdict == "error":
        return "every answer could be judged"
    other = replace(RolloutFilter(), step=wanted.step, fate=wanted.fate)
    if wanted.step is not None and next(all_rollouts(run, other), None) is None:
        journal = _journal(run)
        last = journal.last_step()
        journal.close()
        raise StoreError(f"step {wanted.step} has no samples; the last step with samples is {last}")
    return "no sample passes these filters"


def _panel(one: _One, advantages: "_Advantages") -> "RenderableType":
    from rich.panel import Panel
    from rich.text import Text

    group, sample = one.group, one.sample
    asked = group.messages[-1:]
    said = [(turn.role, " ".join(filter(None, [turn.text, *turn.calls]))) for turn in sample.transcript or asked]
    said += [] if sample.transcript else [("answer", sample.text)]
    body = Text()
    for who, text in [*said, ("reference", group.reference)]:
        body.append(f"{visible(who)}: ", style="bold").append(f"{visible(text)}\n")
    failed = sample.status == "failed"
    if sample.detail:
        body.append("failed: " if failed else "verifier: ", style="bold").append(f"{visible(sample.detail)}\n")
    advantage = advantages.of(one)
    facts = [
        "failed" if failed else "not judged" if sample.value is None else f"reward {sample.value:g}",
        *([] if advantage is None else [f"advantage {advantage:+.2f}"]),
        *([f"{sample.turns} turns"] if sample.turns > 1 else []),
        *([f"rewards of turns {', '.join(f'{x:g}' for x in sample.rewards)}"] if len(sample.rewards) > 1 else []),
        f"{sample.length} tokens",
        "cut off" if sample.finish == "length" else sample.finish,
    ]
    body.append(" · ".join(facts), style="dim")
    when = "pending" if group.step is None else f"step {group.step}"
    title = Text(visible(f"{when} · {group.prompt_id} · {_name(sample)}"))
    colour = "yellow" if sample.value is None else "green" if sample.value >= 1 else "red"
    return Panel(body, title=title, title_align="left", border_style=colour)


def _name(sample: SampleView) -> str:
    return "greedy" if sample.sample == GREEDY else f"sample {sample.sample}"


def _as_json(one: _One, advantages: "_Advantages") -> dict[str, Any]:
    group = {name: getattr(one.group, name) for name in ("group", "prompt_id", "step", "fate", "reason", "reference")}
    messages = [asdict(turn) for turn in one.group.messages]
    return {**group, "messages": messages, **asdict(one.sample), "advantage": advantages.of(one)}


class _Advantages:
    """What samples were worth to the trainer, worked out again from the journal, a step at a time."""

    def __init__(self, run: Path, journal: Journal) -> None:
        from kitae.config.root import RLConfig
        from kitae.store.run_folder import read_config

        self._journal = journal
        config = read_config(run) if (run / "config.json").is_file() else None
        self._config = config if isinstance(config, RLConfig) else None
        self._steps: dict[int, dict[tuple[int, int], float]] = {}

    def of(self, one: _One) -> float | None:
        """None: it was not trained on, or its advantage cannot be known from the journal alone."""
        step = one.group.step
        if step is None:
            return None
        if step not in self._steps:
            self._steps[step] = self._compute(step)
        return self._steps[step].get((one.group.group, one.sample.sample))

    def _compute(self, step: int) -> dict[tuple[int, int], float]:
        if self._config is None:
            return {}
        from kitae.algorithms.group_stages import GroupStages

        try:
            stages = GroupStages(self._config.algorithm, self._config.sampling.max_tokens)
        except KitaeError:  # a stage of the user's own that is not here any more
            return {}
        moves = stages.wants_values or stages.wants_old or stages.wants_moving
        if moves or self._config.algorithm.shaping.norm == "running":
            return {}
        by_fate: dict[str, list[Group]] = {"trained": [], "dropped": []}
        for group, _, fate, _ in self._journal.groups(step):
            if fate in by_fate:
                by_fate[fate].append(self._journal.group(group))
        candidates = stages.advantages(stages.candidates(by_fate["trained"], by_fate["dropped"]))
        found: dict[tuple[int, int], list[float]] = {}
        for c in candidates:  # one for each role of a sample
            found.setdefault((c.group, c.index), []).append(float(c.column("advantage").mean()))
        return {key: sum(each) / len(each) for key, each in found.items()}


def _journal(run: Path) -> Journal:
    path = run / "journal.sqlite"
    if not path.is_file():
        what = "it has no journal.sqlite" if run.exists() else "there is no such folder"
        raise StoreError(f"{run} is not a run folder: {what} (kitae runs lists them)")
    return Journal(path, read_only=True)


_LESS = "FRX"  # leave at once where all fits on the screen, keep colours, leave the screen as it is


def pager() -> list[str] | None:
    """The command of `$PAGER`, or less; None: plain output, because nobody sits there or wants one."""
    if not sys.stdout.isatty():
        return None
    wanted = os.environ.get("PAGER", "less").strip()
    try:
        command = shlex.split(wanted)
    except ValueError:  # a quotation that does not end
        return None
    return command if command and command[0] != "cat" and shutil.which(command[0]) else None


def show_all(pieces: Iterable["RenderableType"], command: list[str] | None) -> None:
    """Each piece is made when it is needed; what a reader who leaves has not seen is never made."""
    from rich.console import Console

    if command is None:
        console = Console(file=terminal_of(sys.stdout))
        for piece in pieces:
            console.print(piece)
        return
    width = shutil.get_terminal_size().columns
    environment = {**os.environ, "LESS": os.environ.get("LESS", _LESS)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, encoding="utf-8", env=environment)
    assert process.stdin is not None
    try:
        console = Console(force_terminal=True, width=width)
        for piece in pieces:
            with console.capture() as drawn:  # rich itself would end the program when the reader leaves
                console.print(piece)
            process.stdin.write(drawn.get())
            process.stdin.flush()
    except (BrokenPipeError, KeyboardInterrupt):
        pass  # the reader has left
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        while process.poll() is None:
            try:
                process.wait()
            except KeyboardInterrupt:
                continue  # it is the pager's: the screen is to be left as it was
