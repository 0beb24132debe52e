"""Which runner a policy gets."""

from kitae.engines.config import EngineConfig
from kitae.engines.native.cpu_runner import CpuRunner
from kitae.engines.native.page_cache import KVCache
from kitae.engines.native.runner import ModelRunner
from kitae.errors import EngineError
from kitae.kernels.cpu import packed
from kitae.kernels.devices import has_triton
from kitae.models.policy import Policy


def make_runner(policy: Policy, cache: KVCache, config: EngineConfig) -> ModelRunner:
    """Kernels and graphs on a GPU with Triton, a compiled decoder on a CPU, else the policy's own modules."""
    if policy.exact and not config.fast:
        raise EngineError("an exact policy runs on kernels of its own, got engine.fast = false, which asks for none")
    if policy.exact and cache.eight_bits:
        raise EngineError("an exact policy needs engine.cache_dtype = 'model', got 'int8': 8 bits are not exact")
    eights = config.weights_dtype == "float8"
    if policy.exact and eights:
        raise EngineError("an exact policy needs engine.weights_dtype = 'model', got 'float8': 8 bits are not exact")
    if policy.exact and policy.device.type == "cpu":
        return ModelRunner(policy, cache, config.fast, config.guesses)
    if config.fast and policy.device.type == "cuda" and has_triton():
        from kitae.engines.native.gpu_runner import CudaRunner

        return CudaRunner(
            policy,
            cache,
            config.max_batch,
            merges=config.merge_adapters,
            eights=eights,
            guesses=config.guesses,
        )
    fast = config.fast and not cache.eight_bits  # kernels of a CPU read the model's own dtype
    if fast and policy.device.type == "cpu" and packed.available(policy.dtype):
        return CpuRunner(policy, cache, merges=config.merge_adapters, eights=eights, guesses=config.guesses)
    if eights:
        raise EngineError(
            "engine.weights_dtype = 'float8' needs kernels of a GPU or of this CPU for what the model and "
            f"engine.cache_dtype = {config.cache_dtype!r} are in, got {policy.device.type} in {policy.dtype}"
        )
    return ModelRunner(policy, cache, fast, config.guesses)
