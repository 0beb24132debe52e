"""What a run was begun with, as its journal has it: rows that were changed since then would be trained on unnoticed."""

from kitae.errors import DataError
from kitae.store.journal import Journal

_DATA = "data"  # the event that says what the run trains on


def check_data(journal: Journal, fingerprint: str, what: str, way_out: str) -> None:
    """Refuse to go on with other data than before. A run that did not record its data is let pass."""
    if _known(journal) not in (None, fingerprint):
        raise DataError(f"{what} or what is held out was changed since then. Put it back; or {way_out}")


async def record_data(journal: Journal, fingerprint: str) -> None:
    """From here on, this is what it trains on."""
    if _known(journal) != fingerprint:
        await journal.add_event(_DATA, fingerprint)


def _known(journal: Journal) -> str | None:
    return next((detail for _, kind, detail in reversed(journal.events()) if kind == _DATA), None)
