"""How often the verifiers agree with labels that were written without looking at them: tests/data/verdicts_fresh.jsonl.

A row is {"verifier", "kind", "reference", "response", "expected"}. The floor is the agreement at the first measurement,
657 of 662, rounded down; to change a label in order to please a verifier would make the set worthless.
"""

import json
from pathlib import Path
from typing import Any

from kitae.verifiers.verifier_registry import VERIFIERS

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "data/verdicts_fresh.jsonl").read_text("utf-8").split("\n")
    if line
]
FLOOR = 0.99


def agrees(row: dict[str, Any]) -> bool:
    score = VERIFIERS[row["verifier"]].score(row["response"], row["reference"], {})
    return score.valid and score.value == row["expected"]  # type: ignore[union-attr]


def test_the_verifiers_agree_with_the_labels() -> None:
    missed = [row for row in ROWS if not agrees(row)]
    shown = "\n".join(json.dumps(row, ensure_ascii=False) for row in missed)
    assert 1 - len(missed) / len(ROWS) >= FLOOR, f"{len(missed)} of {len(ROWS)} verdicts differ:\n{shown}"


def test_the_set_has_both_verdicts_of_every_kind() -> None:
    verdicts: dict[str, set[int]] = {}
    for row in ROWS:
        verdicts.setdefault(row["kind"], set()).add(row["expected"])
    assert len(ROWS) > 600
    assert all(labels == {0, 1} for labels in verdicts.values())
