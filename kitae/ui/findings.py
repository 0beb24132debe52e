"""What a diagnosis says of a run, as records of the API."""

from pathlib import Path

from kitae.observe.diagnosis import RULES, diagnose
from kitae.ui.records import Diagnosed, Diagnosis


def diagnosis(run: Path) -> Diagnosis:
    found = [Diagnosed(f.rule, f.severity, f.title, f.evidence, f.advice) for f in diagnose(run)]
    return Diagnosis(found, len(RULES))
