"""Study schedules without a model: the real loops of a run on a clock that jumps, with fakes that take their time.

    prompts ─► fake engines (a model of time) ─► a verdict after a delay ─► the real buffer ─► a trainer that sleeps

Feed, rollouts, train and sync are those of `loops`; filters, refills, deadlines and staleness are theirs. Left out:
evaluation, checkpoints, the journal. Assumed: trainers scale without loss, and so do engines.
"""

import asyncio
import math
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from statistics import NormalDist
from typing import Any

from kitae.algorithms.control import Control
from kitae.algorithms.group_stages import GroupStages
from kitae.clock import VirtualLoop, now
from kitae.config.recipe import override_config
from kitae.config.root import RLConfig, reinforcement
from kitae.data.chat import Chat
from kitae.data.prompt_stream import PromptStream
from kitae.engines.base import Request, SamplingParams
from kitae.engines.engine_pool import EnginePool
from kitae.engines.fake import FakeEngine, Pace
from kitae.envs.base import EpisodeLimits, SingleTurn
from kitae.envs.rollouts import Episodes
from kitae.errors import ConfigError
from kitae.observe.observer import Reported, Silent
from kitae.rl.loops import NoEvaluations, Pipeline
from kitae.rl.weight_sync import WeightSync
from kitae.store.checkpoints import Frontier
from kitae.store.journal import NoJournal
from kitae.store.run_folder import RunStore
from kitae.trainer.learner import Learner, Learnt, no_wait
from kitae.types import Group, LazyText, Message, Prompt, Score

_STALL = 60.0  # real seconds without any movement: then there is a deadlock
_STANDARD = NormalDist()
_SIMULATED = 1.5e9  # parameters of the model whose times are the defaults of `Times`
_READING = 0.46  # of a decoding step of that model: 3 GB at 4.2 TB/s of 1.6 ms; the rest is the same for larger ones
_CAP_QUANTILE = 0.999  # where the cap of log-normal lengths lies unless their sigma is given


@dataclass(frozen=True, slots=True)
class Times:
    """What things take on one device, in seconds unless said otherwise. The defaults are a model of 1.5 billion
    parameters on an H200, from docs/performance.md, where it has a figure.

    step, sequence: a decoding step of n sequences takes step + n × sequence (620 tokens/s of one sequence, 105,000 of
    512; measured: 623 and 103,500). prefill: prompt tokens a second (three times the rate of training: no backward
    pass). train: tokens a second of one device in training; fixed: what a training step takes beside its tokens. sync:
    the engines stand still so long for new weights. verify: until a verdict. life, restart: an engine dies after
    `life` on average and is back after `restart`.
    """

    step: float = 0.0016
    sequence: float = 6.4e-6
    prefill: float = 150_000.0
    train: float = 50_000.0
    fixed: float = 0.1
    sync: float = 0.5
    verify: float = 0.05
    life: float = math.inf
    restart: float = 60.0


def scaled(times: Times, parameters: float) -> Times:
    """The times of a model of another size: the part of them that is work for a token grows with the parameters."""
    ratio = parameters / _SIMULATED
    return replace(
        times,
        step=times.step * (1 - _READING + _READING * ratio),
        sequence=times.sequence * ratio,
        prefill=times.prefill / ratio,
        train=times.train / ratio,
    )


