"""What the native engine cannot do on this machine with this model, as far as that is known without weights."""

from kitae.engines.config import EngineConfig
from kitae.errors import ConfigError
from kitae.kernels import float8
from kitae.kernels.cpu import packed
from kitae.models.config import ModelConfig
from kitae.models.load import check_dense, pick_device, pick_dtype


def check_engine(engine: EngineConfig, model: ModelConfig, *, here: bool) -> None:
    """Raise `ConfigError` for what is impossible; here: the engine samples on this machine."""
    if engine.weights_dtype == "float8":
        check_dense(model, "engine.weights_dtype = 'float8'")
        if here:
            _check_float8(engine, model)


def _check_float8(engine: EngineConfig, model: ModelConfig) -> None:
    device = pick_device(model.device)
    dtype = pick_dtype(model.dtype, device)
    if device.type == "cuda":
        if not float8.has_products(device):
            raise ConfigError(f"engine.weights_dtype = 'float8' {float8.GPUS}, got {device}")
    elif engine.cache_dtype == "int8":
        raise ConfigError("engine.weights_dtype = 'float8' needs engine.cache_dtype = 'model' on a CPU, got 'int8'")
    elif not packed.available(dtype):
        raise ConfigError(
            f"engine.weights_dtype = 'float8' needs compiled kernels for {dtype} on a CPU, got none: there is no C++ "
            "compiler, or the processor has no tile registers for bfloat16"
        )
