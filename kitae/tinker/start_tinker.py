"""From a model to a running training server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kitae.clients.addresses import address_of, listen
from kitae.engines.config import EngineConfig
from kitae.errors import ConfigError
from kitae.models.config import ModelConfig
from kitae.primitives.core import Core
from kitae.serving.api_keys import ApiKey, KeyRing
from kitae.serving.app import check_key
from kitae.serving.running_server import run_server
from kitae.tinker.ledger import RequestLedger
from kitae.tinker.studio import Studio
from kitae.tinker.tinker_app import tinker_app

_PREFIX = "tml-"  # the client sends no other key


@dataclass(frozen=True, slots=True)
class TinkerSettings:
    """`TinkerSettings("smollm2-135m", Path("runs/tinker"))`; name: how clients call the base model."""

    name: str
    folder: Path
    host: str = "127.0.0.1"
    port: int = 8080
    keys: Sequence[ApiKey] = ()


async def serve_tinker(
    model: ModelConfig, engine: EngineConfig, settings: TinkerSettings, ready: Callable[[str], None]
) -> None:
    """Serve until a signal, then raise `Interrupted`. ready: is called with the address."""
    keys = KeyRing(settings.keys)
    check_key(settings.host, keys)
    if wrong := [key.name for key in settings.keys if not key.key.startswith(_PREFIX)]:
        raise ConfigError(f"Tinker's client sends only keys that begin with {_PREFIX!r}, got another for {wrong[0]}")
    taken = listen(settings.host, settings.port)
    try:
        core = Core.load(model, engine)
        try:
            ledger = RequestLedger(settings.folder)
            known = ledger.fact("model", model.path)
            if known != model.path:
                raise ConfigError(f"{settings.folder} is of a server with the base model {known}, got {model.path}")
            studio = Studio(core, ledger, settings.folder, settings.name)
            await studio.start()
            try:
                ready(address_of(taken, settings.host))
                await run_server(tinker_app(studio, settings.name, settings.host, keys), taken)
            finally:
                await studio.close()
                ledger.close()
        finally:
            await core.close()
    finally:
        taken.close()
