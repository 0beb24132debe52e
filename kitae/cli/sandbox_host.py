"""`kitae sandbox-host`: opens sandboxes for runs on other machines."""

import asyncio
import os
import signal
from typing import Annotated

import typer

from kitae.errors import ConfigError, Interrupted


def sandbox_host(
    image: Annotated[str, typer.Option(help="Of containers; default: bubblewrap, without an image.")] = "",
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 7070,
    key_env: Annotated[
        str, typer.Option(help="The environment variable with the key that runs must send.", metavar="NAME")
    ] = "KITAE_SANDBOX_KEY",
    most: Annotated[int, typer.Option(min=1, help="Boxes at the same time.")] = 64,
    idle: Annotated[float, typer.Option(min=1, help="Seconds until a box is closed that nobody uses.")] = 900,
) -> None:
    """Open sandboxes here for runs on other machines."""
    key = os.environ.get(key_env, "").strip()
    if len(key) < 16:
        raise ConfigError(f"the variable {key_env} must hold a key of at least 16 characters, got {len(key)}")
    try:
        asyncio.run(_serve(image, host, port, key, most, idle))
    except KeyboardInterrupt:
        raise Interrupted("interrupted", signal.SIGINT) from None


async def _serve(image: str, host: str, port: int, key: str, most: int, idle: float) -> None:
    try:
        from kitae.sandbox.boxes.box_host import BoxHost
        from kitae.serving.running_server import run_server
    except ImportError as missing:
        raise ConfigError(f"kitae sandbox-host needs kitae[serve]: {missing}") from None
    from kitae.clients.addresses import address_of, listen
    from kitae.sandbox.boxes.bubblewrap_box import BubblewrapBoxes
    from kitae.sandbox.boxes.container_box import ContainerBoxes

    boxes = ContainerBoxes(image) if image else BubblewrapBoxes()
    await boxes.check()
    serves = BoxHost(boxes, key, most, idle)
    taken = listen(host, port)
    print(f"{most} boxes ({boxes.name}) at {address_of(taken, host)}  (Ctrl-C ends)", flush=True)
    sweeping = asyncio.create_task(serves.sweep())
    try:
        await run_server(serves.app(), taken)
    finally:
        sweeping.cancel()
        await boxes.close()
