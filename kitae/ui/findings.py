"""What a diagnosis says of a run, as records of the API."""

import importlib
from collections.abc import Iterable
from pathlib import Path

from kitae.ui.records import Diagnosed, Diagnosis

_RULES = "kitae.observe.diagnosis"
"""A version of Kitae without it has no rules; the page says so."""


def diagnosis(run: Path) -> Diagnosis:
    try:
        rules = importlib.import_module(_RULES)
    except ModuleNotFoundError as absent:
        if absent.name != _RULES:
            raise
        return Diagnosis(False, [])
    return Diagnosis(
        True,
        [Diagnosed(f.rule, str(f.severity), f.title, _lines(f.evidence), f.advice) for f in rules.diagnose(run)],
    )


def _lines(evidence: str | Iterable[object]) -> list[str]:
    return [evidence] if isinstance(evidence, str) else [str(item) for item in evidence]
