r"""What a schedule on many devices asks of everything that is not a GPU: bytes, seconds, and what a step waits for.

    python benchmarks/scale.py quickstart --devices 8,64,256 --staleness 0,2 --trainers 0.25 --sequences 8 --steps 6 \
        --lengths lognormal:median=512,max=8x --parameters 32e9 [--links nic=12.5e9,gpus=4] [--json]

    a simulated schedule ─┐
    rates of links ───────┼─► weights by each transport, gathering, controller, journal, verifiers ─► bottleneck
    size of the model ────┘

Arithmetic on rates, no run. One engine is one GPU; ranks share all parameters among them (FSDP2), rank 0 publishes.
Left out: latency, failures, evaluation, checkpoints, passes without gradients, groups that are dropped.
"""

import argparse
import gc
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace

from kitae.cli.simulation import parse_lengths, parse_pairs, parse_times, whole_numbers
from kitae.config.locate import find_recipe
from kitae.config.recipe import load_config, override_config
from kitae.config.root import reinforcement
from kitae.errors import ConfigError, KitaeError
from kitae.study.model_shape import read_model
from kitae.study.simulate import Schedule, Steady, Work, study

_BUCKET = 32 * 2**20  # bytes, as `kitae.weights.layout` cuts them
_ROW = 8192  # tokens of a row on a GPU, unless the recipe says otherwise
_REDUCED = 4  # bytes of a gradient on its way: fp32
_REQUEST = 400  # bytes of a request beside its prompt
_TOKEN = 8  # bytes of a token of a prompt on its way to an engine


