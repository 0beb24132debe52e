"""Environments and tools that block: others go on, the culprit is named, a stop is quick; deadlines of episodes."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from talk import PROMPT, SAMPLING, Engine, Recorder, talks

from kitae.envs import blocking_calls
from kitae.envs.base import EpisodeLimits, Observation, Opening
from kitae.envs.config import EnvConfig
from kitae.envs.environment_registry import open_world
from kitae.envs.episode import Episode
from kitae.envs.rollouts import Episodes
from kitae.envs.tools.tool_world import Tools
from kitae.types import Message, Prompt, Rollout, ToolCall, Turn

MORE = Observation((Message("tool", "go on"),))


class Base:
    def __init__(self, prompt: Prompt) -> None:
        self.steps = 0

    async def start(self) -> Opening:
        return Opening(PROMPT.messages)

    async def step(self, turn: Turn) -> Observation:
        return MORE

    async def close(self) -> None: ...


class Blocks(Base):
    async def step(self, turn: Turn) -> Observation:
        time.sleep(30)  # the culprit
        return MORE


class Stubborn(Base):
    async def step(self, turn: Turn) -> Observation:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                time.sleep(0.01)
            except Exception:
                continue
        return MORE


class Slow(Base):
    async def step(self, turn: Turn) -> Observation:
        await asyncio.sleep(100)
        return MORE


class Talkative(Base):
    async def step(self, turn: Turn) -> Observation:
        self.steps += 1
        return MORE if self.steps < 4 else Observation(done=True)


def run(episodes: Episodes, record: Rollout | None = None) -> Rollout:
    return asyncio.run(Episode(episodes, episodes.make(PROMPT), 7, 0, PROMPT, record).run())


@pytest.mark.parametrize("kind", [Blocks, Stubborn])
def test_a_step_that_blocks_is_interrupted_at_its_limit_and_named(kind: type[Base]) -> None:
    began = time.monotonic()
    rollout = run(talks(Engine(), kind, limits=EpisodeLimits(seconds=0.4)))
    assert time.monotonic() - began < 5
    assert rollout.status == "failed" and rollout.score is not None
    place = rf"step was interrupted: the environment of 7/0 blocks for [\d.]+ s at {re.escape(__file__)}:\d+ \(.*sleep"
    assert re.search(place, rollout.score.detail)


def test_one_that_blocks_is_told_of_while_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_calls, "_PATIENCE", 0.2)
    told = list[tuple[str, float]]()
    began = time.monotonic()
    note = lambda text: told.append((text, time.monotonic() - began))  # noqa: E731
    run(talks(Engine(), Blocks, limits=EpisodeLimits(seconds=2.0), note=note))
    ((text, when),) = told
    assert when < 1.5 and "time.sleep(30)  # the culprit" in text and "Await what takes long" in text


def test_a_run_that_is_to_stop_gives_up_at_once_and_suspends() -> None:
    episodes = talks(Engine(), Blocks, limits=EpisodeLimits(seconds=60))

    def ask() -> None:
        blocking_calls.hurry()
        time.sleep(0.3)
        episodes.running.suspending = True

    threading.Timer(0.2, ask).start()
    began = time.monotonic()
    try:
        rollout = run(episodes)
    finally:
        blocking_calls.hurry(False)
    assert rollout.status == "suspended" and rollout.response_length and time.monotonic() - began < 5


OWN = """
import time
from kitae.envs.base import Observation, Opening
from kitae.types import Message

class Plain:
    def __init__(self, prompt, seconds=0.3):
        self.prompt, self.seconds = prompt, seconds
    def start(self):
        return Opening(self.prompt.messages)
    def step(self, turn):
        time.sleep(self.seconds)
        return Observation(done=True, reward=1.0)
    async def close(self): ...
