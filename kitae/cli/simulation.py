"""`kitae simulate`."""

import gc
import json
import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kitae.cli.arguments import Overrides, Recipe
from kitae.config.locate import find_recipe
from kitae.config.recipe import load_config
from kitae.config.root import reinforcement
from kitae.errors import ConfigError
from kitae.plugins import nearest

if TYPE_CHECKING:
    from kitae.study.simulate import LogNormal, Schedule, Steady, Times

_TAIL = 8  # the cap of lengths over their median, unless they are given


def simulate(
    recipe: Recipe,
    overrides: Overrides = None,
    devices: Annotated[str, typer.Option("--devices", "--engines", help="Numbers of devices: 8,16,32,64.")] = "8",
    staleness: Annotated[str, typer.Option(help="Values of pipeline.max_staleness: 0,1,2,4.")] = "0,1,2,4",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Of responses: lognormal:median=512,max=8x[,sigma=1] or constant:512; default: log-normal, median an "
            "eighth of sampling.max_tokens."
        ),
    ] = None,
    times: Annotated[
        str,
        typer.Option(help="What things take on a device: step=0.0016,sequence=6.4e-6,train=50000,… (docs/async.md)."),
    ] = "",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    signal: Annotated[float, typer.Option(min=0.01, max=1, help="Share of groups whose rewards differ.")] = 1.0,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Responses of a step for each device; default: the recipe's batch.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count; some before and after them do not.")] = 20,
    trainers: Annotated[
        float | None,
        typer.Option(help="Devices that train where staleness > 0: 4, or a share: 0.25; default: the best number."),
    ] = None,
    generation_share: Annotated[
        float | None,
        typer.Option(min=0.01, max=0.99, help="Set the rate of training so that a synchronous step generates so long."),
    ] = None,
    parameters: Annotated[
        float | None,
        typer.Option(help="Of the model: 32e9; times that are not given follow from it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The table as JSON.")] = False,
    timeline: Annotated[Path | None, typer.Option(help="Draw who worked when in the last schedule, as a PNG.")] = None,
) -> None:
    """Predict throughput and staleness of schedules on many devices.

    Throughput, idle time and staleness on many devices, in seconds and without a model.
    """
    config = reinforcement(load_config(find_recipe(recipe), overrides or []), "kitae simulate")
    numbers, bounds = whole_numbers("--devices", devices, least=1), whole_numbers("--staleness", staleness, least=0)
    if trainers is not None and (trainers <= 0 or (trainers > 1 and trainers % 1)):
        raise ConfigError(f"--trainers must be a whole number of at least 1 or a share below 1, got {trainers:g}")
    most = config.sampling.max_tokens
    if lengths is None:
        lengths = f"lognormal:median={max(1, most // _TAIL)}"
    from kitae.config.recipe import override_config
    from kitae.study.simulate import Work, study

    gc.freeze()  # what was imported stays: looking at it again and again would take a quarter of the time
    drawn = parse_lengths(lengths, most)
    if parameters is not None and not 1 <= parameters < math.inf:
        raise ConfigError(f"--parameters must be a number of at least 1, got {parameters:g}")
    config = override_config(config, [f"sampling.max_tokens={drawn.cap}"])
    found = study(
        config,
        numbers,
        bounds,
        parse_times(times, parameters),
        Work(drawn, prompt, signal),
        steps=steps,
        sequences=sequences,
        trainers=trainers,
        generation_share=generation_share,
    )
    outcomes: list[dict[str, object]] = []
    for schedule, outcome in found:
        if not as_json:
            if not outcomes:
                _describe(schedule, drawn)
            print(_row(outcome))
        outcomes.append(asdict(outcome))
    if as_json:
        print(json.dumps(outcomes, indent=2))
    if timeline is not None:
        _draw(schedule, timeline)
        if not as_json:
            print(f"\ntimeline of the last line: {timeline}")


