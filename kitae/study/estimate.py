"""What a run will need, worked out without loading the model: for `kitae train --dry-run`.

Time is matrix products at the speed that this machine has just now for products of the model's shape and dtype, and
memory traffic (activations, optimizer) at the speed of a copy. Responses are taken as half to fully as long as they
may be. Attention over long contexts, the verifier and other programs on the machine are left out.
"""

import json
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kitae.config.root import DistilConfig, RLConfig
from kitae.data.prompts import open_stream
from kitae.evaluation.suites import find_suites, own_suite
from kitae.kernels.cpu import amx
from kitae.models.load import SMOLLM2, find_model, pick_device, pick_dtype
from kitae.trainer.forward import token_budget

if TYPE_CHECKING:
    import torch

_KNOWN = {SMOLLM2: 134_515_008}
_BASE_GB = 0.7  # interpreter and libraries
_ACTIVATIONS = 34  # bytes of activations by token, layer and hidden unit, for each byte of the dtype
_TRAFFIC = 10  # how often training moves its activations
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
class ModelShape:
    """What a model's folder says without being loaded: `ModelShape(parameters=134_515_008, hidden=576, …)`."""

    parameters: int
    hidden: int
    inner: int
    layers: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes by what they hold, and seconds. None: the model is not here, so its size is not known."""

    device: "torch.device"
    dtype: "torch.dtype"
    model: ModelShape | None = None
    memory: dict[str, float] | None = None
    generation: Range = Range(0, 0)
    training: Range = Range(0, 0)
    evaluations: Range = Range(0, 0)
    run: Range = Range(0, 0)


def estimate(config: RLConfig) -> Estimate:
    device = pick_device(config.model.device)
    dtype = pick_dtype(config.model.dtype, device)
    model = read_model(config.model.path)
    if model is None:
        return Estimate(device, dtype)
    t, e = config.training, config.eval
    machine = Machine(device, dtype, model)
    prompt = _prompt_tokens(config)
    responses, longest = t.prompts_per_step * t.group_size, config.sampling.max_tokens
    batch = config.engine.max_batch

    def generate(prompts: int, samples: int, tokens: int) -> Range:
        return machine.generate(prompts, prompts * samples, prompt, tokens, batch)

    generation = generate(t.prompts_per_step, t.group_size, longest)
    shared = t.prompts_per_step if t.share_prompts else responses
    half, full = (shared * prompt + responses * length for length in (longest / 2, longest))
    models = _extra_models(config, model.parameters, dtype.itemsize)
    passes = t.epochs * (2 if "critic" in models else 1) + len(models) / 3
    trained = _trained(config, model)
    row = min(token_budget(t, device), full)
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
    saves = (t.steps // config.checkpoint.every + 1) * trained * (4 + _moments(config)) / _DISK
    fixed = _START[device.type] + saves
    whole = (generation + training) * t.steps + evaluations + Range(fixed / 2, fixed)
    memory = _memory(config, model, device, dtype, full, models)
    return Estimate(device, dtype, model, memory, generation, training, evaluations, whole)


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
        traffic = tokens * passes * _TRAFFIC * _activations(self.model, self.dtype.itemsize) / self.bandwidth
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
        work = 2 * self.model.parameters * tokens
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


def read_model(path: str) -> ModelShape | None:
    """From config.json and the headers of the weights; None for a model that is not here yet."""
    folder = find_model(path, download=False)
    shape: dict[str, Any] = {}
    if folder and (folder / "config.json").is_file():
        shape = json.loads((folder / "config.json").read_text())
    parameters = _KNOWN.get(path) or (count_parameters(folder) if folder else None)
    if parameters is None:
        return None
    hidden = shape.get("hidden_size", 576)
    return ModelShape(
        parameters=parameters,
        hidden=hidden,
        inner=shape.get("intermediate_size", 8 * hidden // 3),
        layers=shape.get("num_hidden_layers", 30),
        vocabulary=shape.get("vocab_size", 49152),
    )


def count_parameters(folder: Path) -> int | None:
    """From the headers of the safetensors files; nothing is read but those."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        for name, tensor in header.items():
            if name != "__metadata__":
                count = 1
                for n in tensor["shape"]:
                    count *= n
                total += count
    return total or None


def _memory(
    config: RLConfig,
    model: ModelShape,
    device: "torch.device",
    dtype: "torch.dtype",
    tokens: float,
    models: dict[str, int],
) -> dict[str, float]:
    t, half = config.training, dtype.itemsize == 2
    state = model.parameters * dtype.itemsize + _trained(config, model) * ((4 if half else 0) + 4 + _moments(config))
    activations = min(token_budget(t, device), tokens) * _activations(model, dtype.itemsize)
    found = {
        "weights and optimizer": state,
        "activations": activations / (12 if t.checkpoint_activations else 1),
        "logits": t.logit_chunk * model.vocabulary * 8,
        "cache": config.engine.memory_gb * 2**30,
        **models,
        "libraries": _BASE_GB * 2**30,
    }
    if half and device.type == "cpu" and config.engine.fast and not config.model.lora_rank and amx.available():
        found["packed weights"] = model.parameters * dtype.itemsize
    return found


def _activations(model: ModelShape, itemsize: int) -> int:
    """Bytes that training holds for each token."""
    return model.hidden * model.layers * _ACTIVATIONS * itemsize


def _trained(config: RLConfig, model: ModelShape) -> int:
    return model.parameters if config.model.lora_rank == 0 else model.parameters // 50


def _moments(config: RLConfig) -> int:
    """Bytes for each trained parameter."""
    return 4 if config.training.moments == "bfloat16" else 8


def _extra_models(config: RLConfig, parameters: int, itemsize: int) -> dict[str, int]:
    """Bytes of the models that the algorithm wants beside the policy."""
    a = config.algorithm
    found = {}
    if a.kl_coef and a.reference not in (None, "none"):
        shared = config.model.lora_rank > 0 and a.reference == "frozen"
        found["reference"] = 0 if shared else parameters * itemsize
    if isinstance(config, DistilConfig) and config.method.teacher:
        teacher = read_model(config.method.teacher)
        found["teacher"] = (parameters if teacher is None else teacher.parameters) * itemsize
    if a.advantage == "gae":
        found["critic"] = parameters * (itemsize + (4 if itemsize == 2 else 0) + 4 + _moments(config))
    return found


def _prompt_tokens(config: RLConfig) -> float:
    """Mean length of the first prompts, guessed from their characters; those of the hub are not fetched for it."""
    if config.data.hub:
        return _PROMPT_TOKENS
    stream = open_stream(config.data, config.run.seed)
    prompts = [stream.at(i) for i in range(_SAMPLED)]
    messages = [m for prompt in prompts for m in prompt.messages]
    return (sum(len(m.content) for m in messages) / _CHARACTERS + _TURN * len(messages)) / len(prompts)
