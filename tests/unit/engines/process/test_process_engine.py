"""The engine in its own process against the native engine in this one, and against everything that can happen to it.

A process takes seconds to start, so most tests share one; each begins by sending it the weights it wants.
"""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from kitae.engines.child import Limits
from kitae.engines.probe import Probe, check_engine, score_probe
from kitae.engines.transport import Published, WeightTransport

from kitae.engines import child as child_module
from kitae.engines.base import Completion, Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.fleet import Fleet
from kitae.engines.native.engine import NativeEngine
from kitae.engines.process import ProcessEngine
from kitae.errors import EngineError, RequestError
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]
CONFIG = EngineConfig(memory_gb=0.02)


@pytest.fixture(scope="module")
def model(tiny_folder: Callable[[str], Path]) -> ModelConfig:
    return ModelConfig(path=str(tiny_folder("llama")), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def run() -> Iterator[Run[Any]]:
    with asyncio.Runner() as runner:
        yield lambda work: runner.run(asyncio.wait_for(work, 100))


@pytest.fixture(scope="module")
def engines(model: ModelConfig, run: Run[Any]) -> Iterator[tuple[ProcessEngine, ProcessEngine]]:
    """Two, started together; the second has little patience."""
    cores = [max(os.sched_getaffinity(0))]
    both = (
        ProcessEngine(model, CONFIG, threads=1, cores=cores, sync="delta"),
        ProcessEngine(model, CONFIG, threads=1, sync="full", limits=Limits(silence=4.0, answer=30.0)),
    )
    run(_all(engine.start() for engine in both))
    yield both
    run(_all(engine.close() for engine in both))


@pytest.fixture
def policy(model: ModelConfig) -> Policy:
    return load_policy(model)


@pytest.fixture
def engine(engines: tuple[ProcessEngine, ProcessEngine], policy: Policy, run: Run[Any]) -> ProcessEngine:
    """With the weights of `policy`, as version 0."""
    run(engines[0].update_weights(update(policy, 0)))
    return engines[0]


async def _all(work: Any) -> list[Any]:
    return await asyncio.gather(*work)


def update(policy: Policy, version: int, recompute: bool = False) -> WeightUpdate:
    return WeightUpdate(version, {n: p.detach() for n, p in policy.model.named_parameters()}, recompute)


def requests(count: int = 6, tokens: int = 40, name: str = "") -> list[Request]:
    # Few candidates, far apart: with hundreds, some draw falls where rounding decides.
    sampling = SamplingParams(temperature=0.8, top_k=4, max_tokens=tokens)
    return [
        Request(f"{name}{i}", tuple(range(5, 20 + i // 2)), sampling, seed=i, share=f"{i // 2}") for i in range(count)
    ]


async def native(policy: Policy, asked: list[Request]) -> list[Completion]:
    engine = NativeEngine(policy, CONFIG)
    try:
        return await asyncio.gather(*(engine.generate(r) for r in asked))
    finally:
        await engine.close()


def tokens(done: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in done]


async def until_generated(engine: ProcessEngine, count: int) -> None:
    goal = engine.stats().generated_tokens + count
    while engine.stats().generated_tokens < goal:
        await asyncio.sleep(0.01)


def process_of(engine: ProcessEngine) -> int:
    found = engine._current()
    assert found is not None
    return found.pid


def shift(policy: Policy, share: float, seed: int) -> None:
    """Change some weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            hit = torch.rand(parameter.shape, generator=generator) < share
            parameter.add_(hit * torch.randn(parameter.shape, generator=generator) * 0.1)


def test_same_answers_as_the_native_engine(engine: ProcessEngine, policy: Policy, run: Run[Any]) -> None:
    asked = requests()
    got = run(_all(engine.generate(r) for r in asked))
    expected = run(native(policy, asked))
    assert tokens(got) == tokens(expected)
    assert [c.finish for c in got] == [c.finish for c in expected] and got[0].versions == (0,) * 40
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    stats = engine.stats()
    assert stats.generated_tokens >= 240 and (stats.running, stats.waiting) == (0, 0)
    assert os.sched_getaffinity(process_of(engine)) == {max(os.sched_getaffinity(0))}


def test_stop_tokens_and_strings_travel(engine: ProcessEngine, run: Run[Any]) -> None:
    (free,) = run(_all([engine.generate(requests(1)[0])]))
    stopping = SamplingParams(
        temperature=0.8, top_k=4, max_tokens=40, stop_tokens=(free.tokens[7],), stop_strings=("\0\0",)
    )
    (done,) = run(_all([engine.generate(Request("x", tuple(range(5, 20)), stopping, seed=0))]))
    assert done.finish == "stop" and done.tokens == free.tokens[: free.tokens.index(free.tokens[7]) + 1]


@pytest.mark.parametrize("which", [0, 1], ids=["delta", "full"])
def test_new_weights_bit_for_bit(
    engines: tuple[ProcessEngine, ProcessEngine], policy: Policy, run: Run[Any], which: int
) -> None:
    engine = engines[which]
    run(engine.update_weights(update(policy, 0)))
    modes = []
    for version, share in enumerate([0.001, 0.0, 0.3, 0.01, 0.9, 0.02], 1):
        shift(policy, share, seed=version)
        assert run(engine.update_weights(update(policy, version))) == version
        assert run(engine.probe()) == Probe(version, score_probe(policy))
        assert engine.last_sync is not None
        modes.append(engine.last_sync.mode)
        assert engine.last_sync.resent == 0
    assert modes == (["full"] * 6 if which else ["delta", "delta", "delta", "delta", "full", "delta"])
    asked = requests()
    got = run(_all(engine.generate(r) for r in asked))
    assert tokens(got) == tokens(run(native(policy, asked))) and set(got[0].versions) == {6}


def test_an_update_in_flight(engine: ProcessEngine, policy: Policy, run: Run[Any]) -> None:
    """The same weights under a new number, computed again: nothing but the versions shows."""

    async def body() -> list[Completion]:
        asked = asyncio.gather(*(engine.generate(r) for r in requests(tokens=300)))
        await until_generated(engine, 60)
        await engine.update_weights(update(policy, 1, recompute=True))
        return await asked

    got = run(body())
    assert tokens(got) == tokens(run(native(policy, requests(tokens=300))))
    assert all(set(c.versions) == {0, 1} and list(c.versions) == sorted(c.versions) for c in got)


def test_wrong_updates_are_refused(engine: ProcessEngine, policy: Policy, run: Run[Any]) -> None:
    good = dict(update(policy, 3).tensors or {})
    with pytest.raises(EngineError, match="must have tensors"):
        run(engine.update_weights(WeightUpdate(3)))
    with pytest.raises(EngineError, match="unknown parameter 'nonsense'"):
        run(engine.update_weights(WeightUpdate(3, {**good, "nonsense": torch.ones(1)})))
    name = next(iter(good))
    with pytest.raises(EngineError, match=rf"'{name}' must have shape \(\d+, 64\), got \(2,\)"):
        run(engine.update_weights(WeightUpdate(3, {**good, name: torch.ones(2)})))
    assert run(engine.probe()).version == 0


def test_park_and_continue(engine: ProcessEngine, policy: Policy, run: Run[Any]) -> None:
    async def body() -> list[Completion]:
        asked = requests(tokens=200)
        tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
        await until_generated(engine, 60)
        await engine.park()
        assert all(task.done() for task in tasks)
        parked = [task.result() for task in tasks]
        assert {c.finish for c in parked} == {"parked"} and 0 < len(parked[0].tokens) < 200
        again = [replace(r, prior=c.sampled) for r, c in zip(asked, parked, strict=True)]
        return await asyncio.gather(*(engine.generate(r) for r in again))

    assert tokens(run(body())) == tokens(run(native(policy, requests(tokens=200))))


def test_abort_and_cancel(engine: ProcessEngine, run: Run[Any]) -> None:
    async def body() -> None:
        one, two, three = (asyncio.create_task(engine.generate(r)) for r in requests(3, tokens=400))
        await until_generated(engine, 30)
        await engine.abort("0")
        await engine.abort("unknown")
        assert one.done() and one.result().finish == "abort" and 0 < len(one.result().tokens) < 400
        two.cancel()
        await asyncio.gather(two, return_exceptions=True)
        again = await engine.generate(requests(2, tokens=10)[1])  # its id is free at once
        assert again.finish == "length" and len(again.tokens) == 10
        assert len((await three).tokens) == 400

    run(body())


def test_pause_and_resume(engine: ProcessEngine, run: Run[Any]) -> None:
    async def body() -> None:
        task = asyncio.create_task(engine.generate(requests(1, tokens=300)[0]))
        await until_generated(engine, 10)
        await engine.pause()
        halted = engine.stats().generated_tokens
        await asyncio.sleep(0.6)
        assert engine.stats().generated_tokens == halted and not task.done()
        await engine.probe()  # pauses and goes on by itself, unless paused
        await asyncio.sleep(0.3)
        assert engine.stats().generated_tokens == halted
        await engine.resume()
        assert len((await task).tokens) == 300

    run(body())


def test_bad_requests_fail_alone(engine: ProcessEngine, run: Run[Any]) -> None:
    sampling = SamplingParams(max_tokens=30)

    async def body() -> list[Any]:
        bad = [("empty", ()), ("long", tuple([5] * 600)), ("vocabulary", (10**6,)), ("twice", (5,)), ("twice", (5,))]
        asked = [Request(name, prompt, sampling, 0) for name, prompt in bad]
        return await asyncio.gather(*(engine.generate(r) for r in asked), return_exceptions=True)

    empty, long, vocabulary, fine, twice = run(body())
    for error, words in ((empty, "is empty"), (long, "no room"), (vocabulary, "token ids"), (twice, "in flight")):
        assert isinstance(error, RequestError) and words in str(error)
    assert len(fine.tokens) == 30


@pytest.mark.parametrize("sync", ["delta", "full"])
def test_damaged_memory_is_noticed_and_repaired(
    engine: ProcessEngine, policy: Policy, run: Run[Any], monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    before = engine.stats().resent
    engine._transport.mode = sync  # type: ignore[assignment]
    _damage(engine, monkeypatch, times=1)
    shift(policy, 0.01, seed=7)
    run(engine.update_weights(update(policy, 1)))
    assert engine.last_sync is not None and engine.last_sync.mode == "full" and engine.last_sync.resent == 1
    assert engine.stats().resent == before + 1
    assert run(engine.probe()) == Probe(1, score_probe(policy))
    engine._transport.mode = "delta"


def _damage(engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    left = [times]
    honest = WeightTransport.publish

    def publish(transport: WeightTransport, *args: Any, **kwargs: Any) -> Published:
        published = honest(transport, *args, **kwargs)
        if left[0]:
            left[0] -= 1
            descriptor = transport.descriptors[published.base is not None]
            byte = os.pread(descriptor, 1, 0)
            os.pwrite(descriptor, bytes([byte[0] ^ 1]), 0)
        return published

    monkeypatch.setattr(WeightTransport, "publish", publish)


def test_the_probe_catches_an_old_and_a_wrong_version(engine: ProcessEngine, policy: Policy, run: Run[Any]) -> None:
    assert run(check_engine(engine, policy, tolerance=1e-5, version=0)) == 0
    shift(policy, 0.5, seed=1)  # trained, and not sent
    assert run(engine.probe()).gap(score_probe(policy)) > 0.01
    assert run(check_engine(engine, policy, tolerance=1e-5, version=1)) == 0
    assert engine.stats().version == 1
    shift(policy, 0.5, seed=2)  # the number is right, the weights are not
    assert run(check_engine(engine, policy, tolerance=1e-5, version=1)) == 0
    assert run(engine.probe()) == Probe(1, score_probe(policy))


def test_a_probe_that_no_sync_helps_raises(policy: Policy, run: Run[Any]) -> None:
    class Stubborn:
        async def probe(self) -> Probe:
            return Probe(2, tuple(x + 1 for x in score_probe(policy)))

        async def update_weights(self, update: WeightUpdate) -> int:
            return update.version

    with pytest.raises(EngineError, match=r"must serve version 3 .* serves version 2 with a difference of 1, also"):
        run(check_engine(Stubborn(), policy, tolerance=1e-3, version=3))  # type: ignore[arg-type]


def test_a_killed_process_is_replaced_and_nothing_shows(engine: ProcessEngine, policy: Policy, run: Run[Any]) -> None:
    shift(policy, 0.5, seed=3)
    run(engine.update_weights(update(policy, 5)))
    asked = requests(8, tokens=450)

    async def body() -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
        await until_generated(engine, 8 * 100)
        os.kill(process_of(engine), signal.SIGKILL)
        return await asyncio.gather(*tasks)

    before = engine.stats()
    got = run(body())
    after = engine.stats()
    assert tokens(got) == tokens(run(native(policy, asked))) and set(got[0].versions) == {5}
    assert after.restarts == before.restarts + 1 and after.version == 5
    spent = after.generated_tokens - before.generated_tokens
    assert spent < 2 * 8 * 450 - 8 * 50, "what had been reported was not sampled again"
    assert run(engine.probe()) == Probe(5, score_probe(policy))
    shift(policy, 0.01, seed=4)
    run(engine.update_weights(update(policy, 6)))
    assert engine.last_sync is not None and engine.last_sync.mode == "delta"  # the new one has the base


def test_a_hanging_process_is_replaced(engines: tuple[ProcessEngine, ProcessEngine], run: Run[Any]) -> None:
    _, engine = engines
    policy = load_policy(ModelConfig(**engine._setup["model"]))  # type: ignore[arg-type]
    run(engine.update_weights(update(policy, 0)))

    async def body() -> list[Any]:
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests(3, tokens=450)]
        await until_generated(engine, 10)
        before = process_of(engine)
        os.kill(before, signal.SIGSTOP)
        aborted = asyncio.create_task(engine.abort("1"))
        synced = asyncio.create_task(engine.update_weights(update(policy, 1)))
        done = await asyncio.gather(*tasks)
        await asyncio.gather(aborted, synced)
        assert not Path(f"/proc/{before}").exists()
        return done

    began = time.monotonic()
    one, two, three = run(body())
    assert time.monotonic() - began > 3
    assert two.finish == "abort"
    assert tokens([one, three]) == tokens(run(native(policy, requests(3, tokens=450)))[::2])
    assert engine.stats().restarts == 1 and run(engine.probe()).version == 1


def test_two_engines_at_once(engines: tuple[ProcessEngine, ProcessEngine], policy: Policy, run: Run[Any]) -> None:
    changed = load_policy(ModelConfig(**engines[0]._setup["model"]))  # type: ignore[arg-type]
    shift(changed, 0.5, seed=9)
    run(_all([engines[0].update_weights(update(policy, 0)), engines[1].update_weights(update(changed, 3))]))
    got = run(_all(engine.generate(r) for engine in engines for r in requests(4)))
    assert tokens(got) == tokens(run(native(policy, requests(4))) + run(native(changed, requests(4))))
    assert {c.versions[0] for c in got[:4]} == {0} and {c.versions[0] for c in got[4:]} == {3}


def test_a_fleet_of_two_and_one_is_lost(
    engines: tuple[ProcessEngine, ProcessEngine], policy: Policy, run: Run[Any]
) -> None:
    """Both serve the new weights; the requests of the one that is killed continue, and nothing shows."""
    fleet, asked = Fleet(engines), requests(6, tokens=300)

    async def body() -> list[Completion]:
        before = [engine.stats().restarts for engine in engines]
        assert await fleet.update_weights(update(policy, 7)) == 7
        tasks = [asyncio.create_task(fleet.generate(r)) for r in asked]
        await _all(until_generated(engine, 1) for engine in engines)
        os.kill(process_of(engines[1]), signal.SIGKILL)
        done = await asyncio.gather(*tasks)
        assert [engine.stats().restarts for engine in engines] == [before[0], before[1] + 1]
        return done

    got = run(body())
    assert tokens(got) == tokens(run(native(policy, asked)))
    assert {v for c in got for v in c.versions} == {7} and fleet.stats().version == 7
    assert fleet.sync_metrics()["sync_bytes"] == sum(e.sync_metrics()["sync_bytes"] for e in engines) > 0


def test_too_many_losses_end_it_with_the_last_words(
    model: ModelConfig, policy: Policy, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whatever happened, nothing is left behind."""
    files, shared = len(os.listdir("/proc/self/fd")), os.listdir("/dev/shm")

    async def body() -> tuple[int, BaseException | None]:
        engine = ProcessEngine(model, CONFIG, threads=1)
        try:
            task = asyncio.create_task(engine.generate(requests(1, tokens=490)[0]))
            await until_generated(engine, 1)
            monkeypatch.setattr(child_module, "_BOOT", "import sys; sys.exit('no memory left')")
            process = process_of(engine)
            os.kill(process, signal.SIGKILL)
            await asyncio.gather(task, return_exceptions=True)
            with pytest.raises(EngineError, match=r"is closed: .* 4 times within a minute"):
                await engine.generate(requests(1)[0])
            return process, task.exception()
        finally:
            await engine.close()

    process, error = run(body())
    assert isinstance(error, EngineError)
    assert "was lost 4 times within a minute" in str(error) and "exit status 1" in str(error)
    assert "no memory left" in str(error)
    assert not Path(f"/proc/{process}").exists()
    assert (len(os.listdir("/proc/self/fd")), os.listdir("/dev/shm")) == (files, shared)


def test_a_process_that_never_comes_up(
    model: ModelConfig, run: Run[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def start(engine: ProcessEngine) -> None:
        try:
            await asyncio.gather(engine.start(), engine.generate(requests(1)[0]))
        finally:
            await engine.close()

    with pytest.raises(EngineError, match=r"no config\.json"):
        run(start(ProcessEngine(ModelConfig(path=str(tmp_path)), CONFIG)))
    monkeypatch.setattr(child_module, "_BOOT", "import sys; sys.exit('boom')")
    with pytest.raises(EngineError, match=r"could not start: exit status 1; its stderr ends with:\nboom"):
        run(start(ProcessEngine(model, CONFIG)))
    monkeypatch.setattr(child_module, "_BOOT", "import time; time.sleep(60)")
    with pytest.raises(EngineError, match=r"not ready within 0\.3 s"):
        run(start(ProcessEngine(model, CONFIG, limits=Limits(start=0.3))))


def test_close_while_it_starts(model: ModelConfig, run: Run[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "_BOOT", "import time; time.sleep(60)")

    async def body() -> BaseException | None:
        engine = ProcessEngine(model, CONFIG)
        task = asyncio.create_task(engine.generate(requests(1)[0]))
        parked = asyncio.create_task(engine.generate(requests(1, name="p")[0]))
        await asyncio.sleep(0.3)
        await engine.abort("p0")
        assert (await parked).finish == "abort"
        await engine.close()
        await engine.close()
        await asyncio.gather(task, return_exceptions=True)
        return task.exception()

    assert isinstance(run(body()), EngineError)


def test_impossible_settings_are_refused(model: ModelConfig) -> None:
    with pytest.raises(EngineError, match=r"threads .* at least 1, got 0"):
        ProcessEngine(model, CONFIG, threads=0)
    with pytest.raises(EngineError, match=r"cores .* must be some of \[.*\], got \[9999\]"):
        ProcessEngine(model, CONFIG, cores=[9999])


def test_the_process_dies_with_its_owner(model: ModelConfig) -> None:
    script = f"""
        import asyncio, os
        from kitae.engines.config import EngineConfig
        from kitae.models.config import ModelConfig
        from kitae.engines.process import ProcessEngine

        async def body():
            engine = ProcessEngine(ModelConfig(path={model.path!r}), EngineConfig(memory_gb=0.02), threads=1)
            await engine.start()
            print(engine._current().pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(body())
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        process = int(owner.stdout.readline())
        assert os.getsid(process) == process, "a session of its own: Ctrl-C does not reach it"
        owner.kill()
    for _ in range(100):
        if not Path(f"/proc/{process}").exists():
            return
        time.sleep(0.05)
    pytest.fail("the engine's process outlived its owner")


STUCK = """
import os, socket, sys, time
sys.path[:] = sys.argv[2:]
from kitae.engines import wire
names = "version prompt_tokens prompt_tokens_shared generated_tokens preemptions running waiting busy_seconds"
life = {"stats": dict.fromkeys(names.split(), 1), "rests": RESTS}
stream = socket.socket(fileno=os.dup(0))
stream.sendall(wire.pack({"ready": True, "parameters": {}, **life}))
while True:
    time.sleep(0.02)
    stream.sendall(wire.pack({"tick": True, **life}))
"""


@pytest.mark.parametrize("rests", [True, False])
def test_a_process_without_progress(
    model: ModelConfig, run: Run[Any], monkeypatch: pytest.MonkeyPatch, rests: bool
) -> None:
    """It lives, has work and takes no step: that is a loss, unless it is paused. And it does not end when asked to."""
    monkeypatch.setattr(child_module, "_BOOT", STUCK.replace("RESTS", str(rests)))

    async def body() -> EngineError | None:
        engine = ProcessEngine(model, CONFIG, limits=Limits(silence=2.0, stall=0.4, close=0.2))
        try:
            await engine.start()
            await asyncio.wait_for(engine.generate(requests(1)[0]), 1.5 if rests else 60)
        except TimeoutError:
            assert engine.stats().restarts == 0
            return None
        except EngineError as error:
            return error
        finally:
            await engine.close()
        raise AssertionError("nobody could have answered")

    error = run(body())
    assert error is None if rests else "had work and took no step for 0.4 s" in str(error)