def whole_numbers(option: str, text: str, *, least: int) -> list[int]:
    """`8,16,32` → `[8, 16, 32]`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ConfigError(f"{option} must be whole numbers of at least {least}, separated by commas, got {text!r}")
    return numbers


def parse_lengths(text: str, cap: int) -> "LogNormal":
    """`lognormal:median=512,max=8x`, `lognormal:median=512,sigma=1` (capped at `cap`) or `constant:512`."""
    from kitae.study.simulate import LogNormal

    kind, _, rest = text.partition(":")
    if kind == "constant":
        length = _number("--lengths constant", rest)
        if length < 1 or length % 1:
            raise ConfigError(f"--lengths constant must be a whole number of at least 1, got {rest!r}")
        return LogNormal(length, int(length), 0.0)
    if kind != "lognormal":
        raise ConfigError(f"--lengths must begin with 'lognormal:' or 'constant:', got {text!r}")
    values = _pairs("--lengths", rest, ("median", "max", "sigma"))
    if "median" not in values:
        raise ConfigError(f"--lengths lognormal needs a median, got {text!r}")
    median = _number("--lengths median", values["median"])
    if most := values.get("max"):
        times = most.endswith("x")
        cap = round(_number("--lengths max", most.removesuffix("x")) * (median if times else 1))
    sigma = _number("--lengths sigma", values["sigma"]) if "sigma" in values else None
    if not 1 <= median <= cap:
        raise ConfigError(f"--lengths median must be from 1 to the longest, {cap}, got {median:g}")
    if sigma is not None and not sigma >= 0:
        raise ConfigError(f"--lengths sigma must be at least 0, got {sigma:g}")
    return LogNormal(median, cap, sigma)


def parse_times(text: str, parameters: float | None = None) -> "Times":
    """`train=25000,sync=2` → those, and the defaults for the others, of a model with so many parameters."""
    from kitae.study.simulate import Times, scaled

    given = _pairs("--times", text, [field.name for field in fields(Times)]) if text else {}
    rates = ("prefill", "train", "life")  # the others are seconds, and may be 0
    values = {key: _number(f"--times {key}", value, finite=key not in rates) for key, value in given.items()}
    for key, value in values.items():
        rate = key in rates
        if not (value > 0 if rate else value >= 0):
            raise ConfigError(f"--times {key} must be {'above' if rate else 'at least'} 0, got {given[key]}")
    times = replace(Times() if parameters is None else scaled(Times(), parameters), **values)
    if times.step + times.sequence == 0:
        raise ConfigError("--times step and sequence must not both be 0, got step=0,sequence=0: a step must take time")
    return times


def parse_pairs(option: str, text: str, keys: Iterable[str]) -> dict[str, float]:
    """`"nic=12.5e9,gpus=4"` → `{"nic": 12.5e9, "gpus": 4.0}`, of known keys; an empty text has none."""
    given = _pairs(option, text, keys) if text else {}
    return {key: _number(f"{option} {key}", value) for key, value in given.items()}


def _pairs(option: str, text: str, keys: Iterable[str]) -> Mapping[str, str]:
    known, found = list(keys), {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"{option} takes key=value, separated by commas, got {part!r}")
        if key not in known:
            raise ConfigError(f"{option} knows {', '.join(known)}, got {key!r}{nearest(key, known)}")
        found[key] = value.strip()
    return found


def _number(what: str, text: str, *, finite: bool = True) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value) or (finite and math.isinf(value)):
        raise ConfigError(f"{what} must be a number, got {text!r}")
    return value


_COLUMNS = (
    "devices",
    "engines+trainers",
    "staleness ≤",
    "s/step",
    "tokens/s",
    "samples/s",
    "speed-up",
    "idle: engines",
    "trainer",
    "staleness",
    "max",
    "dropped",
    "overdue",
    "refilled",
    "restarts",
)


def _describe(schedule: "Schedule", lengths: "LogNormal") -> None:
    t = schedule.config.training
    shares = ", ".join(f"{key} {value:g}" for key, value in asdict(schedule.times).items())
    spread = "" if lengths.sigma is None else f", sigma {lengths.sigma:g}"
    print(f"a step     {t.prompts_per_step} prompts × {t.group_size} responses on the first number of devices")
    print(f"lengths    median {lengths.median:g}, at most {lengths.cap}{spread}; prompts {schedule.work.prompt}")
    print(f"times      {shares}\n")
    print("  ".join(_COLUMNS))


def _row(o: "Steady") -> str:
    split = f"{o.engines}+{o.trainers}" if o.trainers else f"{o.engines} in turns"
    cells = (
        str(o.devices),
        split,
        str(o.max_staleness),
        f"{o.step_seconds:.3g}",
        f"{o.tokens_per_second:,.0f}",
        f"{o.samples_per_second:.1f}",
        f"{o.speedup:.2f}",
        f"{o.engine_idle:.0%}",
        f"{o.trainer_idle:.0%}",
        f"{o.staleness:.2f}",
        str(o.staleness_max),
        f"{o.dropped:.1f}",
        f"{o.overdue:.1f}",
        f"{o.refilled:.1f}",
        str(o.restarts),
    )
    return "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, _COLUMNS, strict=True))


def _draw(schedule: "Schedule", target: Path) -> None:
    from kitae.observe.timeline import draw
    from kitae.study.simulate import simulate as run

    hardware, bound = schedule.hardware, schedule.config.pipeline.max_staleness
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / f"{hardware.engines} engines, {hardware.trainers} trainers, max_staleness {bound}"
        folder.mkdir()
        run(schedule, folder)
        draw(folder, target)
