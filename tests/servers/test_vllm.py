"""A real vLLM on the CPU behind `engine.kind = "vllm"`: weights, versions, caches, and what a killed one leaves."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kitae.engines.base import Completion, Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.engine_pool import EnginePool
from kitae.engines.servers.server_client import Line
from kitae.engines.servers.server_engine import ServerEngine
from kitae.engines.servers.vllm import VLLM
from kitae.engines.start_engine import start_servers
from kitae.errors import EngineError
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.tiny import make_tiny
from kitae.weights.probe import score_probe
from kitae.weights.shared_memory import MemoryPublisher
from kitae.workers.process_status import family_of

PYTHON = Path(__file__).parents[2] / ".venv-servers/vllm/bin/python"
PROMPT = tuple((i * 13) % 250 + 3 for i in range(300))
LONG = 1500  # tokens of an answer
EXACT = 1e-4  # nats: what fp32 may differ by
RUN = "from kitae.cli.main import run; run()"

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}: make test-servers makes it"),
    pytest.mark.timeout(1800),
]


class Trained:
    """A trainer whose weights move, and the engine that is to follow it."""

    def __init__(self, policy: Policy, publisher: MemoryPublisher, engine: EnginePool) -> None:
        self.policy, self.publisher, self.engine = policy, publisher, engine
        self.version = 0

    def publish(self) -> WeightUpdate:
        self.version += 1
        tensors = {name: p.detach() for name, p in self.policy.model.named_parameters()}
        return WeightUpdate(self.version, self.publisher.publish(self.version, tensors))

    async def step(self, *, recompute: bool = False) -> float:
        """An update, as a run makes it; the gap of the probe."""
        await self.engine.pause()
        with torch.no_grad():
            for p in self.policy.model.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(self.version)) * 0.02)
        await self.engine.update_weights(replace(self.publish(), recompute=recompute))
        (probe,) = await self.engine.probe()
        await self.engine.resume()
        assert probe.version == self.version
        return probe.gap(score_probe(self.policy))

    def gap(self, done: Completion, prompt: tuple[int, ...] = PROMPT, start: int = 0) -> float:
        """Between the log-probs of a response, from a token on, and what the weights of now give."""
        scored = self.policy.score(torch.tensor(prompt + done.tokens))[len(prompt) - 1 :]
        return float((scored - torch.tensor(done.logprobs)).abs()[start:].max())


def ask(name: str, tokens: int = 20, prompt: tuple[int, ...] = PROMPT, seed: int = 1) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=tokens), seed, share="prompt")


async def everybody_has(engine: EnginePool, requests: int, tokens: int) -> None:
    while len(found := engine.progress({})) < requests or min(len(p.tokens) for p in found.values()) < tokens:
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Awaitable[Any]], Any]]:
    with asyncio.Runner() as runner:
        yield lambda work: runner.run(asyncio.wait_for(work, 900))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's attention on a CPU wants heads of 32 at least. Answers are long enough to be met in flight."""
    return make_tiny(tmp_path_factory.mktemp("tiny") / "llama", "llama", hidden=128, context=2048)


@pytest.fixture(scope="module")
def trained(run: Callable[..., Any], folder: Path) -> Iterator[Trained]:
    model = ModelConfig(path=str(folder), dtype="float32", device="cpu")
    config = EngineConfig(kind="vllm", server=str(PYTHON), max_batch=32, server_args=("--enforce-eager",))
    publisher = MemoryPublisher()
    cores = [sorted(os.sched_getaffinity(0))[-1:]]
    engine = run(start_servers(model, config, publisher, 0, cores))
    found = Trained(load_policy(model), publisher, engine)
    yield found
    run(engine.close())
    publisher.close()


def test_five_updates_with_a_shared_prompt(run: Callable[..., Any], trained: Trained) -> None:
    async def body() -> None:
        for number in range(5):
            probe = await trained.step()
            shared = trained.engine.stats().prompt_tokens_shared
            await trained.engine.generate(ask("first"))
            done = await asyncio.gather(*(trained.engine.generate(ask(f"{i}", seed=i)) for i in range(3)))
            gaps = [trained.gap(d) for d in done]
            found = trained.engine.stats().prompt_tokens_shared - shared
            print(f"update {number + 1}: probe {probe:.1e}, responses {max(gaps):.1e}, {found} prompt tokens shared")
            assert probe < EXACT and max(gaps) < EXACT
            assert found >= 3 * 128, "the prefix cache is on"
            assert all(set(d.versions) == {trained.version} for d in done)

    run(body())


