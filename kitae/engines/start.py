"""From the settings to a running engine: the one place that knows every kind."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence

import torch

from kitae.engines.base import Engine
from kitae.engines.config import EngineConfig
from kitae.engines.fleet import Fleet
from kitae.engines.native.engine import NativeEngine
from kitae.engines.process.engine import ProcessEngine
from kitae.errors import root_cause
from kitae.models.config import ModelConfig
from kitae.models.policy import Policy
from kitae.weights.base import Publisher
from kitae.weights.memory import MemoryPublisher

Started = tuple[Engine, Publisher | None]


async def start_engine(model: ModelConfig, config: EngineConfig, policy: Policy, version: int) -> Started:
    """The engine, and what publishes weights for it: None where it samples from `policy` itself.

    model: what `policy` was loaded from. An engine with weights of its own serves those of that folder until it is sent
    others. The caller closes the engine, and then the publisher.
    """
    return await KINDS[config.kind](model, config, policy, version)


async def _native(model: ModelConfig, config: EngineConfig, policy: Policy, version: int) -> Started:
    """In this process, on the policy's own weights."""
    return NativeEngine(policy, config, version), None


async def _processes(model: ModelConfig, config: EngineConfig, policy: Policy, version: int) -> Started:
    """In processes of their own, on cores that the trainer leaves."""
    available = sorted(os.sched_getaffinity(0)) if policy.device.type == "cpu" else []
    rest, shares = share_cores(available, config.count, config.threads)
    if rest:
        torch.set_num_threads(len(rest))
    publisher = MemoryPublisher(config.sync)
    engines = [
        ProcessEngine(model, config, publisher, threads=len(cores) or None, cores=cores or None, version=version)
        for cores in shares
    ]
    engine = engines[0] if config.count == 1 else Fleet(engines)
    try:
        async with asyncio.TaskGroup() as tasks:
            for each in engines:
                tasks.create_task(each.start())
    except BaseException as error:
        await engine.close()
        publisher.close()
        if isinstance(error, BaseExceptionGroup):
            raise root_cause(error) from None
        raise
    return engine, publisher


KINDS: dict[str, Callable[[ModelConfig, EngineConfig, Policy, int], Awaitable[Started]]] = {
    "native": _native,
    "process": _processes,
}


def share_cores(cores: Sequence[int], engines: int, threads: int) -> tuple[list[int], list[list[int]]]:
    """The cores of the trainer and of each engine: `threads` for an engine (0: half of all for all of them), from the
    end; at least one is left for the trainer, and where there are too few, engines share theirs.

    Nothing is assigned (empty lists) where there are not two cores.
    """
    if len(cores) < 2:
        return [], [[]] * engines
    each = threads or max(1, len(cores) // 2 // engines)
    used = min(each * engines, len(cores) - 1)
    rest, own = list(cores[: len(cores) - used]), cores[len(cores) - used :]
    each = min(each, used)
    return rest, [sorted(own[(i * each + j) % used] for j in range(each)) for i in range(engines)]
