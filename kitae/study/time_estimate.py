"""What a run will need, worked out without loading the model: for `kitae train --dry-run`.

Time is matrix products at the speed that this machine has just now for products of the model's shape and dtype, and
memory traffic (activations, optimizer) at the speed of a copy. Responses are taken as half to fully as long as they
may be. Attention over long contexts, the verifier and other programs on the machine are left out.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

from kitae.config.root import RLConfig
from kitae.data.prompt_stream import open_stream
from kitae.evaluation.suites import find_suites, own_suite
from kitae.models.load import pick_device, pick_dtype
from kitae.study.memory_estimate import (
    Footprint,
    batch_tokens,
    footprint,
    is_spread,
    moment_bytes,
    other_models,
    trained_parameters,
)
from kitae.study.model_shape import ModelShape, read_model
from kitae.trainer.forward import token_budget

if TYPE_CHECKING:
    import torch

_TRAFFIC = 340  # bytes that training moves by token, layer and hidden unit, for each byte of the dtype
_OPTIMIZER = 30  # bytes that an update moves for each trained parameter
_DISK = 0.5e9  # bytes a second, with checksums
_START = {"cpu": 15.0, "cuda": 30.0}  # seconds: libraries, loading, probes
_DECODE_STEP = 0.002  # seconds beside the products: launches, sampling, the scheduler
_PROMPT_TOKENS, _CHARACTERS, _TURN = 128, 3, 8  # of a prompt that is not at hand; in a token; tokens around a turn
_SAMPLED = 8  # prompts
_MEASURE = 0.12  # seconds for each product


@dataclass(frozen=True, slots=True)
class Range:
    """`Range(1.5, 3.0)`."""

    low: float
    high: float

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> "Range":
        return Range(self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory, and seconds. model: None if it is not here, so that its size is not known; memory: also for a cluster."""

    device: "torch.device"
    dtype: "torch.dtype"
    model: ModelShape | None = None
    memory: Footprint | None = None
    generation: Range = Range(0, 0)
    training: Range = Range(0, 0)
    evaluations: Range = Range(0, 0)
    run: Range = Range(0, 0)


def estimate(config: RLConfig) -> Estimate:
    device = pick_device("auto" if config.cluster.backend == "ray" else config.model.device)
    dtype = pick_dtype(config.model.dtype, device)
    model = read_model(config.model.path)
    if model is None:
        return Estimate(device, dtype)
    t, e = config.training, config.eval
    machine = Machine(device, dtype, model)
    prompt = _prompt_tokens(config)
    longest, batch = config.sampling.max_tokens, config.engine.max_batch

    def generate(prompts: int, samples: int, tokens: int) -> Range:
        return machine.generate(prompts, prompts * samples, prompt, tokens, batch)

    generation = generate(t.prompts_per_step, t.group_size, longest)
    half, full = (batch_tokens(config, prompt, length) for length in (longest / 2, longest))
    models = other_models(config, model, dtype.itemsize)
    passes = t.epochs * (2 if "critic" in models else 1) + len(models) / 3
    trained = trained_parameters(config, model)
    row = min(token_budget(t, device, dtype), full)
    updates = t.epochs * t.minibatches
    training = Range(
        machine.train(half, passes, row).low + updates * machine.update(trained),
        machine.train(full, passes, row).high + updates * machine.update(trained),
    )
    evaluations = Range(0, 0)
    if e.prompts:
        for suite in (own_suite(config), *find_suites(e.suites, e.data, config)):
            once = generate(e.prompts, e.samples, e.max_tokens or suite.max_tokens)
            evaluations += once * (2 + (t.steps // e.every if e.every else 0))
    saves = (t.steps // config.checkpoint.every + 1) * trained * (4 + moment_bytes(config)) / _DISK
    fixed = _START[device.type] + saves
    most = 60 * t.minutes or inf
    steps = (generation + training) * t.steps
    whole = Range(min(steps.low, most), min(steps.high, most)) + evaluations + Range(fixed / 2, fixed)
    needs = None if is_spread(config) else footprint(config, model, device, dtype, full)
    return Estimate(device, dtype, model, needs, generation, training, evaluations, whole)


class Machine:
    """Speed of a device for products of a model's shape, measured for a moment when it is asked for."""

    def __init__(self, device: "torch.device", dtype: "torch.dtype", model: ModelShape) -> None:
        self.device = device
        self.dtype = dtype
        self.model = model
        self._rates: dict[int, Range] = {}
        self._bandwidth: float | None = None

    def generate(self, prompts: int, responses: int, prompt: float, longest: int, batch: int) -> Range:
        """Prompts computed once each, then token by token, at most `batch` responses together."""
        rows = min(responses, batch)
        rounds = responses / rows
        step = self._products(rows, rows)
        prefill = self._products(prompts * prompt, 512)
        more = _DECODE_STEP * rounds * longest
        return Range(
            prefill.low + step.low * rounds * longest / 2 + more / 2, prefill.high + step.high * rounds * longest + more
        )

    def train(self, tokens: float, passes: float, rows: float) -> Range:
        """Forward and backward."""
        moved = _TRAFFIC * self.model.hidden * self.model.layers * self.dtype.itemsize
        traffic = tokens * passes * moved / self.bandwidth
        products = self._products(3 * passes * tokens, max(16, int(rows)))
        return products + Range(traffic, traffic)

    def update(self, trained: int) -> float:
        return trained * _OPTIMIZER / self.bandwidth

    @property
    def bandwidth(self) -> float:
        """Bytes a second of a copy, read and written."""
        if self._bandwidth is None:
            import torch

            x = torch.zeros(2**24, device=self.device)
            y = torch.empty_like(x)
            best, _ = self._time(lambda: y.copy_(x))
            self._bandwidth = 2 * x.numel() * x.itemsize / best
        return self._bandwidth

    def _products(self, tokens: float, rows: int) -> Range:
        """Seconds for all weights on so many tokens, `rows` at a time; low: as fast as was seen, high: as usual."""
        if rows not in self._rates:
            self._rates[rows] = self._measure(min(rows, 8192))
        work = 2 * self.model.active * tokens
        return Range(work / self._rates[rows].high, work / self._rates[rows].low)

    def _measure(self, rows: int) -> Range:
        """FLOP/s of a layer's products. Several weights take turns, as layers do."""
        import torch

        hidden, inner = self.model.hidden, self.model.inner
        x = torch.randn(rows, hidden, device=self.device).to(self.dtype)
        weights = [torch.randn(inner, hidden, device=self.device).to(self.dtype) for _ in range(4)]
        best, usual = self._time(lambda: [torch.nn.functional.linear(x, w) for w in weights])
        work = len(weights) * 2 * rows * hidden * inner
        return Range(work / usual, work / best)

    def _time(self, work: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of one call: the best and the median."""
        import torch

        def wait() -> None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        work()
        wait()
        times: list[float] = []
        while sum(times) < _MEASURE or len(times) < 3:
            began = time.perf_counter()
            work()
            wait()
            times.append(time.perf_counter() - began)
        return min(times), median(times)


def _prompt_tokens(config: RLConfig) -> float:
    """Mean length of the first prompts, guessed from their characters; those of the hub are not fetched for it."""
    if config.data.hub:
        return _PROMPT_TOKENS
    stream = open_stream(config.data, config.run.seed)
    prompts = [stream.at(i) for i in range(_SAMPLED)]
    messages = [m for prompt in prompts for m in prompt.messages]
    return (sum(len(m.content) for m in messages) / _CHARACTERS + _TURN * len(messages)) / len(prompts)
