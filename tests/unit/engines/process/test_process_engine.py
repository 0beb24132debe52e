"""The engine in its own process against the native engine in this one, and against everything that can happen to it.

A process takes seconds to start, so most tests share one; each begins by sending it the weights it wants. The contract
that all engines have is in `test_conformance`.
"""

import asyncio
import gc
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
import warm_starts

from kitae.data.chat import Chat
from kitae.engines.base import Completion, Engine, Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.engine_pool import EnginePool
from kitae.engines.native.engine import NativeEngine
from kitae.engines.process import process_engine as engine_module
from kitae.engines.process.process_engine import ProcessEngine
from kitae.errors import EngineError, EngineLost, RequestError, WeightsDamaged
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy, load_tokenizer
from kitae.models.policy import Policy
from kitae.rl.weight_sync import WeightSync
from kitae.store.columns import LazyColumn
from kitae.weights.base import Manifest
from kitae.weights.probe import Probe, score_probe
from kitae.weights.shared_memory import MemoryPublisher
from kitae.workers import remote_process as process_module
from kitae.workers.connection import Deadlines
from kitae.workers.pool import Replacement

pytestmark = pytest.mark.usefixtures("warm_posts")

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
def publisher() -> Iterator[MemoryPublisher]:
    found = MemoryPublisher("delta")
    yield found
    found.close()


class Pool(EnginePool):
    """Of one process engine at a time."""

    def __init__(self, model: ModelConfig, weight_store: MemoryPublisher, **settings: Any) -> None:
        async def make(number: int) -> ProcessEngine:
            engine = ProcessEngine(model, CONFIG, weight_store, threads=1, **settings)
            await engine.start()
            return engine

        super().__init__(make, 1, replacement=Replacement(retry=0.1, most=3))
        self._weight_store = weight_store

    @property
    def pid(self) -> int:
        (engine,) = self.members
        assert isinstance(engine, ProcessEngine)
        return engine.pid


@pytest.fixture(scope="module")
def engines(model: ModelConfig, publisher: MemoryPublisher, run: Run[Any]) -> Iterator[tuple[Pool, Pool]]:
    """Two, started together, with one publisher; the second has little patience."""
    cores = [max(os.sched_getaffinity(0))]
    both = (
        Pool(model, publisher, cores=cores),
        Pool(model, publisher, limits=Deadlines(silence=4.0, answer=30.0)),
    )
    run(_all(engine.start() for engine in both))
    yield both
    run(_all(engine.close() for engine in both))


@pytest.fixture
def policy(model: ModelConfig) -> Policy:
    return load_policy(model)


@pytest.fixture
def engine(engines: tuple[Pool, Pool], policy: Policy, run: Run[Any]) -> Pool:
    """With the weights of `policy`, as version 0."""
    run(engines[0].some())
    run(send(engines[0], policy, 0))
    return engines[0]


async def _all(work: Any) -> list[Any]:
    return await asyncio.gather(*work)


async def publish(engine: Pool | ProcessEngine, policy: Policy, version: int, in_full: bool = False) -> Manifest:
    tensors = {name: p.detach() for name, p in policy.model.named_parameters()}
    weight_store: Any = engine._weight_store
    return await asyncio.to_thread(weight_store.publish, version, tensors, in_full=in_full)


async def send(engine: Pool, policy: Policy, version: int) -> Manifest:
    """Publish the weights of a policy, and have them served."""
    manifest = await publish(engine, policy, version)
    assert await engine.update_weights(WeightUpdate(version, manifest)) == version
    return manifest


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


async def until_generated(engine: Engine, count: int) -> None:
    goal = engine.stats().generated_tokens + count
    while engine.stats().generated_tokens < goal:
        await asyncio.sleep(0.01)


