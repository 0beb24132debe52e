"""What a run was begun with, as its journal has it: what was changed since then would be trained on unnoticed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from kitae.errors import DataError, ModelError
from kitae.store.checkpoints import START
from kitae.store.journal import Journal

_DATA, _MODELS = "data", "models"  # the events that say what the run trains on


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """`TrainedOn("9f3c…", {"/models/qwen/model.safetensors": "0a1e…"})`: a checksum of the data, and of each file of
    the models that the run loads."""

    data: str
    models: Mapping[str, str] = field(default_factory=dict)


def check_data(journal: Journal, fingerprint: str, what: str, way_out: str) -> None:
    """Refuse to go on with other data than before. A run that did not record its data is let pass."""
    if _known(journal, _DATA) not in (None, fingerprint):
        raise DataError(f"{what} or what is held out was changed since then. Put it back; or {way_out}")


def check_models(journal: Journal, models: Mapping[str, str]) -> None:
    """Refuse to go on with other models than before: the one that is trained, and those that it learns from."""
    known = json.loads(_known(journal, _MODELS) or "{}")
    changed = sorted(path for path in {*known, *models} if known.get(path) != models.get(path)) if known else []
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ModelError(
            f"the models must be those that the run began with, but {changed[0]}{more} was changed, added or removed "
            f"since then. Put it back; or start a new run, or give all steps up: --from {START} --forget"
        )


async def record(journal: Journal, origin: TrainedOn) -> None:
    """From here on, this is what it trains on."""
    for kind, now in ((_DATA, origin.data), (_MODELS, json.dumps(dict(origin.models)))):
        if _known(journal, kind) != now:
            await journal.add_event(kind, now)


def _known(journal: Journal, kind: str) -> str | None:
    return next((detail for _, each, detail in reversed(journal.events()) if each == kind), None)
