"""The tables of `kitae simulate --scale`."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kitae.study.scale import Delivery, Links, Projection


def scale_table(found: "Sequence[Projection]", links: "Links", parameters: float) -> str:
    """What the weights take by each transport, and what a step asks of each part."""
    rates = ", ".join(f"{key} {value:g}" for key, value in asdict(links).items())
    about = f"model      {parameters:.4g} parameters\nlinks      {rates}"
    return "\n\n".join((about, _weights(found), _step(found)))


def _weights(found: "Sequence[Projection]") -> str:
    header = ("devices", "staleness ≤", "weights", "GB", "publish s", *_TRANSPORTS)
    rows = []
    for p in found:
        for mode in ("full", "delta"):
            ways = {way.transport: way for way in p.deliveries if way.mode == mode}
            one = ways["broadcast"]  # what leaves the publisher is one copy
            cells = (str(p.devices), str(p.max_staleness), mode, f"{one.sent / 1e9:.3g}", f"{one.publish:.3g}")
            rows.append((*cells, *(_way(ways.get(name)) for name in _TRANSPORTS)))
    return (
        "seconds until all engines have new weights, once they are published; GB that the publisher sends\n"
        + _table(header, rows)
    )


_TRANSPORTS = ("memory", "http", "broadcast", "files")


def _way(way: "Delivery | None") -> str:
    return "" if way is None else f"{way.seconds:.3g} ({way.sent / 1e9:.3g})"


def _step(found: "Sequence[Projection]") -> str:
    header = (
        "devices", "staleness ≤", "gathering: GB/rank", "s", "weights by", "s", "controller: GB", "s", "full at",
        "journal: GB", "s", "verifier cores", "s/step: simulated", "projected", "bottleneck",
    )  # fmt: skip
    rows = []
    for p in found:
        gathering, controller = p.burden("gathering"), p.burden("controller")
        rows.append(
            (
                str(p.devices), str(p.max_staleness), f"{gathering.bytes / 1e9:.3g}", f"{gathering.seconds:.3g}",
                f"{p.weights.transport}, {p.weights.mode}", f"{p.weights.whole:.3g}",
                f"{controller.bytes / 1e9:.3g}", f"{controller.seconds:.3g}", f"{p.controller_ceiling:,.0f}",
                f"{p.journal.bytes / 1e9:.3g}", f"{p.journal.seconds:.3g}", f"{p.cores:.2g}",
                f"{p.simulated_seconds:.3g}", f"{p.step_seconds:.3g}", p.bottleneck,
            )
        )  # fmt: skip
    return "a step; full at: devices on which the controller has no time left\n" + _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in (header, *rows))