"""


def plain(folder: Path, limits: EpisodeLimits, size: int, **params: Any) -> tuple[list[Rollout], float]:
    (folder / "plain.py").write_text(OWN)
    world = open_world(EnvConfig(name=f"{folder}/plain.py:Plain", params=params))
    episodes = talks(Engine(), world.make, limits=limits)
    began = time.monotonic()
    group = asyncio.run(episodes.group(7, PROMPT, size))
    return list(group.rollouts), time.monotonic() - began


def test_a_method_that_is_no_coroutine_blocks_nobody(tmp_path: Path) -> None:
    rollouts, took = plain(tmp_path, EpisodeLimits(), 16)
    assert [r.score.value for r in rollouts if r.score] == [1.0] * 16
    assert took < 16 * 0.3 / 2


def test_one_that_takes_too_long_is_left_alone(tmp_path: Path) -> None:
    rollouts, took = plain(tmp_path, EpisodeLimits(seconds=0.2), 2, seconds=60)
    assert all(r.status == "failed" and r.score and "step took longer than 0.2 s" in r.score.detail for r in rollouts)
    assert took < 5


def test_the_end_of_a_program_does_not_wait_for_threads_that_were_given_up(tmp_path: Path) -> None:
    program = (
        "import asyncio, time\nfrom kitae.envs.blocking_calls import in_thread\n"
        "try: asyncio.run(asyncio.wait_for(in_thread(time.sleep, 60), 0.1))\nexcept TimeoutError: print('over')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "over\n"


def test_a_loop_without_end_is_ended_in_its_thread() -> None:
    turns = [0]

    def forever() -> None:
        while True:
            turns[0] += 1

    async def go() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(blocking_calls.in_thread(forever), 0.2)

    asyncio.run(go())
    deadline, before = time.monotonic() + 5, -1
    while turns[0] != before and time.monotonic() < deadline:
        before = turns[0]
        time.sleep(0.1)
    assert turns[0] == before


def test_ctrl_c_while_a_step_blocks(tmp_path: Path) -> None:
    """The signal is heard where the code stands; the loop's own handler hears it after that."""
    program = tmp_path / "stop.py"
    program.write_text("""
import asyncio, time, sys
from kitae.envs.blocking_calls import Blocked, WatchedCall
from kitae.run.interrupts import Interrupts

async def main():
    stopped = asyncio.Event()
    async def block():
        print("blocks", flush=True)
        time.sleep(60)
    with Interrupts(stopped.set):
        try:
            await WatchedCall(print, "7/0", 60, block)
        except Blocked as block:
            print(block)
        await stopped.wait()
        print("stopped")
asyncio.run(main())
""")
    run = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stdout.readline() == "blocks\n"
    os.kill(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=10)
    assert f"at {program}:10 (time.sleep(60))" in said and said.endswith("stopped\n")


def test_a_deadline_cuts_the_episode_off_and_what_was_said_is_judged() -> None:
    judge = Recorder()
    limits = EpisodeLimits(seconds=60, deadline=0.2)
    began = time.monotonic()
    (rollout,) = asyncio.run(talks(Engine(), Slow, judge, limits=limits).group(7, PROMPT, 1)).rollouts
    assert (rollout.status, rollout.finish) == ("complete", "length") and time.monotonic() - began < 5
    assert [text for text, _ in judge.asked] == [rollout.text] and rollout.text


def test_a_deadline_before_the_first_turn_is_a_failure() -> None:
    class Never(Base):
        async def start(self) -> Opening:
            await asyncio.sleep(100)
            return await super().start()

    rollout = run(talks(Engine(), Never, limits=EpisodeLimits(deadline=0.1)))
    assert rollout.score is not None and "start took longer than 0.1 s" in rollout.score.detail


def test_a_turn_that_is_cut_goes_to_the_environment_and_the_episode_goes_on() -> None:
    engine = Engine()
    rollout = run(talks(engine, Talkative, limits=EpisodeLimits(turn_tokens=2)))
    turns = [s for s in rollout.segments if s.source == "model"]
    assert [len(s.tokens) for s in turns] == [2] * 4 and rollout.status == "complete"
    assert {r.sampling.max_tokens for r in engine.requests} == {2}
    few = replace(SAMPLING, max_tokens=5)
    rollout = run(talks(Engine(), Talkative, sampling=few, limits=EpisodeLimits(turn_tokens=2)))
    assert sum(len(s.tokens) for s in rollout.segments if s.source == "model") == 5
    assert rollout.finish == "length"


@pytest.mark.parametrize("moment", [1, 2, 5, 7])
def test_an_episode_of_cut_turns_goes_on_from_its_record(moment: int) -> None:
    limits, moments = EpisodeLimits(turn_tokens=2), iter(range(100))
    whole = run(talks(Engine(), Talkative, limits=limits))
    engine = Engine(lambda: setattr(engine, "suspending", next(moments) >= moment))
    part = run(talks(engine, Talkative, limits=limits))
    assert part.status == "suspended"
    assert run(talks(Engine(), Talkative, limits=limits), part).chains == whole.chains


def test_calls_of_tools_have_a_budget() -> None:
    async def go() -> list[str]:
        async with Tools({"tools": ["calculator"], "calls": 2}) as world:
            episode = world.make(PROMPT)
            call = ToolCall("calculator", {"expression": "2 + 2"}, "a")
            seen = [*(await episode.step(Turn("", calls=(call, call, call)))).messages]
            return [m.content for m in seen]

    assert asyncio.run(go()) == ["4", "4", "Error: all 2 calls of tools are used up; answer with what you know"]