@dataclass(frozen=True)
class LogNormal:
    """Lengths of responses: `LogNormal(median=512, cap=4096)`; without `sigma`, one in a thousand reaches the cap."""

    median: float
    cap: int
    sigma: float | None = None

    def __call__(self, seed: int) -> int:
        """The length of the response with that 63-bit seed: the same in every schedule."""
        quantile = min(max(seed / (1 << 63), 1e-12), 1 - 1e-12)
        return max(1, min(self.cap, round(self.median * math.exp(self._spread * _STANDARD.inv_cdf(quantile)))))

    @cached_property
    def _spread(self) -> float:
        if self.sigma is not None:
            return self.sigma
        return math.log(self.cap / self.median) / _STANDARD.inv_cdf(_CAP_QUANTILE)


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked for: `Work(LogNormal(512, 4096), prompt=128, signal=0.7)`.

    lengths: of the response with a given seed. prompt: tokens of a prompt. signal: share of the groups whose rewards
    differ; the others are all wrong.
    """

    lengths: Callable[[int], int]
    prompt: int = 128
    signal: float = 1.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """`Hardware(engines=6, trainers=2)`: 8 devices; `Hardware(engines=8, trainers=0)`: 8 that take turns at both."""

    engines: int
    trainers: int

    @property
    def devices(self) -> int:
        return self.engines + self.trainers

    @property
    def training(self) -> int:
        return self.trainers or self.engines


@dataclass(frozen=True, slots=True)
class Steady:
    """How a schedule went, in its steady state: the first and the last steps do not count.

    tokens_per_second, samples_per_second: of what was trained on. engine_idle, trainer_idle: shares of the time.
    staleness, staleness_max: of tokens, as the loops measured them. dropped, overdue, refilled: groups a step that the
    filter dropped, that no batch waited for, and that took the place of others or were asked beside them. restarts: of
    engines, in the whole run. speedup: over max_staleness = 0 on the same number of devices; None: not compared.
    """

    devices: int
    engines: int
    trainers: int
    max_staleness: int
    step_seconds: float
    tokens_per_second: float
    samples_per_second: float
    engine_idle: float
    trainer_idle: float
    staleness: float
    staleness_max: int
    dropped: float
    overdue: float
    refilled: float
    restarts: int
    speedup: float | None = None

    @property
    def training_share(self) -> float:
        """Of the work of all devices, where they take turns."""
        training = 1 - self.trainer_idle
        return training / (training + 1 - self.engine_idle)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What to simulate: `config.pipeline.max_staleness` on that hardware, over `steps` steps of steady state."""

    config: RLConfig
    hardware: Hardware
    times: Times
    work: Work
    steps: int

    def bounded(self, bound: int) -> "Schedule":
        settings = [f"pipeline.max_staleness={bound}", *(["pipeline.overdue=wait"] if bound == 0 else [])]
        return replace(self, config=override_config(self.config, settings))


def study(
    config: RLConfig,
    devices: Sequence[int],
    staleness: Sequence[int],
    times: Times,
    work: Work,
    *,
    steps: int = 20,
    sequences: int | None = None,
    trainers: float | None = None,
    generation_share: float | None = None,
) -> Iterator[tuple[Schedule, Steady]]:
    """Each bound of staleness on each number of devices.

    With max_staleness = 0, all devices generate and then all train. With more, `trainers` of them train while the
    others generate: a number, or a share of the devices if it is below 1; None: as many as are best. sequences:
    responses of a step for each device, instead of the recipe's prompts_per_step.
    generation_share: of a synchronous step, with all that is not training; the rate of training is set to give that.
    """
    fewest = min(devices)
    split = _split(trainers or 1, fewest)
    if any(staleness) and fewest <= split:
        raise ConfigError(
            f"max_staleness above 0 needs at least {split + 1} devices, {split} to train and others to generate, "
            f"got {fewest}"
        )
    for number in devices:
        sized = config
        if sequences is not None:
            prompts = max(1, round(sequences * number / config.training.group_size))
            sized = override_config(config, [f"training.prompts_per_step={prompts}"])
        plan = Schedule(sized, Hardware(number, 0), times, work, steps)
        if generation_share is not None:
            plan = _with_share(plan, generation_share)
        turns = plan.bounded(0)
        base = simulate(turns)
        for bound in staleness:
            schedule, found = turns, base
            if bound > 0:
                ahead = plan.bounded(bound)
                split = _best_split(ahead, base) if trainers is None else _split(trainers, number)
                schedule = replace(ahead, hardware=Hardware(number - split, split))
                found = simulate(schedule)
            yield schedule, replace(found, speedup=found.tokens_per_second / base.tokens_per_second)


