"""Which runner a policy gets."""

from kitae.engines.config import EngineConfig
from kitae.engines.native.cpu_runner import CpuRunner
from kitae.engines.native.page_cache import KVCache
from kitae.engines.native.runner import ModelRunner
from kitae.errors import EngineError
from kitae.kernels.cpu import packed
from kitae.kernels.devices import has_triton
from kitae.models.adapters import adapted_layers
from kitae.models.policy import Policy


def make_runner(
    policy: Policy, cache: KVCache, config: EngineConfig, *, plain: bool = False, draft_tokens: int = 0
) -> ModelRunner:
    """Kernels and graphs on a GPU with Triton, a compiled decoder on a CPU, else the policy's own modules, which also
    run where rows have adapters of their own.

    plain: the policy's own modules and torch, without kernels. draft_tokens: of each sequence, see `ModelRunner`.
    """
    float8, proves = config.weights_dtype == "float8", config.proof.share > 0
    for setting, value, rounds in (
        ("cache_dtype", config.cache_dtype, cache.eight_bits),
        ("weights_dtype", config.weights_dtype, float8),
    ):
        if policy.exact and rounds:
            raise EngineError(f"an exact policy needs engine.{setting} = 'model', got {value!r}: 8 bits are not exact")
    if policy.exact and plain:
        raise EngineError("an exact policy runs on kernels of its own, got a plain engine, which has none")
    if adapted_layers(policy):  # rows of a pass differ: a graph, or merged weights, would be those of one adapter
        plain = plain or cache.eight_bits
        return ModelRunner(policy, cache, plain=plain, draft_tokens=draft_tokens, proves=proves)
    if policy.exact and policy.device.type == "cpu":
        return ModelRunner(policy, cache, draft_tokens=draft_tokens, proves=proves)
    if policy.vision is not None and policy.device.type != "cpu":
        return ModelRunner(policy, cache, plain=plain, draft_tokens=draft_tokens, proves=proves)
    if not plain and policy.device.type == "cuda" and has_triton() and not cache.states:
        from kitae.engines.native.gpu_runner import CudaRunner

        return CudaRunner(policy, cache, config.max_batch, float8=float8, draft_tokens=draft_tokens, proves=proves)
    plain = plain or cache.eight_bits  # kernels of a CPU read the model's own dtype
    if not plain and policy.device.type == "cpu" and packed.available(policy.dtype):
        return CpuRunner(policy, cache, float8=float8, draft_tokens=draft_tokens, proves=proves)
    if float8:
        raise EngineError(
            "engine.weights_dtype = 'float8' needs kernels of a GPU or of this CPU for what the model and "
            f"engine.cache_dtype = {config.cache_dtype!r} are in, got {policy.device.type} in {policy.dtype}"
        )
    return ModelRunner(policy, cache, plain=plain, draft_tokens=draft_tokens, proves=proves)
