"""From a model to a running server: load the model, start its engine, serve until Ctrl-C, and close both."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from starlette.applications import Starlette

from kitae.clients.addresses import address_of, listen
from kitae.data.chat import Chat
from kitae.data.pictures import SHELF
from kitae.engines.base import Engine
from kitae.engines.config import EngineConfig
from kitae.engines.start_engine import EngineOrder, start_engine
from kitae.kernels.allocation import gc_frozen
from kitae.models.config import ModelConfig
from kitae.models.load import check_model, find_model, load_policy
from kitae.models.policy import Policy
from kitae.serving.answers import AnswerRenderer
from kitae.serving.app import check_key, make_app, model_routes
from kitae.serving.engine_model import EngineModel
from kitae.serving.handlers import ChatHandlers, RewardHandlers, reward_routes
from kitae.serving.refusals import AdmissionControl
from kitae.serving.running_server import run_server
from kitae.serving.server_metrics import Counters
from kitae.serving.server_settings import ServerSettings
from kitae.serving.streamed_text import streams_early
from kitae.serving.text_scoring import TextScorer
from kitae.serving.token_text import TokenText
from kitae.verifiers.reward_model_verifier import RewardService

_PICTURES = 1 << 30  # bytes of those that clients sent
_ENGINE_SECONDS = 0.2  # that an engine may take to answer a question after its health

Ready = Callable[[str, str], None]
"""Is called with the address of the server and the path at which the model answers."""


async def serve(model: ModelConfig, engine: EngineConfig, settings: ServerSettings, ready: Ready) -> None:
    """Serve until a signal, then raise `Interrupted`. Errors of model, address or key come before the model loads."""
    check_key(settings.host, settings.ring())
    folder = find_model(model.path)
    assert folder is not None
    rewards = is_reward_model(folder)
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
    engine = await start_engine(EngineOrder(model, config, policy=policy))
    scorer = TextScorer(policy)
    try:
        yield app_of(policy, engine, scorer, settings)
    finally:
        await scorer.close()
        await engine.close()


def app_of(policy: Policy, engine: Engine, scorer: TextScorer, settings: ServerSettings) -> Starlette:
    chat = Chat(policy.tokenizer, policy.base.generation_config)
    renderer = AnswerRenderer(settings.name, chat, TokenText(policy.tokenizer), streams_early(policy.tokenizer))
    admission, model, keys = AdmissionControl(settings.queue), EngineModel(engine, chat), settings.ring()
    counters = Counters(admission, engine.stats, keys.accounts)
    reader = settings.reader_of(policy.tokenizer, policy.base.generation_config, policy.max_context)
    handlers = ChatHandlers(
        lambda request: model,
        renderer,
        admission,
        scorer,
        settings.answer_policy,
        counters.gone,
        reader,
        counters.answered,
    )

    async def healthy() -> None:
        """Raise if the engine is closed or its thread has died. One that is in the middle of a step is well."""
        with suppress(TimeoutError):
            await asyncio.wait_for(engine.abort("nobody"), _ENGINE_SECONDS)

    return make_app(
        model_routes(handlers, counters),
        counters,
        name=settings.name,
        context=policy.max_context,
        host=settings.host,
        keys=keys,
        healthy=healthy,
    )


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