def shift(policy: Policy, share: float, seed: int) -> None:
    """Change some weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            hit = torch.rand(parameter.shape, generator=generator) < share
            parameter.add_(hit * torch.randn(parameter.shape, generator=generator) * 0.1)


def test_same_answers_as_the_native_engine(engine: Pool, policy: Policy, run: Run[Any]) -> None:
    asked = requests()
    got = run(_all(engine.generate(r) for r in asked))
    expected = run(native(policy, asked))
    assert tokens(got) == tokens(expected)
    assert [c.finish for c in got] == [c.finish for c in expected] and got[0].versions == (0,) * 40
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    stats = engine.stats()
    assert stats.generated_tokens >= 240 and (stats.running, stats.waiting) == (0, 0)
    assert os.sched_getaffinity(engine.pid) == {max(os.sched_getaffinity(0))}


@pytest.mark.thorough
def test_filed_answers_are_those_that_would_have_come(
    model: ModelConfig, publisher: MemoryPublisher, run: Run[Any], tmp_path: Path
) -> None:
    """In plain torch: with kernels, answers end before anybody can suspend them."""
    slow = model.model_copy(update={"plain": True})
    filing, engine = (
        ProcessEngine(slow, CONFIG, publisher, threads=1, name=name, columns=columns)
        for name, columns in (("engine 0", tmp_path), ("engine 1", None))
    )
    asked = requests(tokens=150)
    chat = Chat(load_tokenizer(model)[0])
    try:
        run(_all(e.start() for e in (filing, engine)))
        kept, came = run(_all(filing.generate(r) for r in asked)), run(_all(engine.generate(r) for r in asked))
        for a, b in zip(kept, came, strict=True):
            assert isinstance(a.tokens, LazyColumn) and (a.tokens, a.versions) == (b.tokens, b.versions)
            assert list(a.logprobs) == pytest.approx(list(b.logprobs), abs=1e-5), "who else samples may round them"
            assert a.finish == b.finish and str(a.tokens.text) == chat.read(b.tokens).text
        suspended = run(_suspended(filing, asked[:2]))
        assert all(isinstance(p.tokens, LazyColumn) and 0 < len(p.tokens) < 150 for p in suspended)
        more = [replace(r, prior=p.sampled) for r, p in zip(asked, suspended, strict=False)]
        assert tokens(run(_all(filing.generate(r) for r in more))) == tokens(came[:2])
        assert {path.name for path in tmp_path.iterdir()} == {kept[0].tokens.stretches[0][0].file}
    finally:
        run(_all(e.close() for e in (filing, engine)))


async def _suspended(engine: ProcessEngine, asked: list[Request]) -> list[Completion]:
    sampling = [asyncio.create_task(engine.generate(r)) for r in asked]
    await until_generated(engine, 40)
    await engine.suspend()
    return await asyncio.gather(*sampling)


def test_a_folder_that_is_not_shared_is_refused(
    model: ModelConfig, publisher: MemoryPublisher, run: Run[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_MOMENT", 0.01)
    monkeypatch.setattr(engine_module.ProcessEngine, "_check_shared", _elsewhere(tmp_path / "elsewhere"))
    filing = ProcessEngine(model, CONFIG, publisher, threads=1, columns=tmp_path)
    with pytest.raises(EngineError, match="the run folder must be on a disk that all machines share"):
        run(filing.start())
    run(filing.close())


def _elsewhere(folder: Path) -> Any:
    """The check of an engine whose process sees another disk."""
    check = ProcessEngine._check_shared

    async def checked(self: ProcessEngine, child: Any) -> None:
        self._columns = folder
        await check(self, child)

    return checked


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_new_weights_bit_for_bit(
    engine: Pool, publisher: MemoryPublisher, policy: Policy, run: Run[Any], mode: Any
) -> None:
    publisher.mode, before = mode, engine.stats().repaired
    modes = []
    for version, share in enumerate([0.001, 0.0, 0.3, 0.01, 0.9, 0.02], 1):
        shift(policy, share, seed=version)
        modes.append(run(send(engine, policy, version)).mode)
        assert run(engine.probe()) == (Probe(version, score_probe(policy)),)
    assert modes == (["full"] * 6 if mode == "full" else ["delta", "delta", "delta", "delta", "full", "delta"])
    assert engine.stats().repaired == before
    asked = requests()
    got = run(_all(engine.generate(r) for r in asked))
    assert tokens(got) == tokens(run(native(policy, asked))) and set(got[0].versions) == {6}
    publisher.mode = "delta"


def test_only_what_was_published_last_can_be_served(engine: Pool, policy: Policy, run: Run[Any]) -> None:
    with pytest.raises(EngineError, match="weight update 3 must have a manifest"):
        run(engine.update_weights(WeightUpdate(3)))
    old = run(publish(engine, policy, 3))
    run(publish(engine, policy, 4))
    with pytest.raises(EngineError, match="update 3 must be what was published last, got the manifest of version 3"):
        run(engine.update_weights(WeightUpdate(3, old)))
    assert run(engine.probe())[0].version == 0


class Source:
    """A policy as a source of weights, which arrive damaged as often as it is told."""

    def __init__(self, engine: Pool, policy: Policy, damage: int = 0) -> None:
        self.engine, self.policy, self.damage = engine, policy, damage

    async def publish(self, version: int, *, in_full: bool = False) -> Manifest:
        manifest = await publish(self.engine, self.policy, version, in_full)
        if self.damage:
            self.damage -= 1
            flip(self.engine._weight_store.descriptors[0])
            if manifest.parts:
                flip(self.engine._weight_store.descriptors[1])
        return manifest

    async def probe(self) -> tuple[float, ...]:
        return score_probe(self.policy)


def flip(descriptor: int) -> None:
    byte = os.pread(descriptor, 1, 0)
    os.pwrite(descriptor, bytes([byte[0] ^ 1]), 0)


def test_damaged_memory_is_noticed_and_sent_again(engine: Pool, policy: Policy, run: Run[Any]) -> None:
    shift(policy, 0.01, seed=7)
    sync = WeightSync(Source(engine, policy, damage=1), engine, recompute=False, tolerance=1e-5)
    metrics = run(sync.hand_over(1))
    assert metrics["sync_resent"] == 1 and metrics["sync_delta"] == 0 and metrics["probe_gap"] == 0
    shift(policy, 0.01, seed=8)
    metrics = run(sync.hand_over(2))
    assert metrics["sync_resent"] == 0 and metrics["sync_delta"] == 1 and metrics["probe_gap"] == 0


def test_the_probe_catches_wrong_weights_under_the_right_number(
    engine: Pool, model: ModelConfig, policy: Policy, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shift(policy, 0.5, seed=1)
    wrong = load_policy(model)
    source, published = Source(engine, policy), []
    honest = source.publish

    async def first_wrong(version: int, *, in_full: bool = False) -> Manifest:
        source.policy = policy if published else wrong
        published.append((version, in_full))
        manifest = await honest(version, in_full=in_full)
        source.policy = policy
        return manifest

    monkeypatch.setattr(source, "publish", first_wrong)
    metrics = run(WeightSync(source, engine, recompute=False, tolerance=1e-5).hand_over(1))
    assert published == [(1, False), (1, True)] and metrics["probe_gap"] == 0 and metrics["sync_resent"] == 1
    assert run(engine.probe()) == (Probe(1, score_probe(policy)),)


def test_a_process_stands_still_until_the_weights_come_whole(engine: Pool, policy: Policy, run: Run[Any]) -> None:
    async def body() -> None:
        manifest = await publish(engine, policy, 1, in_full=True)
        flip(engine._weight_store.descriptors[0])
        with pytest.raises(WeightsDamaged, match=r"version 1 .* damaged are 1 of 1 buckets"):
            await engine.update_weights(WeightUpdate(1, manifest))
        assert engine.stats().version == 0
        await send(engine, policy, 2)
        assert (await engine.generate(requests(1)[0])).versions == (2,) * 40

    run(body())


def test_a_process_lost_in_a_damaged_update(engine: Pool, policy: Policy, run: Run[Any]) -> None:
    """The one that takes its place says that the weights are damaged, and they are sent again."""

    async def body() -> None:
        manifest = await publish(engine, policy, 1, in_full=True)
        flip(engine._weight_store.descriptors[0])
        os.kill(engine.pid, signal.SIGSTOP)
        updating = asyncio.create_task(engine.update_weights(WeightUpdate(1, manifest)))
        await asyncio.sleep(0.1)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(WeightsDamaged, match=r"version 1 .* damaged are 1 of 1 buckets"):
            await updating
        assert engine.stats().version == 0
        await send(engine, policy, 2)
        assert (await engine.generate(requests(1)[0])).versions == (2,) * 40

    async def as_in_a_run() -> dict[str, float]:
        """There, an engine that joins waits for the end of the hand-over."""
        source = Source(engine, policy)
        sync = WeightSync(source, engine, recompute=False, tolerance=1e-5)
        await sync.hand_over(3)
        before, engine.admit, source.damage = engine.admit, sync.admit, 1
        os.kill(engine.pid, signal.SIGKILL)
        while engine.members:
            await asyncio.sleep(0.01)
        shift(policy, 0.01, seed=5)
        metrics = await sync.hand_over(4)
        await engine.some()
        engine.admit = before
        assert (await engine.probe())[0].gap(score_probe(policy)) == 0
        return metrics

    run(body())
    assert run(as_in_a_run())["sync_resent"] == 1
    engine._failures.clear()  # other tests kill it too


def test_nothing_is_published_while_a_process_loads(
    engine: Pool, policy: Policy, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for an update nor when a process is replaced."""
    honest, early, writing = ProcessEngine._load, [], []

    async def slow(*arguments: Any) -> list[int]:
        writing.append(asyncio.create_task(publish(engine, policy, 9)))
        await asyncio.sleep(0.2)
        early.append(writing[-1].done())
        return await honest(*arguments)

    async def body() -> None:
        manifest = await publish(engine, policy, 1)
        monkeypatch.setattr(ProcessEngine, "_load", slow)
        assert await engine.update_weights(WeightUpdate(1, manifest)) == 1
        assert (await writing[-1]).version == 9
        os.kill(engine.pid, signal.SIGKILL)
        while engine.members:
            await asyncio.sleep(0.01)
        await engine.some()
        assert (await engine.probe())[0].version == 9
        await asyncio.gather(*writing)

    run(body())
    assert early == [False, False]


