"""What a run will hold at its peak, worked out without loading the model, and which settings would make it less.

The peak is in a backward pass: everything that lasts (weights, masters, gradients, moments, other models, the cache)
and the activations of one row. On a CPU only what is touched counts, so of the cache the tokens that are in it, and of
weights that an engine has packed nothing where it gives them back while the trainer works; a GPU's cache is there from
the beginning. Servers of other people are left out, as are a reward model that judges answers and
whatever environments hold.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kitae.config.recipe import override_config
from kitae.config.root import DistilConfig, RLConfig
from kitae.engines.native.page_cache import PAGE_SIZE
from kitae.errors import ConfigError
from kitae.kernels.cpu import packed
from kitae.models.four_bits import BYTES
from kitae.models.load import pick_device, pick_dtype
from kitae.observe.machine import free_memory
from kitae.study.model_shape import ModelShape, read_model
from kitae.trainer.forward import logit_chunk, token_budget

if TYPE_CHECKING:
    import torch

_PROMPT = 128  # tokens
_HOLES = {"cpu": 1.3, "cuda": 1.0}  # what activations take with the holes that they leave in the heap
_LIBRARIES = {"cpu": 0.75e9, "cuda": 0.6e9}  # bytes: interpreter and torch; what CUDA takes for itself
_FUSED = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "olmo2", "mixtral", "qwen3_moe")
_NORMED_HEADS = ("qwen3", "qwen3_moe", "olmo2")  # of these
_UNPACKED = 8.0  # bytes of a weight in 4 bits while it computes: its number, times its scale, in the model's dtype
_PLAIN = 3.4  # how much more is kept where the layers are the modules' own, or have adapters


@dataclass(frozen=True, slots=True)
class Footprint:
    """`Footprint({"weights": 2.7e8, "activations": 3.5e8, …}, room=16e9)`: bytes by what they hold; what is free now.

    relief: settings that would make it fit, if it does not and any would.
    """

    parts: dict[str, float]
    room: float
    relief: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.room


def is_spread(config: RLConfig) -> bool:
    """Whether the run is in worker processes: then no single memory must hold it, and nothing is said of any."""
    return config.cluster.backend != "none"


def glance(config: RLConfig) -> Footprint | None:
    """Before a run, with a guess of its prompts. None: the model is not here yet, or the run is spread."""
    model = read_model(config.model.path)
    if model is None or is_spread(config):
        return None
    device = pick_device(config.model.device)
    tokens = batch_tokens(config, _PROMPT, config.sampling.max_tokens)
    return footprint(config, model, device, pick_dtype(config.model.dtype, device), tokens)


def batch_tokens(config: RLConfig, prompt: float, answer: float) -> float:
    """Of a step: answers of that length, and prompts as often as they are computed."""
    t = config.training
    responses = t.prompts_per_step * t.group_size
    return (t.prompts_per_step if not config.model.plain else responses) * prompt + responses * answer


def footprint(
    config: RLConfig, model: ModelShape, device: "torch.device", dtype: "torch.dtype", tokens: float
) -> Footprint:
    """tokens: of a batch, prompts as often as they are computed."""
    free = room(device)
    parts = hold(config, model, device, dtype, tokens, free)
    chosen: dict[str, str] = {}
    least = sum(parts.values())
    for name, value in _savings(config, device, dtype) if least > free else ():
        settings = {**chosen, name: value}
        try:
            changed = override_config(config, _as_overrides(settings))
        except ConfigError:  # not beside what the user has chosen
            continue
        size = sum(hold(changed, model, device, dtype, tokens, free).values())
        if size < 0.98 * least:
            chosen, least = settings, size
        if least <= free:
            return Footprint(parts, free, tuple(_as_overrides(chosen)))
    return Footprint(parts, free)


def _as_overrides(settings: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]


def hold(
    config: RLConfig,
    model: ModelShape,
    device: "torch.device",
    dtype: "torch.dtype",
    tokens: float,
    free: float = math.inf,
) -> dict[str, float]:
    """Bytes by what they hold, where so much is free."""
    t, size = config.training, dtype.itemsize
    trained = trained_parameters(config, model)
    row = min(tokens, max(token_budget(t, device, dtype), _PROMPT + config.sampling.max_tokens))
    passing = row * _kept(config, model, device, size) + _logits(config, model, device, size, row)
    gradients = 4.0 * trained
    parts = {
        "weights": _weights(config, model, size),
        **_beyond_weights(config, trained, size),
        "moments": float(trained * moment_bytes(config)),
        # With a single row there are gradients only where activations are gone.
        "gradients": gradients if tokens > row else max(0.0, gradients - passing),
        "activations": passing,
        "cache": _cache(config, model, device, size),
        **_engines(config, model, device, size),
        **_copies(config, model, device, dtype),
        **other_models(config, model, size),
        "libraries": _LIBRARIES[device.type],
    }
    if device.type == "cpu":
        return _in_turns(config, parts)
    left = free - parts["weights"] - parts["cache"]
    if config.engine.weights_dtype == "model" and parts.get("merged weights", 0.0) > left / 2:  # as the engine decides
        del parts["merged weights"]
    return parts


def _in_turns(config: RLConfig, parts: dict[str, float]) -> dict[str, float]:
    """The peak where engine and trainer work in turns. The engine gives its copies back before the trainer needs memory
    for gradients and activations, so the larger of the two is counted: the engine's part is what it exceeds them by."""
    e = config.engine
    if e.kind != "native" or (config.pipeline.max_staleness > 0 and e.keep_cache):
        return parts
    given_back = {"packed weights", "merged weights"} | (set() if e.keep_cache else {"cache"})
    engine = sum(parts.get(name, 0.0) for name in given_back)
    more = max(0.0, engine - parts["gradients"] - parts["activations"])
    return {name: size * more / engine if engine and name in given_back else size for name, size in parts.items()}


