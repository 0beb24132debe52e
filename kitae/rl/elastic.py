"""A run that can have more or fewer engines while it goes on.

    wanted: as many as it began with, or `kitae scale RUN ENGINES`
    too few   an engine is started, loads what was handed over last, is probed, and joins
    too many  the last to join leaves: what it samples goes on elsewhere
    no place  the run goes on with the engines it has; another is tried every so often

Engines that are lost are too few: they are replaced in the same way (`kitae.workers.pool`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from kitae.engines.base import Engine
from kitae.engines.engine_pool import EnginePool
from kitae.rl.weight_sync import WeightSync
from kitae.store.engine_count import asked_for

_LOOK = 1.0  # seconds between two looks at what is wanted


@asynccontextmanager
async def resized(
    engine: Engine, weights: WeightSync, folder: Path, note: Callable[[str], None]
) -> AsyncIterator[None]:
    """Keep the engine pool of a run at its size, or at what is asked for later in the run's folder. Any other engine
    stays as it is."""
    if not isinstance(engine, EnginePool):
        yield
        return
    engine.note, engine.admit = note, weights.admit
    following = asyncio.create_task(_follow(engine, folder, engine.size), name="elastic")
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(pool: EnginePool, folder: Path, wanted: int) -> None:
    while True:
        pool.resize(asked_for(folder) or wanted)
        await asyncio.sleep(_LOOK)
