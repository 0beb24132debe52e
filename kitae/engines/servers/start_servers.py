"""From the settings to servers that serve: the one place that knows every dialect."""

import asyncio
from collections.abc import Sequence

from kitae.engines.config import EngineConfig
from kitae.engines.servers.dialect import Dialect, Launch
from kitae.engines.servers.model_folder import WeightsFolder
from kitae.engines.servers.server import GivenSeat, Seat, StartedSeat
from kitae.engines.servers.server_engine import LIMITS, ServerEngine
from kitae.engines.servers.sglang import SGLang
from kitae.engines.servers.vllm import VLLM
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy, pick_device, pick_dtype
from kitae.weights.probe import probe_tolerance
from kitae.weights.published_version import WeightStore
from kitae.workers.connection import Deadlines


async def start_servers(
    model: ModelConfig,
    config: EngineConfig,
    weight_store: WeightStore,
    version: int,
    cores: Sequence[Sequence[int]] = (),
    limits: Deadlines = LIMITS,
) -> ServerEngine:
    """The engine, once every server has the weights of the model's folder, or what was published. cores: of each server
    that is started."""
    device = pick_device(model.device)
    dtype = str(pick_dtype(model.dtype, device)).removeprefix("torch.")
    own = model.model_copy(update={"device": "cpu", "dtype": dtype})
    copy = await asyncio.to_thread(load_policy, own)
    folder = await asyncio.to_thread(WeightsFolder, copy, weight_store.address, version, config.weights_folder)
    dialect: Dialect = VLLM(own=bool(config.server)) if config.kind == "vllm" else SGLang()
    if config.urls:
        seats: list[Seat] = [GivenSeat(dialect, url, limits) for url in config.urls]
    else:
        launch = Launch(
            program=config.server,
            model=folder.start,
            dtype=dtype,
            context=copy.max_context,
            device=str(device),
            packages=folder.packages,
        )
        seats = [
            StartedSeat(dialect, launch.on(cores[number] if cores else ()), config, limits, f"{config.kind} {number}")
            for number in range(config.count)
        ]
    engine = ServerEngine(
        seats,
        weight_store,
        folder,
        decode=lambda tokens: str(copy.tokenizer.decode(tokens, skip_special_tokens=False)),
        vocabulary=copy.vocabulary,
        context=copy.max_context,
        tolerance=probe_tolerance(copy.dtype),
        version=version,
        limits=limits,
    )
    await engine.start()
    return engine
