"""The contract of `Engine`, sentence by sentence, for every engine there is.

Engines are shared by the tests of this module, because a process takes seconds to start. Each test begins with the
weights of the trainer as version 0 and must leave the engine idle.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in import StandIn
from torch import Tensor

from kitae.engines.base import Completion, Engine, EngineStats, Request, Sampled, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.engine_pool import EnginePool
from kitae.engines.fake import FakeEngine, Pace
from kitae.engines.native.engine import NativeEngine
from kitae.engines.process.process_engine import ProcessEngine
from kitae.engines.start_engine import start_servers
from kitae.errors import EngineError, RequestError, WeightsDamaged
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.weights.base import Manifest
from kitae.weights.probe import Probe, score_probe
from kitae.weights.shared_memory import MemoryPublisher, MemoryReceiver

pytestmark = pytest.mark.usefixtures("warm_posts")

CONFIG = EngineConfig(memory_gb=0.02, speculation=False)  # answers that are long enough to be met on their way
OWN_WEIGHTS = [
    "process",
    pytest.param("pool of processes", marks=pytest.mark.slow),
    "fake with weights",
    "pool of fakes",
    "vllm",
    "sglang",
]
KINDS = ["native", "fake", *OWN_WEIGHTS]


@dataclass
class Subject:
    """An engine under test, with the trainer that it gets its weights from."""

    kind: str
    policy: Policy
    size: int = 1
    publisher: MemoryPublisher | None = None
    stand_in: StandIn | None = None
    _engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def long(self) -> int:
        """Tokens of a response that is still running when something happens to it; those of servers come slowly."""
        return 120 if self.kind in ("vllm", "sglang") else 300

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.policy.model.named_parameters()}

    async def open(self) -> None:
        """Start the engine, unless it runs."""
        if self._engine is not None:
            return
        if self.kind == "native":
            self._engine = NativeEngine(self.policy, CONFIG)
        elif self.kind == "fake":
            self._engine = self._fake(None)
        elif self.kind in ("vllm", "sglang"):
            self._engine = await self._served()
        else:
            self.publisher = self.publisher or MemoryPublisher("delta")
            self.size = 2 if self.kind.startswith("pool") else 1
            make = self._process if "process" in self.kind else self._receiving
            engines = [make(self.publisher) for _ in range(self.size)]
            await asyncio.gather(*(e.start() for e in engines if isinstance(e, ProcessEngine)))
            self._engine = EnginePool.of(engines) if "pool" in self.kind else engines[0]

    async def close(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.close()
        if self.stand_in is not None:
            stand_in, self.stand_in = self.stand_in, None
            await stand_in.close()

    async def _served(self) -> Engine:
        self.publisher = self.publisher or MemoryPublisher("delta")
        model = ModelConfig(path=self.policy.source, dtype="float32", device="cpu")
        self.stand_in = StandIn(load_policy(model), self.kind, end=lambda: None)
        config = EngineConfig.model_validate({"kind": self.kind, "urls": [await self.stand_in.serve()]})
        return await start_servers(model, config, self.publisher, 0)

    def _process(self, publisher: MemoryPublisher) -> Engine:
        model = ModelConfig(path=self.policy.source, dtype="float32", device="cpu")
        return ProcessEngine(model, CONFIG, publisher, threads=1)

    def _receiving(self, publisher: MemoryPublisher) -> Engine:
        loaded = {name: torch.zeros_like(t) for name, t in self.tensors.items()}
        return self._fake(MemoryReceiver(*map(os.dup, publisher.descriptors), loaded))

    def _fake(self, receiver: MemoryReceiver | None) -> Engine:
        def respond(request: Request) -> list[int]:
            return random.Random(request.seed).choices(range(3, 250), k=self.long)

        return FakeEngine(respond, Pace(step=0.001), shares_weights=receiver is None, receiver=receiver)

    async def publish(self, version: int, *, in_full: bool = False) -> Manifest | None:
        if self.publisher is None:
            return None
        return await asyncio.to_thread(self.publisher.publish, version, self.tensors, in_full=in_full)

    async def update(self, version: int, *, recompute: bool = False) -> int:
        """Publish what the trainer has, and have it served."""
        return await self.engine.update_weights(WeightUpdate(version, await self.publish(version), recompute))


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Awaitable[Any]], Any]]:
    with asyncio.Runner() as runner:
        yield lambda work: runner.run(asyncio.wait_for(work, 60))


@pytest.fixture(scope="module", params=KINDS)
def shared(
    request: pytest.FixtureRequest, run: Callable[..., Any], tiny_folder: Callable[[str], Path]
) -> Iterator[Subject]:
    model = ModelConfig(path=str(tiny_folder("llama")), dtype="float32", device="cpu")
    subject = Subject(request.param, load_policy(model))
    yield subject
    run(subject.close())
    if subject.publisher is not None:
        subject.publisher.close()


@pytest.fixture
def subject(shared: Subject, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    if shared.kind == "sglang":  # its log-probs are those before top-k
        monkeypatch.setitem(SAMPLING, "top_k", 0)

    async def begin() -> None:
        await shared.open()
        assert await shared.update(0) == 0

    async def end() -> None:
        if shared._engine is not None:
            await shared.engine.resume()
            while (stats := shared.engine.stats()).running + stats.waiting:
                await asyncio.sleep(0.01)

    run(begin())
    yield shared
    run(end())


# Few candidates, far apart: with hundreds, some draw falls where rounding decides.
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 4}


def ask(name: str = "r", tokens: int = 40, seed: int = 3, **sampling: Any) -> Request:
    params = SamplingParams(max_tokens=tokens, **SAMPLING, **sampling)
    return Request(name, tuple(range(5, 20)), params, seed, share="prompt")


def several(count: int, tokens: int = 40) -> list[Request]:
    return [ask(str(i), tokens, seed=10 + i) for i in range(count)]


async def generated(engine: Engine, more: int = 20) -> None:
    """Wait until it has sampled so many more tokens."""
    goal = engine.stats().generated_tokens + more
    while engine.stats().generated_tokens < goal:
        if engine.capabilities.scores:  # it lives elsewhere, and tells its counters with every answer
            await asyncio.sleep(0.03)  # longer than an idle engine lingers over its first request
            await engine.resume()
        await asyncio.sleep(0.002)


@asynccontextmanager
async def flying(engine: Engine, requests: list[Request]) -> AsyncIterator[list["asyncio.Task[Completion]"]]:
    """While they are being sampled, with some tokens each."""
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    try:
        await generated(engine, 20 * len(requests))
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.thorough(keep=2)
def test_a_completion_has_a_logprob_and_a_version_for_each_token(subject: Subject, run: Callable[..., Any]) -> None:
    done = run(subject.engine.generate(ask("a", tokens=25)))
    assert (done.id, done.finish) == ("a", "length")
    assert len(done.tokens) == len(done.logprobs) == 25 and done.versions == (0,) * 25
    assert all(logprob <= 0 for logprob in done.logprobs)


@pytest.mark.thorough(keep=2)
def test_a_seed_names_the_random_stream(subject: Subject, run: Callable[..., Any]) -> None:
    assert subject.engine.capabilities.seeded == (subject.stand_in is None), "a server repeats no draws it has lost"

    async def body() -> None:
        crowd = await asyncio.gather(*map(subject.engine.generate, several(5)))
        assert len({c.tokens for c in crowd}) == 5
        alone = await subject.engine.generate(several(5)[2])
        assert alone.tokens == crowd[2].tokens, "whatever else is in flight"

    run(body())


def test_a_stop_token_ends_a_response_and_is_part_of_it(subject: Subject, run: Callable[..., Any]) -> None:
    free = run(subject.engine.generate(ask()))
    stop = free.tokens[12]
    first = free.tokens.index(stop)
    done = run(subject.engine.generate(ask(stop_tokens=(stop,))))
    assert (done.tokens, done.finish) == (free.tokens[: first + 1], "stop")


def test_a_stop_string_ends_a_response_where_text_is_known(subject: Subject, run: Callable[..., Any]) -> None:
    free = run(subject.engine.generate(ask()))
    text = subject.policy.tokenizer.decode(free.tokens[3:6])
    done = run(subject.engine.generate(ask(stop_strings=(text,))))
    if subject.engine.capabilities.stop_strings:
        assert done.finish == "stop" and text in subject.policy.tokenizer.decode(done.tokens)
        assert done.tokens == free.tokens[: len(done.tokens)] and len(done.tokens) <= 6
    else:
        assert done == free


@pytest.mark.thorough(keep=2)
def test_an_update_in_flight_shows_in_the_versions_alone(subject: Subject, run: Callable[..., Any]) -> None:
    """The same weights under a new number, computed again: the tokens stay."""
    engine = subject.engine

    async def body() -> None:
        plain = await engine.generate(ask(tokens=300))
        async with flying(engine, [ask(tokens=300)]) as (task,):
            assert await subject.update(6, recompute=True) == 6
            assert engine.stats().version == 6
            await generated(engine, 20)
            assert await subject.update(7) == 7
            done = await task
        assert done.tokens == plain.tokens
        assert set(done.versions) == {0, 6, 7} and list(done.versions) == sorted(done.versions)
        assert done.versions.count(0) >= 20

    run(body())


@pytest.mark.thorough(keep=2)
def test_no_token_is_sampled_between_pause_and_resume(subject: Subject, run: Callable[..., Any]) -> None:
    engine = subject.engine

    async def body() -> None:
        async with flying(engine, [ask("before", subject.long)]) as (before,):
            await engine.pause()
            await asyncio.sleep(0.3)  # an engine elsewhere tells its counters now and then
            halted = engine.stats().generated_tokens
            during = asyncio.create_task(engine.generate(ask("during", 20)))
            await engine.probe()
            await asyncio.sleep(0.3)
            assert engine.stats().generated_tokens == halted and not before.done() and not during.done()
            assert await subject.update(1) == 1
            await asyncio.sleep(0.1)
            assert not during.done(), "an update is no resume"
            await engine.resume()
            first, second = await before, await during
        assert len(first.tokens) == subject.long and set(first.versions) == {0, 1} and second.versions == (1,) * 20

    run(body())


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("paused", [False, True])
def test_abort_returns_what_was_sampled(subject: Subject, run: Callable[..., Any], paused: bool) -> None:
    engine = subject.engine

    async def body() -> None:
        plain = await engine.generate(ask("a", subject.long))
        async with flying(engine, [ask("a", subject.long), ask("b", subject.long)]) as (one, other):
            if paused:
                await engine.pause()
            await engine.abort("a")
            await engine.abort("nobody")
            done = await one
            assert done.finish == "abort" and 0 < len(done.tokens) < subject.long
            assert done.tokens == plain.tokens[: len(done.tokens)]
            assert len(done.tokens) == len(done.logprobs) == len(done.versions)
            await engine.resume()
            assert (await other).tokens == plain.tokens

    run(body())


def test_abort_before_the_first_token(subject: Subject, run: Callable[..., Any]) -> None:
    async def body() -> None:
        await subject.engine.pause()
        task = asyncio.create_task(subject.engine.generate(ask("a")))
        await asyncio.sleep(0.05)
        await subject.engine.abort("a")
        assert await task == Completion("a", (), (), (), "abort")

    run(body())


@pytest.mark.thorough(keep=2)
def test_what_is_suspended_can_be_continued(subject: Subject, run: Callable[..., Any]) -> None:
    engine = subject.engine

    async def body() -> None:
        requests = several(3, subject.long)
        plain = await asyncio.gather(*map(engine.generate, requests))
        async with flying(engine, requests) as tasks:
            await engine.suspend()
            parts = [await task for task in tasks]
        assert {p.finish for p in parts} == {"suspended"} and all(0 < len(p.tokens) < subject.long for p in parts)
        await subject.update(2)
        again = [replace(r, prior=p.sampled) for r, p in zip(requests, parts, strict=True)]
        for whole, part, done in zip(plain, parts, await asyncio.gather(*map(engine.generate, again)), strict=True):
            if engine.capabilities.seeded:
                assert done.tokens == whole.tokens
            assert done.tokens[: len(part.tokens)] == part.tokens and done.finish == whole.finish
            assert done.logprobs[: len(part.tokens)] == part.logprobs
            assert done.versions == part.versions + (2,) * (subject.long - len(part.tokens))

    run(body())


@pytest.mark.thorough(keep=2)
def test_progress_is_what_a_request_can_be_continued_from(subject: Subject, run: Callable[..., Any]) -> None:
    engine = subject.engine

    async def met() -> tuple[Sampled, Sampled, Completion]:
        while True:  # on a busy machine an answer may be over before anybody has looked
            async with flying(engine, [ask("a", subject.long)]) as (task,):
                while not task.done():
                    first = engine.progress({}).get("a")
                    if first is not None and len(first.tokens) >= 5:
                        return first, engine.progress({"a": 3})["a"], await task
                    await asyncio.sleep(0.01)

    async def body() -> None:
        assert engine.progress({}) == {}
        first, later, done = await met()
        count = len(first.tokens)
        assert first.tokens == done.tokens[:count] and first.logprobs == done.logprobs[:count]
        assert len(later.tokens) >= count - 3 and later.tokens == done.tokens[3 : 3 + len(later.tokens)]
        assert len(first.versions) == count and engine.progress({}) == {}

    run(body())


@pytest.mark.thorough(keep=2)
def test_an_id_is_unique_in_flight_and_free_afterwards(subject: Subject, run: Callable[..., Any]) -> None:
    async def body() -> None:
        async with flying(subject.engine, [ask("a", subject.long)]) as (task,):
            with pytest.raises(RequestError, match="'a' is in flight already"):
                await subject.engine.generate(ask("a"))
            assert len((await task).tokens) == subject.long
        assert len((await subject.engine.generate(ask("a", 5))).tokens) == 5

    run(body())


def test_an_impossible_request_leaves_the_others_alone(subject: Subject, run: Callable[..., Any]) -> None:
    async def body() -> list[Any]:
        asked = [ask("a"), replace(ask("bad"), prompt_tokens=()), ask("b")]
        return await asyncio.gather(*map(subject.engine.generate, asked), return_exceptions=True)

    one, bad, two = run(body())
    assert isinstance(bad, RequestError) and "'bad'" in str(bad) and "empty" in str(bad)
    assert len(one.tokens) == 40 and one.tokens == two.tokens


@pytest.mark.thorough(keep=2)
def test_a_cancelled_caller_leaves_nothing_behind(subject: Subject, run: Callable[..., Any]) -> None:
    async def body() -> None:
        async with flying(subject.engine, [ask("a", subject.long), ask("b", subject.long)]) as (one, two):
            one.cancel()
            with pytest.raises(asyncio.CancelledError):
                await one
            assert "a" not in subject.engine.progress({}) or subject.kind == "native"  # its thread takes a moment
            again = ask("a", 5)
            while True:
                try:
                    assert len((await subject.engine.generate(again)).tokens) == 5
                    break
                except RequestError:
                    assert subject.kind == "native"
                    await asyncio.sleep(0.002)
            assert len((await two).tokens) == subject.long

    run(body())


@pytest.mark.thorough(keep=2)
def test_counters_never_go_back(subject: Subject, run: Callable[..., Any]) -> None:
    engine = subject.engine

    def counters(s: EngineStats) -> tuple[float, ...]:
        return (
            s.prompt_tokens, s.prompt_tokens_shared, s.generated_tokens, s.preemptions, s.busy_seconds, s.restarts,
            s.repaired, s.restored,
        )  # fmt: skip

    async def body() -> None:
        first = last = engine.stats()
        tasks = [asyncio.create_task(engine.generate(r)) for r in several(4, 100)]
        busiest = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.003)
            stats = engine.stats()
            assert all(a >= b for a, b in zip(counters(stats), counters(last), strict=True))
            last, busiest = stats, max(busiest, stats.running + stats.waiting)
        assert busiest == 4
        while (last := engine.stats()).running + last.waiting:
            await asyncio.sleep(0.01)
        prompts = [s.prompt_tokens + s.prompt_tokens_shared for s in (first, last)]
        assert prompts[1] - prompts[0] == 4 * 15 and last.prompt_tokens_shared > first.prompt_tokens_shared
        assert last.generated_tokens - first.generated_tokens == 400 and last.busy_seconds > first.busy_seconds

    run(body())


def test_an_engine_with_weights_of_its_own_shows_what_it_serves(subject: Subject, run: Callable[..., Any]) -> None:
    engine = subject.engine
    if not engine.capabilities.scores:
        assert run(engine.probe()) == ()
        return
    with torch.no_grad():
        for parameter in subject.policy.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.01)
    assert run(engine.probe())[0].gap(score_probe(subject.policy)) > 1e-3
    run(subject.update(4))
    assert run(engine.probe()) == (Probe(4, score_probe(subject.policy)),) * subject.size


@pytest.mark.parametrize("shared", ["native", "fake"], indirect=True)
def test_what_shares_the_trainers_weights_takes_no_others(subject: Subject, run: Callable[..., Any]) -> None:
    publisher = MemoryPublisher()
    manifest = publisher.publish(1, subject.tensors)
    with pytest.raises(EngineError, match="weight update 1 must have no manifest"):
        run(subject.engine.update_weights(WeightUpdate(1, manifest)))
    publisher.close()
    assert subject.engine.stats().version == 0


@pytest.mark.parametrize("shared", OWN_WEIGHTS, indirect=True)
def test_weights_that_do_not_fit_are_refused(subject: Subject, run: Callable[..., Any]) -> None:
    engine, publisher = subject.engine, subject.publisher
    assert publisher is not None

    async def body() -> None:
        manifest = await subject.publish(1)
        assert manifest is not None
        first, *rest = manifest.entries
        for wrong, message in (
            (replace(first, name="nonsense"), "weight update 1 names an unknown parameter 'nonsense'"),
            (replace(first, dtype="float16"), rf"weight update 1: '{first.name}' must have dtype float32, got float16"),
            (replace(first, shape=(2,)), rf"weight update 1: '{first.name}' must have shape \(\d+, 64\), got \(2,\)"),
        ):
            publisher._manifest = replace(manifest, entries=(wrong, *rest))
            with pytest.raises(EngineError, match=message) as caught:
                await engine.update_weights(WeightUpdate(1, publisher._manifest))
            assert not isinstance(caught.value, WeightsDamaged)
        assert (await engine.generate(ask())).versions == (0,) * 40, "it goes on as before"

    run(body())


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("shared", OWN_WEIGHTS, indirect=True)
def test_damaged_weights_take_no_step_until_whole_ones_come(subject: Subject, run: Callable[..., Any]) -> None:
    engine, publisher = subject.engine, subject.publisher
    assert publisher is not None

    async def body() -> None:
        async with flying(engine, [ask("a", subject.long)]) as (task,):
            manifest = await subject.publish(1, in_full=True)
            byte = os.pread(publisher.descriptors[0], 1, 0)
            os.pwrite(publisher.descriptors[0], bytes([byte[0] ^ 1]), 0)
            with pytest.raises(WeightsDamaged, match="version 1 did not"):
                await engine.update_weights(WeightUpdate(1, manifest))
            await asyncio.sleep(0.3)
            halted = engine.stats().generated_tokens
            new = asyncio.create_task(engine.generate(ask("b", 20)))
            await engine.resume()
            await asyncio.sleep(0.3)
            assert engine.stats().generated_tokens == halted and not task.done() and not new.done()
            assert engine.stats().version == 0
            again = await subject.publish(1, in_full=True)
            assert await engine.update_weights(WeightUpdate(1, again)) == 1
            assert (await new).versions == (1,) * 20 and set((await task).versions) == {0, 1}

    run(body())


@pytest.mark.parametrize("shared", OWN_WEIGHTS, indirect=True)
def test_a_damaged_delta_is_repaired_and_counted(subject: Subject, run: Callable[..., Any]) -> None:
    engine, publisher = subject.engine, subject.publisher
    assert publisher is not None

    async def body() -> None:
        before = engine.stats().repaired
        with torch.no_grad():
            next(subject.policy.model.parameters())[0, 0] += 1
        manifest = await subject.publish(1)
        assert manifest is not None and manifest.mode == "delta" and manifest.parts
        os.pwrite(publisher.descriptors[1], bytes([7] * 4), manifest.parts[0].offset)
        assert await engine.update_weights(WeightUpdate(1, manifest)) == 1
        assert engine.stats().repaired >= before + subject.size
        if engine.capabilities.scores:
            assert await engine.probe() == (Probe(1, score_probe(subject.policy)),) * subject.size

    run(body())


@pytest.mark.thorough(keep=2)
def test_close_fails_what_is_pending_and_refuses_what_comes(subject: Subject, run: Callable[..., Any]) -> None:
    async def body() -> None:
        engine = subject.engine
        task = asyncio.create_task(engine.generate(ask("a", subject.long)))
        await generated(engine, 1)
        await subject.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        for late in (
            engine.generate(ask("b")), engine.update_weights(WeightUpdate(1)), engine.pause(), engine.resume(),
            engine.suspend(),
        ):  # fmt: skip
            with pytest.raises(EngineError, match="closed"):
                await late
        await engine.close()

    run(body())
