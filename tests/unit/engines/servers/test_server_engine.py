"""What is refused before a server hears of it. The contract of an engine is in `test_conformance`."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from crew import ask, crew

from kitae.errors import RequestError


@pytest.mark.thorough(keep=1)
def test_requests_that_a_server_would_not_survive_are_refused_here(folder: Path, kind: str) -> None:
    async def body() -> None:
        async with crew(folder, kind, 1) as c:
            for wrong, why in (
                (replace(ask("a"), prompt_tokens=(5, 10_000)), r"tokens must be from 0 to 258, got 10000"),
                (replace(ask("a"), prompt_tokens=(5,) * 512), r"a prompt must have fewer than 512 tokens, got 512"),
                (ask("a", top_p=0.5, min_p=0.1), "must be off, got"),
            ):
                with pytest.raises(RequestError, match=why):
                    await c.engine.generate(wrong)
            assert len((await c.engine.generate(ask("a"))).tokens) == 20 and not c.servers[0].dead

    asyncio.run(body())