def simulate(schedule: Schedule, folder: Path | None = None) -> Steady:
    """Run a schedule; `folder`, if given, gets the metrics and the timeline."""
    hardware, steps = schedule.hardware, schedule.steps
    bound = schedule.config.pipeline.max_staleness
    edge = bound + 1  # steps until the buffer is in its stride, and while it runs dry
    config = override_config(
        schedule.config,
        [
            f"training.steps={steps + 2 * edge}",
            f"checkpoint.every={steps + 2 * edge}",
            f"engine.kind={'process' if hardware.trainers else 'native'}",
            f"pipeline.stall_limit={_STALL}",
            "eval.prompts=0",
            "eval.every=0",
        ],
    )
    with tempfile.TemporaryDirectory(prefix="kitae-simulation-") as scratch:
        store = RunStore(folder or Path(scratch), config, NoJournal())
        try:
            with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                watch, refills, restarts = runner.run(_run(store, hardware, schedule.times, schedule.work))
        finally:
            store.close()
    rows = watch.rows[edge : edge + steps]
    seconds = rows[-1]["ended"] - watch.rows[edge - 1]["ended"]
    return Steady(
        devices=hardware.devices,
        engines=hardware.engines,
        trainers=hardware.trainers,
        max_staleness=bound,
        step_seconds=seconds / steps,
        tokens_per_second=_total(rows, "response_tokens") / seconds,
        samples_per_second=_total(rows, "samples_trained") / seconds,
        engine_idle=max(0.0, 1 - _total(rows, "generate_seconds") / seconds),
        trainer_idle=max(0.0, 1 - _total(rows, "train_seconds") / seconds),
        staleness=_total(rows, "staleness") / steps,
        staleness_max=max(row["staleness_max"] for row in rows),
        dropped=_total(rows, "groups_dropped") / steps,
        overdue=_total(rows, "overdue") / steps,
        refilled=refills / config.training.steps,
        restarts=restarts,
    )


async def _run(store: RunStore, hardware: Hardware, times: Times, work: Work) -> "tuple[_Watch, int, int]":
    """What the loops reported, and how many groups were refilled and engines restarted."""
    config = reinforcement(store.config, "a simulation")
    pace = Pace(
        times.step, times.sequence, times.prefill, config.engine.max_batch, times.sync, times.life, times.restart
    )
    answer: tuple[int, ...] = (0,) * config.sampling.max_tokens

    def respond(request: Request) -> Sequence[int]:
        return answer[: work.lengths(request.seed)]

    shared = hardware.trainers == 0
    seeds = range(hardware.engines)
    engine = EnginePool.of([FakeEngine(respond, pace, seed=seed, shares_weights=shared) for seed in seeds])
    sampling = SamplingParams(max_tokens=config.sampling.max_tokens)
    chat = Chat(_Tokenizer(work.prompt))
    runner = Episodes(
        engine, chat, _Judge(times.verify), SingleTurn, sampling, config.run.seed, limits=EpisodeLimits(turns=1)
    )
    stream = PromptStream(_prompts(work.signal), None, seed=config.run.seed, shuffle=False)
    learner = _Learner(config, times, hardware.training)
    weights = WeightSync(_NoWeights(), engine, recompute=config.pipeline.in_flight == "recompute", tolerance=0.0)
    watch = _Watch()
    pipeline = Pipeline(config, store, stream, runner, engine, learner, weights, watch, Frontier(0, 0), NoEvaluations())
    await pipeline.run()
    return watch, pipeline.issuing.cursor - pipeline.issuing.issued, engine.stats().restarts


def _split(trainers: float, devices: int) -> int:
    return int(trainers) if trainers >= 1 else max(1, round(trainers * devices))