def _weights(config: RLConfig, model: ModelShape, size: int) -> float:
    """In 4 bits: those of all layers' linear maps, of which the largest is there in float32 while it computes."""
    if config.model.lora_base != "nf4":
        return float(model.parameters * size)
    sizes = [size for names, size in model.products.items() if names & model.projections.keys()]
    maps = model.layers * sum(sizes)
    return (model.parameters - maps) * size + maps * BYTES + _UNPACKED * max(sizes)


def _engines(config: RLConfig, model: ModelShape, device: "torch.device", size: int) -> dict[str, float]:
    """Of engines in processes of their own: weights, libraries, and what is published for them."""
    if config.engine.kind != "process":
        return {}
    each = _weights(config, model, size) + _LIBRARIES[device.type]
    return {"engines": config.engine.count * each, "published weights": float(trained_parameters(config, model) * size)}


def _copies(config: RLConfig, model: ModelShape, device: "torch.device", dtype: "torch.dtype") -> dict[str, float]:
    """Weights in the form that an engine's decoder wants; exact engines and those without kernels use the model's."""
    e, adapted = config.engine, config.model.lora_rank > 0
    if config.model.plain or e.serves or config.model.exact or config.model.lora_base == "nf4":
        return {}
    found = {}
    if adapted:
        found["merged weights"] = float(e.count * dtype.itemsize * model.layers * _merged(config, model))
    if device.type == "cuda" and e.weights_dtype == "float8":
        found["weights in 8 bits"] = float(e.count * model.layers * (sum(model.products.values()) - _out(model)))
    if device.type == "cpu":
        if e.cache_dtype == "int8" or not packed.available(dtype):
            return {}
        found["packed weights"] = float(e.count * model.parameters * dtype.itemsize)
    return found


def _merged(config: RLConfig, model: ModelShape) -> int:
    """Weights of a layer's products that an adapter adds to: if to a part of one, all of it is copied."""
    named = _targets(config, model)
    return sum(size for names, size in model.products.items() if named & names)


def _out(model: ModelShape) -> int:
    """Weights of a layer's output projection, which has no copy in 8 bits."""
    return model.products[frozenset({"o_proj"})]


def trained_parameters(config: RLConfig, model: ModelShape) -> int:
    rank = config.model.lora_rank
    if not rank:
        return model.parameters
    named = _targets(config, model)
    return rank * model.layers * sum(size for name, size in model.projections.items() if name in named)


def _targets(config: RLConfig, model: ModelShape) -> set[str]:
    """Names of the maps that get adapters."""
    targets = config.model.lora_targets
    return set(model.projections) if targets == "all-linear" else {name.strip() for name in targets.split(",")}


def _beyond_weights(config: RLConfig, trained: int, size: int) -> dict[str, float]:
    """What is trained and no weight of the model, or lacks something of fp32."""
    if config.model.lora_rank:
        return {"adapters": 4.0 * trained}
    return {"masters": 2.0 * trained if size == 2 else 0.0}


