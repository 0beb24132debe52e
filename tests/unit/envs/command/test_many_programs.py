"""Many programs at once: all are answered, none is lost, and the process that serves them stays small."""

import asyncio
import os
import resource
import shlex
import time
from pathlib import Path

import pytest

from kitae.data.chat import Chat
from kitae.engines.base import SamplingParams
from kitae.engines.fake import FakeEngine
from kitae.envs.base import EpisodeLimits
from kitae.envs.config import EnvConfig
from kitae.envs.environment_registry import open_world
from kitae.envs.rollouts import Episodes
from kitae.models.tiny import make_tokenizer
from kitae.types import Group, Message, Prompt
from kitae.workers.process_status import family_of, state_of

SHELL = r"""
token=$(curl -sf -X POST "$KITAE_EPISODE_URL/claim" | sed 's/.*"token":"\([^"]*\)".*/\1/')
ask() { curl -sf "$OPENAI_BASE_URL/chat/completions" -H 'Content-Type: application/json' -d "$1"; }
first='{"role": "user", "content": "a"}'
ask '{"messages": ['"$first"']}' > /dev/null || exit 1
more='{"role": "assistant", "content": "ab"}, {"role": "user", "content": "b"}'
ask '{"messages": ['"$first, $more"']}' | grep -q '"ab"' || exit 2
printf '{"reward": 1, "token": "%s"}' "$token" |
    curl -sf "$KITAE_EPISODE_URL/reward" -H 'Content-Type: application/json' -d @- > /dev/null
sleep 100
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [200])
def test_two_hundred_programs_at_once(tmp_path: Path, count: int) -> None:
    chat = Chat(make_tokenizer())
    engine = FakeEngine(lambda request: [*chat.encode("ab"), *chat.stop_tokens[:1]])
    config = EnvConfig(
        name="command", command=f"sh -c {shlex.quote(SHELL)}", params={"folder": str(tmp_path), "reward": "program"}
    )
    prompt = Prompt("p/1", (Message("user", "a"),), "")
    seen: dict[str, int] = {"descriptors": 0, "programs": 0}
    others = family_of(os.getpid())  # of other tests

    async def watch() -> None:
        """Nobody is answered before all have asked."""
        await engine.pause()
        while True:
            stats = engine.stats()
            if stats.running + stats.waiting == count:
                await engine.resume()
            seen["descriptors"] = max(seen["descriptors"], len(os.listdir("/proc/self/fd")))
            seen["programs"] = max(seen["programs"], len(family_of(os.getpid())))
            await asyncio.sleep(0.1)

    async def body() -> Group:
        async with open_world(config) as world:
            sampling = SamplingParams(max_tokens=200, stop_tokens=chat.stop_tokens)
            episodes = Episodes(engine, chat, None, world.make, sampling, 0, limits=EpisodeLimits(seconds=120))
            await episodes.group(0, prompt, 1)
            watching = asyncio.create_task(watch())
            try:
                return await episodes.group(1, prompt, count)
            finally:
                watching.cancel()

    before, size, began = len(os.listdir("/proc/self/fd")), _resident(), time.monotonic()
    group = asyncio.run(body())
    seconds, grown = time.monotonic() - began, _resident() - size
    print(f"{count / seconds:.1f} episodes/s, {grown:.0f} MiB more, {seen}")
    assert [r.score.value for r in group.rollouts if r.score] == [1.0] * count
    assert all(len(r.chains) == 1 and len(r.segments) == 3 for r in group.rollouts)
    assert seen["programs"] > 2 * count  # each with the process that keeps it
    assert seen["descriptors"] - before < 8 * count and grown < 200
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert not [pid for pid in family_of(os.getpid()) if pid not in others and state_of(pid) not in ("", "Z")]


def _resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