@dataclass(frozen=True, slots=True)
class Links:
    """Rates in bytes a second, unless said otherwise: `Links(nic=12.5e9, gpus=4)`.

    Assumed, from specifications: `gpus` and `cores` of a machine. `nic`: one network card of a machine, for TCP, each
    way (400 Gbit/s). `fabric`: all cards of a machine together, for collectives of GPUs (8 of these). `nvlink`: a GPU
    and the others of its machine, each way. `copy`: between a GPU and its host. `storage`: a file system that all
    machines share, for all of them together.

    Measured by `benchmarks/cluster_rates.py`, by seconds of one core of a busy Xeon: `pack`, `compare`: a publisher
    writes all weights with their checksums, or looks for those that changed. `load`, `check`: an engine loads weights
    and compares checksums, or compares alone. `serve`: a process serves weights by HTTP. `rollout`: seconds of the
    controller for each rollout, whatever its length; `journal`: those of them that the journal takes.

    Counted there: `answer`, `row`, `record`: bytes of a rollout from an engine and to and from a verifier host, to a
    rank, and in the journal. Answers themselves lie in files, which engines write and ranks read.

    Measured elsewhere: `changed`: share of the weights that a step changes (docs/async.md, a learning rate of 1e-6).
    `verify`: seconds of a core for a check (docs/verifiers.md, mathematics; a program takes 25 to 125 ms).
    """

    gpus: float = 8
    cores: float = 96
    nic: float = 50e9
    fabric: float = 400e9
    nvlink: float = 450e9
    copy: float = 50e9
    storage: float = 20e9
    pack: float = 2.7e9
    compare: float = 1e9
    load: float = 2.9e9
    check: float = 4.7e9
    serve: float = 0.6e9
    rollout: float = 0.0018
    journal: float = 0.0004
    answer: float = 490.0
    row: float = 470.0
    record: float = 800.0
    changed: float = 0.004
    verify: float = 0.001

    def collective(self, ranks: int) -> float:
        """Of a ring: each machine is entered once, whatever the number of its ranks."""
        return self.nvlink if ranks <= self.gpus else min(self.nvlink, self.fabric)

    def machines(self, devices: int) -> int:
        return math.ceil(devices / self.gpus)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A version on its way to all engines: `Delivery("broadcast", "delta", sent=2.9e8, publish=9.1, seconds=2.6)`.

    sent: bytes that leave the publisher. publish: seconds until it can be had. seconds: from then until the last engine
    has loaded and checked it.
    """

    transport: str
    mode: str
    sent: float
    publish: float
    seconds: float

    @property
    def whole(self) -> float:
        return self.publish + self.seconds


@dataclass(frozen=True, slots=True)
class Burden:
    """What a part carries in a step: `Burden("controller", bytes=2.1e9, seconds=25.0, exposed=17.2)`.

    exposed: seconds that the step is longer for it, because nothing else is left to do meanwhile.
    """

    part: str
    bytes: float
    seconds: float
    exposed: float


@dataclass(frozen=True, slots=True)
class Projection:
    """A schedule with its links. deliveries: of weights, by every transport; `weights` is the fastest of the recipe's
    `engine.sync`. burdens: gathering (bytes of one rank), weights, controller, verifiers; the journal's is part of the
    controller's, which is one process. cores: that verifiers keep busy. controller_ceiling: devices on which the
    controller's work alone takes all the time it has, if the batch grows with the devices. step_seconds: simulated, and
    what is exposed. bottleneck: what is exposed most; if nothing is, whoever is busy longest of engines and trainers.
    """

    devices: int
    machines: int
    max_staleness: int
    tokens: float
    deliveries: tuple[Delivery, ...]
    weights: Delivery
    burdens: tuple[Burden, ...]
    journal: Burden
    cores: float
    controller_ceiling: float
    simulated_seconds: float
    step_seconds: float
    bottleneck: str

    def burden(self, part: str) -> Burden:
        return next(b for b in self.burdens if b.part == part)


def project(schedule: Schedule, found: Steady, links: Links, parameters: float) -> Projection:
    """A schedule and what was simulated of it, with a model of so many parameters."""
    step = found.step_seconds
    ways = tuple(deliveries(schedule, links, parameters))
    mode = schedule.config.engine.sync
    weights = min((way for way in ways if way.mode == mode), key=lambda way: way.whole)
    gathering, (controller, journal) = (
        _gathering(schedule, found, links, parameters),
        _controlling(schedule, found, links),
    )
    checking = found.samples_per_second * step * links.verify
    training, room = (1 - found.trainer_idle) * step, _room(found)
    burdens = (
        replace(gathering, exposed=max(0.0, gathering.seconds - training)),
        Burden("weights", weights.sent, weights.whole, _waiting(schedule, weights, training)),
        replace(controller, exposed=max(0.0, controller.seconds - room)),
        Burden("verifiers", 0.0, checking / links.cores, max(0.0, checking / links.cores - room)),
    )
    return Projection(
        devices=found.devices,
        machines=links.machines(found.devices),
        max_staleness=found.max_staleness,
        tokens=found.tokens_per_second * step,
        deliveries=ways,
        weights=weights,
        burdens=burdens,
        journal=journal,
        cores=checking / step,
        controller_ceiling=found.devices * room / controller.seconds,
        simulated_seconds=step,
        step_seconds=step + sum(b.exposed for b in burdens),
        bottleneck=_bottleneck(found, burdens),
    )


def deliveries(schedule: Schedule, links: Links, parameters: float) -> Iterator[Delivery]:
    """By every transport, in full and as a delta. Through memory only where all devices are in one machine."""
    hardware, width = schedule.hardware, _width(schedule)
    size, ranks = parameters * width, hardware.training
    gathered = size / links.collective(ranks) if ranks > 1 else 0.0
    for mode, sent in (("full", size), ("delta", parameters * _delta_bytes(links.changed, width))):
        publish = gathered + size / links.copy + size / (links.pack if mode == "full" else links.compare)
        for transport, copies, seconds in _transfers(sent, hardware.engines, links):
            if transport != "memory" or hardware.devices <= links.gpus:
                checked = size / links.check if mode == "delta" else 0.0
                yield Delivery(transport, mode, copies * sent, publish, max(seconds, sent / links.load) + checked)


def _transfers(size: float, engines: int, links: Links) -> Iterator[tuple[str, float, float]]:
    """`(transport, copies that leave the publisher, seconds)`; loading, which goes on meanwhile, is not in it."""
    served, machines = min(links.nic, links.serve), links.machines(engines)
    yield "memory", 0, 0.0
    yield "http", engines, engines * size / served
    lane = min(links.fabric / links.gpus, links.copy)  # one GPU sends
    yield "broadcast", 1, (size + (machines - 1) * min(size, _BUCKET)) / lane
    yield "files", 1, (1 + machines) * size / links.storage  # a machine reads it once for all of its engines


def _delta_bytes(changed: float, width: int) -> float:
    """Of each value: positions and values of those that changed, or a bit for all and those, or everything."""
    return min(changed * (4 + width), 1 / 8 + changed * width, width)


def _gathering(schedule: Schedule, found: Steady, links: Links, parameters: float) -> Burden:
    """Parameters are gathered for the forward and for the backward pass of every row, gradients are scattered."""
    t, ranks = schedule.config.training, schedule.hardware.training
    prompts = found.samples_per_second * found.step_seconds / t.group_size * schedule.work.prompt
    tokens = found.tokens_per_second * found.step_seconds + prompts
    rows = t.epochs * math.ceil(tokens / (t.token_budget or _ROW) / ranks)
    size = rows * parameters * (2 * _width(schedule) + _REDUCED) * (ranks - 1) / ranks
    return Burden("gathering", size, size / links.collective(ranks), 0.0)


def _controlling(schedule: Schedule, found: Steady, links: Links) -> tuple[Burden, Burden]:
    """Of the controller, and what of that is the journal's."""
    samples = found.samples_per_second * found.step_seconds
    asked = _TOKEN * schedule.work.prompt + _REQUEST
    controller = Burden("controller", samples * (asked + links.answer + links.row), samples * links.rollout, 0.0)
    return controller, Burden("journal", samples * links.record, samples * links.journal, 0.0)


