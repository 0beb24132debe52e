"""Commands on runs that there are: list, look at, compare and clean them."""

from pathlib import Path
from typing import Annotated

import typer

from kitae.cli.commands.arguments import Run, Runs


def runs(
    folder: Annotated[Path, typer.Argument(help="The folder that holds them.", metavar="[DIR]")] = Path("runs"),
) -> None:
    """List runs with their status, results and size."""
    from kitae.cli import runs as listing

    listing.runs(folder)


def compare(folders: Runs) -> None:
    """Compare settings and results of runs."""
    from kitae.cli import runs as listing

    listing.compare(folders)


def clean(
    folders: Runs,
    weights_only: Annotated[
        bool,
        typer.Option(
            "--weights-only", help="Remove all checkpoints: the trained model stays, but the run cannot be resumed."
        ),
    ] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also remove the records of single tokens.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it, only say what would go.")] = False,
) -> None:
    """Free disk that runs take.

    Removes all checkpoints but the last, and what writes that were cut off have left behind.
    """
    from kitae.cli import runs as listing

    listing.clean(folders, weights_only, yes, tokens)


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
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, and nothing else.")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Who worked when, as a PNG, and for how long.")] = False,
) -> None:
    """Show sampled answers with their rewards.

    Of the last step, unless an option says otherwise; or the timeline of the run. On a terminal they go through $PAGER,
    or less.
    """
    if timeline:
        from kitae.cli import inspection

        inspection.timeline(run)
        return
    from kitae.cli import show as showing
    from kitae.ui.queries import RolloutFilter

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
    showing.show(run, showing.Asked(wanted, one_per_prompt, limit), json)


def diagnose(
    run: Run,
    json: Annotated[bool, typer.Option("--json", help="The findings as JSON, and nothing else.")] = False,
) -> None:
    """Say what is wrong with a run, and what to change.

    Of a run that is going on, finished, stopped or crashed; docs/diagnosis.md has the rules.
    """
    from kitae.cli import diagnosis

    diagnosis.diagnose(run, json)


def replay(
    run: Run,
    step: Annotated[int | None, typer.Option(min=1, help="The step to compute again; default: the last.")] = None,
) -> None:
    """Compute a past step again and compare.

    From the journal and the checkpoint before it; the exit status is 0 if all numbers are the same, else 1.
    """
    from kitae.cli import inspection

    inspection.replay(run, step)


def plot(
    run: Run,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The PNG to write; default: RUN/plot.png.")
    ] = None,
) -> None:
    """Draw the curves of a run as a PNG."""
    from kitae.cli import inspection

    inspection.plot(run, output)


def report(
    run: Run,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The HTML file to write; default: RUN/report.html.")
    ] = None,
) -> None:
    """Write a run into one HTML file, to send to somebody.

    Results, curves, answers, settings, diagnosis; of running and crashed runs too. It needs no network and no scripts.
    """
    from kitae.cli import report as writing

    writing.report(run, output)


def ui(
    places: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, names of runs, or folders that hold runs; default: runs.", metavar="[RUN]…"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; an address that others can reach needs a token, which is printed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 7007,
    open_browser: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,
) -> None:
    """Look at runs in a browser.

    Curves, rollouts token by token, timelines, comparisons; of running runs too. Reads and changes nothing.
    """
    from kitae.cli import window

    window.show(places or [], host, port, open_browser)
