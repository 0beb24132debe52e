"""`kitae report`: a run as one file to send to somebody."""

from pathlib import Path

from kitae.cli.text import as_size


def report(run: Path, output: Path | None) -> None:
    from kitae.ui.report_file import make_report

    made = make_report(run, output or run / "report.html")
    print(f"{made}  ({as_size(made.stat().st_size)}; opens in any browser, without a network)")