def test_without_the_reset_responses_are_wrong(
    run: Callable[..., Any], trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test before would see if the cache survived an update."""
    plain = VLLM.request

    async def keep(self: VLLM, line: Line, *, recompute: bool) -> None:
        pass

    def unsalted(self: VLLM, name: str, request: Request, version: int) -> Any:
        return plain(self, name, request, version=0)

    async def body() -> float:
        await trained.engine.generate(ask("warm"))
        monkeypatch.setattr(VLLM, "forget", keep)
        assert await trained.step() < EXACT, "the probe does not see it: it asks for log-probs of a prompt"
        gap = trained.gap(await trained.engine.generate(ask("stale")))
        monkeypatch.undo()
        assert await trained.step() < EXACT
        assert trained.gap(await trained.engine.generate(ask("fresh"))) < EXACT
        return gap

    monkeypatch.setattr(VLLM, "request", unsalted)
    gap = run(body())
    print(f"without the reset: {gap:.2g} nats")
    assert gap > 0.1


@pytest.mark.parametrize("recompute", [False, True])
def test_requests_in_flight_go_on_over_an_update(run: Callable[..., Any], trained: Trained, recompute: bool) -> None:
    async def body() -> None:
        before = trained.version
        prompt = PROMPT[:40]
        task = asyncio.create_task(trained.engine.generate(ask("flying", LONG, prompt)))
        await everybody_has(trained.engine, 1, 40)
        assert await trained.step(recompute=recompute) < EXACT
        new = await trained.engine.generate(ask("new"))
        assert trained.gap(new) < EXACT, "a new request does not see the old cache"
        done = await task
        assert len(done.tokens) == LONG and set(done.versions) == {before, trained.version}
        assert list(done.versions) == sorted(done.versions)
        gap = trained.gap(done, prompt, start=done.versions.index(trained.version))
        print(f"recompute {recompute}: gap of the new tokens {gap:.2g}")
        assert (gap < EXACT) == recompute, "with the old keys and values, log-probs are those of a mixture"

    run(body())


def test_what_is_suspended_is_continued(run: Callable[..., Any], trained: Trained) -> None:
    async def body() -> None:
        prompt = PROMPT[:40]
        tasks = [asyncio.create_task(trained.engine.generate(ask(f"{i}", LONG, prompt, seed=i))) for i in range(3)]
        await everybody_has(trained.engine, 3, 20)
        await trained.engine.suspend()
        parts = [await task for task in tasks]
        assert {p.finish for p in parts} == {"suspended"} and all(20 <= len(p.tokens) < LONG for p in parts)
        then = trained.version
        await trained.step()
        for i, part in enumerate(parts):
            done = await trained.engine.generate(replace(ask(f"{i}", LONG, prompt), prior=part.sampled))
            assert done.tokens[: len(part.tokens)] == part.tokens and len(done.tokens) == LONG
            assert done.versions == (then,) * len(part.tokens) + (trained.version,) * (LONG - len(part.tokens))
            assert trained.gap(done, prompt, start=len(part.tokens)) < EXACT

    run(body())


def test_an_unknown_tensor_is_refused_before_it_is_sent(run: Callable[..., Any], trained: Trained) -> None:
    async def body() -> None:
        update = trained.publish()
        manifest = update.manifest
        assert manifest is not None
        wrong = replace(manifest, entries=(replace(manifest.entries[0], name="unknown"), *manifest.entries[1:]))
        trained.publisher._manifest = wrong
        with pytest.raises(EngineError, match="names an unknown parameter 'unknown'"):
            await trained.engine.update_weights(WeightUpdate(update.version, wrong))
        assert trained.gap(await trained.engine.generate(ask("on"))) < EXACT, "it goes on as before"
        assert await trained.step() < EXACT and trained.engine.stats().restarts == 0

    run(body())


def test_a_damaged_file_is_found_inside_the_server(run: Callable[..., Any], trained: Trained) -> None:
    async def body() -> None:
        (engine,) = trained.engine.members
        assert isinstance(engine, ServerEngine)
        path = engine._folder.current / "model.safetensors"
        whole = path.read_bytes()
        for damage in (whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:], whole[:-1000]):
            path.write_bytes(damage)
            assert await engine.server.dialect.load(engine.server.line, path.parent), (
                "a tensor that is not what was written"
            )
        path.write_bytes(whole)
        assert trained.gap(await trained.engine.generate(ask("on"))) < EXACT, "nothing was loaded"

    run(body())


def test_a_killed_engine_process_is_replaced(run: Callable[..., Any], trained: Trained) -> None:
    async def body() -> None:
        engine = trained.engine
        (member,) = engine.members
        assert isinstance(member, ServerEngine) and member.server.program is not None
        pids = family_of(member.server.program._process.pid)
        cores = [pid for pid in pids if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        tasks = [asyncio.create_task(engine.generate(ask(f"{i}", LONG, PROMPT[:40], seed=i))) for i in range(4)]
        await everybody_has(engine, 4, 20)
        known = engine.progress({})
        began = asyncio.get_running_loop().time()
        os.kill(cores[0], signal.SIGKILL)
        done = await asyncio.gather(*tasks)
        print(f"replaced and answered after {asyncio.get_running_loop().time() - began:.0f} s")
        assert [d.id for d in done] == ["0", "1", "2", "3"] and all(len(d.tokens) == LONG for d in done)
        for d in done:
            before = known[d.id].tokens
            assert d.tokens[: len(before)] == before and set(d.versions) == {trained.version}
            assert trained.gap(d, PROMPT[:40]) < EXACT
        assert engine.stats().restarts == 1
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids), "nothing of the first is left"
        assert await trained.step() < EXACT

    run(body())


def test_a_run_trains_on_it(folder: Path, tmp_path: Path) -> None:
    settings = {
        "model.path": folder,
        "model.dtype": "float32",
        "engine.kind": "vllm",
        "engine.server": PYTHON,
        "engine.max_batch": 32,
        "engine.server_args": '["--enforce-eager"]',
        "engine.spot_check": 0.5,
        "algorithm.filter": "none",
        "pipeline.refill": 0,
        "training.steps": 3,
        "training.prompts_per_step": 2,
        "training.group_size": 4,
        "sampling.max_tokens": 24,
        "eval.prompts": 4,
        "run.dir": tmp_path,
        "run.name": "served",
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    done = subprocess.run(
        [sys.executable, "-c", RUN, "train", "arithmetic", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (made,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    rows = [row for row in map(json.loads, (made / "metrics.jsonl").read_text().splitlines()) if "probe_gap" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["probe_gap"] < EXACT and row["spot_checked"] == 4 and row["spot_refused"] == 0 for row in rows)
    assert all(row["spot_gap"] < EXACT for row in rows)