def moment_bytes(config: RLConfig) -> int:
    """For each trained parameter."""
    return 4 if config.training.moments == "bfloat16" else 8


def other_models(config: RLConfig, model: ModelShape, size: int) -> dict[str, float]:
    """What the algorithm wants beside the policy."""
    a, parameters, trained = config.algorithm, model.parameters, trained_parameters(config, model)
    found: dict[str, float] = {}
    if a.kl.coef and a.reference.name not in (None, "none"):
        copied = 4.0 * trained if config.model.lora_rank else parameters * size
        found["reference"] = copied + (4.0 * trained if a.reference.name == "ema" else 0.0)
    if isinstance(config, DistilConfig) and config.method.teacher.path:
        teacher = read_model(config.method.teacher.path)
        found["teacher"] = (parameters if teacher is None else teacher.parameters) * size
    if a.advantage.name == "gae":
        found["critic"] = parameters * (size + (2 if size == 2 else 0) + 4 + moment_bytes(config))
    return found


def room(device: "torch.device") -> float:
    """Bytes that this process could take now."""
    if device.type == "cuda":
        import torch

        return float(torch.cuda.mem_get_info(device)[0])
    left = free_memory()
    return math.inf if left is None else left


def _kept(config: RLConfig, model: ModelShape, device: "torch.device", size: int) -> float:
    """Bytes of activations that a token leaves for the backward pass.

    Of a fused layer: what enters it, queries, keys and values, what attention gives, what enters the MLP, gate and up;
    also what enters norms of queries and keys.
    Where they are computed again, what enters each layer, and one layer's. Experts have no adapters, so on a CPU they
    are fused beside them.
    """
    wide = (model.heads + 2 * model.kv_heads) * model.head_dim
    if model.kind in _NORMED_HEADS:
        wide += (model.heads + model.kv_heads) * model.head_dim
    attention, mlp = size * (3 * model.hidden + wide), size * 2 * model.inner
    if config.training.checkpoint_activations:
        return size * model.hidden * model.layers + _PLAIN * (attention + mlp)
    known, adapted = model.kind in _FUSED and not config.model.plain, config.model.lora_rank > 0
    fused, apart = _HOLES[device.type], model.mixture and device.type == "cpu"
    of_attention = fused if known and not adapted else _PLAIN
    of_mlp = fused if known and (apart or not adapted) else _PLAIN
    return (of_attention * attention + of_mlp * mlp) * model.layers


def _logits(config: RLConfig, model: ModelShape, device: "torch.device", size: int, row: float) -> float:
    """A chunk of them, which its gradient overwrites, and the gradient of the head, which a CPU adds where it stays."""
    of_one, head = (size + 1, 0) if device.type == "cpu" else (size, 4 * model.vocabulary * model.hidden)
    return min(row, logit_chunk(config.training, device)) * model.vocabulary * of_one + head


def _cache(config: RLConfig, model: ModelShape, device: "torch.device", size: int) -> float:
    """What a CPU's cache has no room for waits in the same memory."""
    t, e = config.training, config.engine
    if e.serves:
        return 0.0
    if device.type != "cpu":
        return e.count * e.memory_gb * 2**30
    whole = config.model.exact or config.model.lora_rank > 0  # adapters may change what makes keys and values
    of_token = model.cache_bytes(size, eight_bits=e.cache_dtype == "int8", whole=whole)
    together = min(e.count * e.max_batch, t.prompts_per_step * t.group_size)
    limit = e.count * (e.memory_gb + e.host_memory_gb) * 2**30
    return min(limit, of_token * together * (config.sampling.max_tokens + PAGE_SIZE))


def _savings(config: RLConfig, device: "torch.device", dtype: "torch.dtype") -> Iterator[tuple[str, str]]:
    """Settings that need less, those that change least first."""
    if config.engine.memory_gb > 1:
        yield "engine.memory_gb", "1"
    yield "training.moments", "bfloat16"
    budget = token_budget(config.training, device, dtype)
    while budget > (512 if device.type == "cpu" else 1024):
        budget //= 2
        yield "training.token_budget", str(budget)
    yield "training.checkpoint_activations", "true"
    if not config.model.lora_rank:
        yield "model.lora_rank", "16"
