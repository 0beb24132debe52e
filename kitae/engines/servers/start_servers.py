"""From the settings to servers that serve: the one place that knows every dialect."""

import asyncio
from collections.abc import Sequence

from kitae.engines.config import EngineConfig
from kitae.engines.engine_pool import EnginePool
from kitae.engines.servers.dialect import Dialect, Launch
from kitae.engines.servers.model_folder import WeightsFolder
from kitae.engines.servers.server import Server, open_given, open_started
from kitae.engines.servers.server_engine import LIMITS, ServerEngine
from kitae.engines.servers.sglang import SGLang
from kitae.engines.servers.vllm import VLLM
from kitae.errors import EngineError
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy, pick_device, pick_dtype
from kitae.weights.probe import probe_tolerance
from kitae.weights.published_version import WeightStore
from kitae.workers.connection import Deadlines
from kitae.workers.gpus import GpuShares, visible_gpus
from kitae.workers.pool import Replacement

_STARTED = Replacement(retry=1.0, most=3, within=600.0)
_GIVEN = Replacement(most=0)  # a server that somebody else runs is gone for good


async def start_servers(
    model: ModelConfig,
    config: EngineConfig,
    weight_store: WeightStore,
    version: int,
    cores: Sequence[Sequence[int]] = (),
    limits: Deadlines = LIMITS,
) -> EnginePool:
    """A pool of servers, all of which have the weights of the model's folder, or what was published. cores: of each
    server that is started."""
    device = pick_device(model.device)
    dtype = str(pick_dtype(model.dtype, device)).removeprefix("torch.")
    own = model.model_copy(update={"device": "cpu", "dtype": dtype})
    copy = await asyncio.to_thread(load_policy, own)
    folder = await asyncio.to_thread(WeightsFolder, copy, weight_store.address, version, config.weights_folder)
    dialect: Dialect = VLLM(own=bool(config.server)) if config.kind == "vllm" else SGLang()
    launch = Launch(
        program=config.server,
        model=folder.start,
        dtype=dtype,
        context=copy.max_context,
        device=str(device),
        packages=folder.packages,
    )

    shares = GpuShares(visible_gpus(), model.device, led=True)
    gpus = [shares.environment(shares.take()) for _ in range(config.count)]

    async def open_server(number: int) -> Server:
        if not config.urls:
            placed = launch.on(cores[number % len(cores)] if cores else (), gpus[number % len(gpus)])
            return await open_started(dialect, placed, config, limits, f"{config.kind} {number}")
        if number >= len(config.urls):
            raise EngineError(f"engine.urls names {len(config.urls)} servers, and there is no other")
        return await open_given(dialect, config.urls[number], limits)

    async def make(number: int) -> ServerEngine:
        engine = ServerEngine(
            await open_server(number),
            weight_store,
            folder,
            decode=lambda tokens: str(copy.tokenizer.decode(tokens, skip_special_tokens=False)),
            vocabulary=copy.vocabulary,
            context=copy.max_context,
            tolerance=probe_tolerance(copy.dtype),
            limits=limits,
        )
        await engine.start()
        return engine

    pool = EnginePool(
        make,
        len(config.urls) or config.count,
        version=version,
        replacement=_GIVEN if config.urls else _STARTED,
        at_end=lambda: asyncio.to_thread(folder.close),
    )
    await pool.start()
    return pool
