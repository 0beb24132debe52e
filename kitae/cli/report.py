"""`kitae report` and `kitae plot`: a run as a file to send to somebody, and as a picture."""

from pathlib import Path
from typing import Annotated

import typer

from kitae.cli.arguments import Run
from kitae.cli.text import as_size


def report(
    run: Run,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The HTML file to write; default: RUN/report.html.")
    ] = None,
) -> None:
    """Write a run into one HTML file, to send to somebody.

    Results, curves, answers, settings, diagnosis; of running and crashed runs too. It needs no network and no scripts.
    """
    from kitae.ui.report_file import make_report

    made = make_report(run, output or run / "report.html")
    print(f"{made}  ({as_size(made.stat().st_size)}; opens in any browser, without a network)")


def plot(
    run: Run,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The PNG to write; default: RUN/plot.png.")
    ] = None,
) -> None:
    """Draw the curves of a run as a PNG."""
    from kitae.observe.plots import plot_run

    print(plot_run(run, output))