def _room(found: Steady) -> float:
    """Seconds in which the controller works while others do: generation, or all of a step that runs ahead."""
    return found.step_seconds * (1.0 if found.max_staleness else 1 - found.engine_idle)


def _waiting(schedule: Schedule, way: Delivery, training: float) -> float:
    """For weights, beyond what was simulated: all of it where devices take turns. Ahead, publishing goes on beside
    training."""
    delivered = way.seconds - schedule.times.sync
    if schedule.hardware.trainers == 0:
        return max(0.0, way.publish + delivered)
    return max(0.0, way.publish - training) + max(0.0, delivered)


def _bottleneck(found: Steady, burdens: tuple[Burden, ...]) -> str:
    worst = max(burdens, key=lambda b: b.exposed)
    if worst.exposed > 0:
        return worst.part
    return "generation" if found.engine_idle <= found.trainer_idle else "training"


def _width(schedule: Schedule) -> int:
    """Bytes of a parameter: bf16 unless the recipe says otherwise."""
    return 4 if schedule.config.model.dtype == "float32" else 2


# The program.


def scale_table(found: Sequence[Projection], links: Links, parameters: float) -> str:
    """What the weights take by each transport, and what a step asks of each part."""
    rates = ", ".join(f"{key} {value:g}" for key, value in asdict(links).items())
    about = f"model      {parameters:.4g} parameters\nlinks      {rates}"
    return "\n\n".join((about, _weights(found), _step(found)))


def _weights(found: Sequence[Projection]) -> str:
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


def _way(way: Delivery | None) -> str:
    return "" if way is None else f"{way.seconds:.3g} ({way.sent / 1e9:.3g})"


def _step(found: Sequence[Projection]) -> str:
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


def parse_links(text: str) -> Links:
    """`nic=12.5e9,gpus=4` → those, and the defaults for the others."""
    values = parse_pairs("--links", text, [field.name for field in fields(Links)])
    for key, value in values.items():
        if not value > 0:
            raise ConfigError(f"--links {key} must be above 0, got {value:g}")
    return replace(Links(), **values)


def projections(options: argparse.Namespace) -> list[Projection]:
    config = reinforcement(load_config(find_recipe(options.recipe), options.overrides), "this projection")
    lengths, links = parse_lengths(options.lengths, config.sampling.max_tokens), parse_links(options.links)
    config = override_config(config, [f"sampling.max_tokens={lengths.cap}"])
    gc.freeze()  # what was imported stays: looking at it again and again would take a quarter of the time
    found = study(
        config,
        whole_numbers("--devices", options.devices, least=1),
        whole_numbers("--staleness", options.staleness, least=0),
        parse_times(options.times, options.parameters),
        Work(lengths, options.prompt, 1.0),
        steps=options.steps,
        sequences=options.sequences,
        trainers=options.trainers,
        generation_share=None,
    )
    return [project(schedule, outcome, links, options.parameters) for schedule, outcome in found]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--devices", default="8,64,256,1024")
    parser.add_argument("--staleness", default="0,2")
    parser.add_argument("--lengths", default="lognormal:median=512,max=8x")
    parser.add_argument("--times", default="", help="as kitae simulate takes them")
    parser.add_argument("--links", default="", help="rates in bytes a second: nic=50e9,gpus=8,storage=20e9,…")
    parser.add_argument("--parameters", type=float, help="of the model; default: those of the recipe's model")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--sequences", type=int, help="responses of a step for each device")
    parser.add_argument("--trainers", type=float, help="devices that train where staleness > 0, or their share")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    try:
        if options.parameters is None:
            options.parameters = _size_of(options.recipe, options.overrides)
        found = projections(options)
    except KitaeError as error:
        sys.exit(f"error: {error}")
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    else:
        print(scale_table(found, parse_links(options.links), options.parameters))


def _size_of(recipe: str, overrides: Sequence[str]) -> float:
    path = load_config(find_recipe(recipe), list(overrides)).model.path
    shape = read_model(path)
    if shape is None:
        raise ConfigError(f"--parameters is needed: the model {path!r} is not here, so its size is unknown")
    return shape.parameters


if __name__ == "__main__":
    main()
