"""`kitae diagnose`."""

import json
import textwrap
from dataclasses import asdict
from typing import Annotated

import typer

from kitae.cli.arguments import Run
from kitae.errors import KitaeError
from kitae.observe import diagnosis
from kitae.store.run_summary import RunView, look

_WIDTH = 100
_MARGIN = 9


def diagnose(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON, and nothing else.")] = False,
) -> None:
    """Say what is wrong with a run, and what to change.

    Of a run that is going on, finished, stopped or crashed; docs/diagnosis.md has the rules.
    """
    found = diagnosis.diagnose(run)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=2, ensure_ascii=False))
        return
    print(f"{run}: {_standing(look(run))}")
    if not found:
        print(f"nothing is wrong, by {len(diagnosis.RULES)} rules (docs/diagnosis.md)")
    for finding in found:
        print(f"\n{finding.severity:<{_MARGIN}}{finding.title} ({finding.rule})")
        for text in (finding.evidence, f"→ {finding.advice}"):
            lines = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)  # paths are copied
            print(textwrap.indent("\n".join(lines), " " * _MARGIN))


def _standing(view: RunView) -> str:
    try:
        return f"{view.status}, step {view.step} of {view.config.training.steps}"
    except KitaeError:  # settings of another version
        return f"{view.status}, step {view.step}"
