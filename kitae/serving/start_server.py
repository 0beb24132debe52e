"""From a model to a running server: load the model, start its engine, serve until Ctrl-C, and close both."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette

from kitae.clients.addresses import address_of, listen
from kitae.data.pictures import SHELF
from kitae.engines.config import EngineConfig
from kitae.engines.start_engine import EngineOrder, start_engine
from kitae.errors import ConfigError
from kitae.kernels.allocation import gc_frozen
from kitae.models.adapters import adapt
from kitae.models.config import ModelConfig
from kitae.models.load import check_model, find_model, load_policy
from kitae.serving.app import check_key, make_app
from kitae.serving.handlers import RewardHandlers, reward_routes
from kitae.serving.model_app import app_of
from kitae.serving.refusals import AdmissionControl
from kitae.serving.running_server import run_server
from kitae.serving.server_metrics import Counters
from kitae.serving.server_settings import ServerSettings
from kitae.serving.text_scoring import TextScorer
from kitae.verifiers.reward_model_verifier import RewardService

_PICTURES = 1 << 30  # bytes of those that clients sent

Ready = Callable[[str, str], None]
"""Is called with the address of the server and the path at which the model answers."""


async def serve(model: ModelConfig, engine: EngineConfig, settings: ServerSettings, ready: Ready) -> None:
    """Serve until a signal, then raise `Interrupted`. Errors of model, address or key come before the model loads."""
    check_key(settings.host, settings.ring())
    folder = find_model(model.path)
    assert folder is not None
    rewards = is_reward_model(folder)
    if settings.adapters and (rewards or engine.kind != "native" or model.lora_rank):
        what = "a language model on an engine in this process (engine.kind = 'native'), without an adapter of its own"
        raise ConfigError(f"adapters are added to {what}; got --adapter {next(iter(settings.adapters))}")
    if not rewards:
        check_model(model)
    taken = listen(settings.host, settings.port)
    opened = open_rewards(model, settings) if rewards else open_model(model, engine, settings)
    try:
        async with opened as app:
            ready(address_of(taken, settings.host), "/v1/score" if rewards else "/v1/chat/completions")
            with gc_frozen():
                await run_server(app, taken)
    finally:
        taken.close()


def is_reward_model(folder: Path) -> bool:
    """Whether a model is a reward model, by its config alone."""
    kinds = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    return str(kinds[0]).endswith("ForSequenceClassification")


@asynccontextmanager
async def open_model(model: ModelConfig, config: EngineConfig, settings: ServerSettings) -> AsyncIterator[Starlette]:
    """The app of a language model, with its engine."""
    policy = load_policy(model)
    SHELF.most_bytes = _PICTURES
    if settings.adapters:
        adapt(policy)
    engine = await start_engine(EngineOrder(model, config, policy=policy))
    scorer = TextScorer(policy)
    try:
        yield app_of(policy, engine, scorer, settings)
    finally:
        await scorer.close()
        await engine.close()


@asynccontextmanager
async def open_rewards(model: ModelConfig, settings: ServerSettings) -> AsyncIterator[Starlette]:
    """The app of a reward model, with its process."""
    service = RewardService(model=model.path, device=model.device, dtype=model.dtype)
    await service.start()
    try:
        admission, keys = AdmissionControl(settings.queue), settings.ring()
        counters = Counters(admission, accounts=keys.accounts)
        routes = reward_routes(RewardHandlers(service, settings.name, admission, settings.reader_of_bodies()), counters)
        yield make_app(
            routes, counters, name=settings.name, context=0, host=settings.host, keys=keys
        )  # fmt: skip
    finally:
        await service.close()