def _best_split(schedule: Schedule, base: Steady) -> int:
    """The number of trainers with the highest throughput, to a sixteenth of the devices: up and down from what the
    synchronous run suggests, in short runs."""
    devices = base.devices
    brief = replace(schedule, steps=max(2, schedule.steps // 4))
    found = {0: -math.inf, devices: -math.inf}

    def throughput(trainers: int) -> float:
        trainers = min(max(0, trainers), devices)
        if trainers not in found:
            split = Hardware(devices - trainers, trainers)
            found[trainers] = simulate(replace(brief, hardware=split)).tokens_per_second
        return found[trainers]

    best = min(max(1, round(devices * base.training_share)), devices - 1)
    stride = max(1, devices // 8)
    while stride >= max(1, devices // 16):
        better = max((best, best + stride, best - stride), key=throughput)
        if better == best:
            stride //= 2
        best = better
    return best


def _with_share(schedule: Schedule, share: float) -> Schedule:
    """With a rate of training under which all else, generation and the waiting for it, takes that share of a step."""
    found, times = simulate(schedule.bounded(0)), schedule.times
    training = (1 - found.trainer_idle) * found.step_seconds
    wanted = (found.step_seconds - training) * (1 - share) / share
    rate = times.train * (training - times.fixed) / wanted
    return replace(schedule, times=replace(times, fixed=0.0, train=rate))


def _total(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(sum(row.get(key) or 0.0 for row in rows))


# What stands in for the slow parts.


class _NoWeights:
    """A `WeightSource` that has nothing to load."""

    async def publish(self, version: int, *, in_full: bool = False) -> None:
        return None

    async def probe(self) -> tuple[float, ...]:
        return ()


class _Learner(Learner):
    """Drops groups as the algorithm does; a batch takes time, and changes nothing."""

    updates = 0

    def __init__(self, config: RLConfig, times: Times, devices: int) -> None:
        self.groups = GroupStages(config.algorithm, config.sampling.max_tokens)
        self.control = Control(config.algorithm)
        self._fixed, self._rate, self._epochs = times.fixed, times.train * devices, config.training.epochs

    async def learn(
        self,
        step: int,
        groups: Sequence[Group],
        dropped: Sequence[Group] = (),
        before_update: Callable[[], Awaitable[None]] = no_wait,
    ) -> Learnt:
        rollouts = [r for g in groups for r in g.rollouts]
        response = sum(r.response_length for r in rollouts)
        tokens = response + sum(len(g.rollouts[0].chains[0].prompt_tokens) for g in groups)  # each prompt once
        seconds = self._fixed + self._epochs * tokens / self._rate if tokens else 0.0
        await asyncio.sleep(seconds)
        began = now()
        await before_update()
        numbers = {"train_tokens": float(tokens), "response_tokens": float(response)}
        return Learnt(1, len(rollouts), 0, numbers, {"train": seconds, "hold": now() - began})

    async def save(self, folder: Path, state: str) -> None:
        pass


class _Tokenizer:
    """Every prompt has the same number of tokens, and no response has a text."""

    eos_token_id = bos_token_id = None

    def __init__(self, prompt: int) -> None:
        self._prompt = [0] * prompt

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self._prompt if text else []}

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return ""


class _Judge:
    """Right and wrong in turn where the prompt has a signal, else wrong; each verdict after the same time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._turns: dict[str, Iterator[int]] = {}

    async def score(self, response: str | LazyText, reference: Any, context: Mapping[str, Any]) -> Score:
        await asyncio.sleep(self._seconds)
        turn = next(self._turns.setdefault(reference, count()))
        return Score(float(turn % 2) if context["signal"] else 0.0)


def _prompts(signal: float) -> Callable[[int], Prompt]:
    def read(index: int) -> Prompt:
        name = f"simulated/{index}"
        differ = (index + 1) * signal % 1 < signal  # evenly spread
        return Prompt(name, (Message("user", name),), name, {"signal": differ})

    return read


class _Watch(Silent):
    """Keeps the rows, and when each step ended."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def step(self, report: Reported) -> None:
        self.rows.append({**report.row(), "ended": now()})
