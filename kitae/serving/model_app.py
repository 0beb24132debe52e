"""The app of a language model on an engine, under its own name and with each of its adapters."""

import asyncio
from contextlib import suppress
from functools import partial

from starlette.applications import Starlette

from kitae.data.chat import Chat
from kitae.engines.base import Engine
from kitae.engines.native.engine import NativeEngine
from kitae.models.adapters import read_adapter, to_sample_from
from kitae.models.policy import Policy
from kitae.serving.answers import AnswerRenderer
from kitae.serving.app import make_app, model_routes
from kitae.serving.engine_model import EngineModel
from kitae.serving.handlers import ChatHandlers
from kitae.serving.refusals import AdmissionControl
from kitae.serving.server_metrics import Counters
from kitae.serving.server_settings import ServerSettings
from kitae.serving.streamed_text import streams_early
from kitae.serving.text_scoring import TextScorer
from kitae.serving.token_text import TokenText

_ENGINE_SECONDS = 0.2  # that an engine may take to answer a question after its health


def app_of(policy: Policy, engine: Engine, scorer: TextScorer, settings: ServerSettings) -> Starlette:
    chat = Chat(policy.tokenizer, policy.base.generation_config)
    renderer = AnswerRenderer(settings.name, chat, TokenText(policy.tokenizer), streams_early(policy.tokenizer))
    admission, model, keys = AdmissionControl(settings.queue), EngineModel(engine, chat), settings.ring()
    counters = Counters(admission, engine.stats, keys.accounts)
    adapters = _adapters_of(policy, engine, chat, settings)
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
        adapters=adapters,
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
        more=[*adapters],
    )


def _adapters_of(policy: Policy, engine: Engine, chat: Chat, settings: ServerSettings) -> dict[str, EngineModel]:
    """The model with each of its adapters."""
    if not settings.adapters:
        return {}
    assert isinstance(engine, NativeEngine)  # `serve` has refused others
    made = {}
    for name, folder in settings.adapters.items():
        adapter = to_sample_from(read_adapter(folder), policy)
        made[name] = EngineModel(engine, chat, partial(engine.generate, adapter=adapter))
    return made