def test_an_update_that_fails_when_nobody_waits_for_it_any_more_is_no_news(
    engine: Pool, policy: Policy, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends closes the engine, and an update that is under way fails."""

    async def fail(*_: Any) -> Any:
        await asyncio.sleep(0.05)
        raise EngineError("the engine is closed")

    async def check() -> list[dict[str, Any]]:
        complaints: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        try:
            updating = asyncio.create_task(engine.update_weights(WeightUpdate(1, await publish(engine, policy, 1))))
            await asyncio.sleep(0.01)
            updating.cancel()
            await asyncio.sleep(0.2)
            assert updating.cancelled()
            gc.collect()
        finally:
            loop.set_exception_handler(None)
        return complaints

    monkeypatch.setattr(ProcessEngine, "_load", fail)
    assert run(check()) == []


def test_a_new_process_needs_whole_weights(model: ModelConfig, policy: Policy, run: Run[Any]) -> None:
    publisher = MemoryPublisher()

    async def body() -> None:
        engine = ProcessEngine(model, CONFIG, publisher, threads=1)
        await publish(engine, policy, 7)
        flip(publisher.descriptors[0])
        with pytest.raises(EngineError, match="the shared copy of version 7 is damaged, and a new process needs it"):
            await engine.start()
        await engine.close()

    run(body())
    publisher.close()


def test_a_late_process_serves_what_was_published_last(
    engine: Pool, model: ModelConfig, policy: Policy, run: Run[Any]
) -> None:
    shift(policy, 0.5, seed=11)
    run(send(engine, policy, 8))

    async def body() -> tuple[Probe, ...]:
        late = ProcessEngine(model, CONFIG, engine._weight_store, threads=1)
        try:
            await late.start()
            assert late.stats().version == 8
            return await late.probe()
        finally:
            await late.close()

    assert run(body()) == (Probe(8, score_probe(policy)),)


def test_bad_requests_fail_alone(engine: Pool, run: Run[Any]) -> None:
    sampling = SamplingParams(max_tokens=30)

    async def body() -> list[Any]:
        bad = [("empty", ()), ("long", tuple([5] * 600)), ("vocabulary", (10**6,)), ("twice", (5,)), ("twice", (5,))]
        asked = [Request(name, prompt, sampling, 0) for name, prompt in bad]
        return await asyncio.gather(*(engine.generate(r) for r in asked), return_exceptions=True)

    empty, long, vocabulary, fine, twice = run(body())
    for error, words in ((empty, "is empty"), (long, "no room"), (vocabulary, "token ids"), (twice, "in flight")):
        assert isinstance(error, RequestError) and words in str(error)
    assert len(fine.tokens) == 30


def test_a_killed_process_is_replaced_and_nothing_shows(engine: Pool, policy: Policy, run: Run[Any]) -> None:
    shift(policy, 0.5, seed=3)
    run(send(engine, policy, 5))
    asked = requests(8, tokens=450)

    async def body() -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
        await until_generated(engine, 8 * 100)
        os.kill(engine.pid, signal.SIGKILL)
        return await asyncio.gather(*tasks)

    before = engine.stats()
    got = run(body())
    after = engine.stats()
    assert tokens(got) == tokens(run(native(policy, asked))) and set(got[0].versions) == {5}
    assert after.restarts == before.restarts + 1 and after.version == 5
    spent = after.generated_tokens - before.generated_tokens
    assert spent < 2 * 8 * 450 - 8 * 50, "what had been reported was not sampled again"
    assert run(engine.probe()) == (Probe(5, score_probe(policy)),)
    shift(policy, 0.01, seed=4)
    assert run(send(engine, policy, 6)).mode == "delta"
    assert run(engine.probe()) == (Probe(6, score_probe(policy)),)


@pytest.mark.thorough
def test_a_hanging_process_is_replaced(engines: tuple[Pool, Pool], model: ModelConfig, run: Run[Any]) -> None:
    _, engine = engines
    policy = load_policy(model)
    run(send(engine, policy, 0))

    async def body() -> list[Any]:
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests(3, tokens=450)]
        await until_generated(engine, 10)
        before = engine.pid
        os.kill(before, signal.SIGSTOP)
        aborted = asyncio.create_task(engine.abort("1"))
        synced = asyncio.create_task(send(engine, policy, 1))
        done = await asyncio.gather(*tasks)
        await asyncio.gather(aborted, synced)
        assert not Path(f"/proc/{before}").exists()
        return done

    began = time.monotonic()
    one, two, three = run(body())
    run(engine.some())
    assert time.monotonic() - began > 3
    assert two.finish == "abort"
    assert tokens([one, three]) == tokens(run(native(policy, requests(3, tokens=450)))[::2])
    assert engine.stats().restarts == 1 and run(engine.probe())[0].version == 1


def test_each_engine_serves_what_it_was_told(
    engines: tuple[Pool, Pool], model: ModelConfig, policy: Policy, run: Run[Any]
) -> None:
    changed = load_policy(model)
    shift(changed, 0.5, seed=9)
    run(send(engines[0], policy, 0))
    run(send(engines[1], changed, 3))
    got = run(_all(engine.generate(r) for engine in engines for r in requests(4)))
    assert tokens(got) == tokens(run(native(policy, requests(4))) + run(native(changed, requests(4))))
    assert {c.versions[0] for c in got[:4]} == {0} and {c.versions[0] for c in got[4:]} == {3}


def test_in_a_pool_a_lost_process_gives_its_requests_to_the_others(
    model: ModelConfig, policy: Policy, publisher: MemoryPublisher, run: Run[Any]
) -> None:
    """With all that it had told; and it is not brought back."""
    asked = requests(4, tokens=300)

    async def body() -> tuple[list[Completion], int, int]:
        engines = [ProcessEngine(model, CONFIG, publisher, threads=1) for _ in range(2)]
        await publish(engines[0], policy, 1)
        await _all(engine.start() for engine in engines)
        pool = EnginePool.of(engines)
        try:
            tasks = [asyncio.create_task(pool.generate(each)) for each in asked]
            await until_generated(engines[0], 2 * 64 + 10)
            os.kill(engines[0].pid, signal.SIGKILL)
            done = await asyncio.gather(*tasks)
            with pytest.raises(EngineLost, match="its process was lost: killed by signal 9"):
                await engines[0].generate(asked[0])
            return done, pool.losses, pool.stats().restarts
        finally:
            await pool.close()

    done, *lost = run(body())
    assert lost == [1, 1]
    assert tokens(done) == tokens(run(native(policy, asked)))


def named_memory(pid: int) -> set[Path]:
    """That a process has mapped; all of a machine's would be other people's too."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]) for line in lines if "/dev/shm/" in line}


def test_too_many_losses_end_it_with_the_last_words(
    model: ModelConfig, policy: Policy, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whatever happened, nothing is left behind."""
    files, shared = len(os.listdir("/proc/self/fd")), named_memory(os.getpid())
    own: set[Path] = set()
    publisher = MemoryPublisher()

    async def body() -> tuple[int, BaseException | None]:
        engine = Pool(model, publisher)
        await engine.start()
        try:
            task = asyncio.create_task(engine.generate(requests(1, tokens=490)[0]))
            await until_generated(engine, 1)
            monkeypatch.setattr(process_module, "BOOT", "import sys; sys.exit('no memory left')")
            process = engine.pid
            own.update(named_memory(process) | named_memory(os.getpid()) - shared)
            os.kill(process, signal.SIGKILL)
            await asyncio.gather(task, return_exceptions=True)
            with pytest.raises(EngineError, match="no engine is left: engine 0 was lost 4 times within 60 s"):
                await engine.generate(requests(1)[0])
            return process, task.exception()
        finally:
            await engine.close()
            publisher.close()

    process, error = run(body())
    assert isinstance(error, EngineError)
    assert "was lost 4 times within 60 s" in str(error) and "exit status 1" in str(error)
    assert "no memory left" in str(error)
    assert not Path(f"/proc/{process}").exists()
    assert len(os.listdir("/proc/self/fd")) == files
    assert not [path for path in own if path.exists()]


def test_a_process_that_never_comes_up(
    model: ModelConfig, publisher: MemoryPublisher, run: Run[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def start(engine: ProcessEngine) -> None:
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(EngineError, match=r"no config\.json"):
        run(start(ProcessEngine(ModelConfig(path=str(tmp_path)), CONFIG, publisher)))
    monkeypatch.setattr(process_module, "BOOT", "import sys; sys.exit('boom')")
    with pytest.raises(EngineError, match=r"could not start: exit status 1; its stderr ends with:\nboom"):
        run(start(ProcessEngine(model, CONFIG, publisher)))
    monkeypatch.setattr(process_module, "BOOT", "import time; time.sleep(60)")
    with pytest.raises(EngineError, match=r"was not ready, and did nothing for 0\.3 s"):
        run(start(ProcessEngine(model, CONFIG, publisher, limits=Deadlines(start=0.3))))


def test_a_start_that_is_cancelled(
    model: ModelConfig, publisher: MemoryPublisher, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "BOOT", "import time; time.sleep(60)")

    async def body() -> None:
        engine = ProcessEngine(model, CONFIG, publisher)
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0.3)
        with pytest.raises(EngineError, match="has not been started"):
            await engine.generate(requests(1)[0])
        starting.cancel()
        await asyncio.wait({starting})
        await engine.close()
        with pytest.raises(EngineError, match="is closed"):
            await engine.generate(requests(1)[0])

    run(body())


def test_impossible_settings_are_refused(model: ModelConfig, publisher: MemoryPublisher) -> None:
    with pytest.raises(EngineError, match=r"threads .* at least 1, got 0"):
        ProcessEngine(model, CONFIG, publisher, threads=0)
    with pytest.raises(EngineError, match=r"cores .* must be some of \[.*\], got \[9999\]"):
        ProcessEngine(model, CONFIG, publisher, cores=[9999])


def test_the_process_dies_with_its_owner(model: ModelConfig, warm_server: warm_starts.Server) -> None:
    script = f"""
        import asyncio, os, warm_starts
        from kitae.engines.config import EngineConfig
        from kitae.models.config import ModelConfig
        from kitae.engines.process.process_engine import ProcessEngine
        from kitae.weights.shared_memory import MemoryPublisher

        warm = warm_starts.Server.forked()
        asyncio.create_subprocess_exec = warm.instead_of(asyncio.create_subprocess_exec, warm_starts.POSTS)

        async def body():
            model, config = ModelConfig(path={model.path!r}), EngineConfig(memory_gb=0.02)
            engine = ProcessEngine(model, config, MemoryPublisher(), threads=1)
            await engine.start()
            print(engine.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(body())
    """

    async def body() -> int:
        owner = await warm_server.start(
            *(sys.executable, "-c", textwrap.dedent(script)),
            stdin=0,
            stdout=subprocess.PIPE,
            stderr=2,
            start_new_session=True,
            env=os.environ,
        )
        assert owner.stdout is not None
        process = int(await owner.stdout.readline())
        assert os.getsid(process) == process, "a session of its own: Ctrl-C does not reach it"
        owner.kill()
        await owner.wait()
        return process

    process = asyncio.run(body())
    for _ in range(100):
        if not Path(f"/proc/{process}").exists():
            return
        time.sleep(0.05)
    pytest.fail("the engine's process outlived its owner")


STUCK = """
import os, socket, sys, time
sys.path[:] = sys.argv[2:]
from kitae.workers.frames import pack_frame
names = "version prompt_tokens prompt_tokens_shared generated_tokens preemptions running waiting busy_seconds"
life = {"status": {"stats": dict.fromkeys(names.split(), 1), "rests": RESTS}}
stream = socket.socket(fileno=os.dup(0))
stream.sendall(pack_frame({"ready": True, **life}))
while True:
    time.sleep(0.02)
    stream.sendall(pack_frame({"tick": True, **life}))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("rests", [True, False])
def test_a_process_without_progress(
    model: ModelConfig, run: Run[Any], monkeypatch: pytest.MonkeyPatch, rests: bool
) -> None:
    """It lives, has work and takes no step: that is a loss, unless it is paused. And it does not end when asked to."""
    monkeypatch.setattr(process_module, "BOOT", STUCK.replace("RESTS", str(rests)))

    async def body() -> str | None:
        publisher = MemoryPublisher()
        engine = ProcessEngine(model, CONFIG, publisher, limits=Deadlines(silence=2.0, stall=0.4, close=0.2))
        try:
            await engine.start()
            done = await asyncio.wait_for(engine.generate(requests(1)[0]), 1.5 if rests else 60)
        except TimeoutError:
            assert not engine.lost.done()
            return None
        else:
            assert done.finish == "suspended"
            with pytest.raises(EngineLost) as lost:
                await engine.resume()
            return str(lost.value)
        finally:
            await engine.close()
            publisher.close()

    why = run(body())
    assert why is None if rests else "had work and took no step for 0.4 s" in str(why)
