"""The engine with a runner that keeps the state of its rows and is read one step late, as on a GPU: all tests again."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kitae.engines.config import EngineConfig
from kitae.engines.native import engine
from kitae.engines.native.page_cache import KVCache
from kitae.engines.native.runner import ModelRunner, Result, StepTokens
from kitae.engines.native.scheduler import Admission
from kitae.engines.native.sequence import Decoding, Sketch
from kitae.kept_sets import Words
from kitae.models.policy import Policy

sys.path.append(str(Path(__file__).parent))
from test_native_engine import *  # noqa: F403


class LateRunner(ModelRunner):
    """Knows by itself which token comes next and which rows have ended; the host learns it later."""

    ahead = 1

    def __init__(self, policy: Policy, cache: KVCache, *, plain: bool = False, draft_tokens: int = 0) -> None:
        super().__init__(policy, cache, plain=plain, draft_tokens=draft_tokens)
        self.rows: dict[int, tuple[Decoding, Decoding]] = {}  # the host's and the runner's own
        self.ended: set[int] = set()
        self.late = 0

    def prefill(self, admission: Admission) -> Result:
        for s in (*admission.fresh, *admission.resumed):
            self.rows.pop(id(s), None)
            self.ended.discard(id(s))
        return super().prefill(admission)

    def decode(self, running: list[Decoding], width: int = 1) -> Result:
        # Stop strings are the host's business: it must read every token before the next step.
        self.ahead = 0 if any(s.request.sampling.stop_strings for s in running) else 1
        mine = {}
        for s in running:
            known = self.rows.get(id(s))
            own = known[1] if known and known[0] is s else replace(s, tokens=list(s.tokens))
            self.late += len(own.tokens) > len(s.tokens)
            own.pages = s.pages
            mine[id(s)] = (s, own)
        self.rows = mine
        self.ended &= mine.keys()
        active = [s for s in running if id(s) not in self.ended]
        nothing: tuple[int, float, Sketch, Words | None] = (-1, 0.0, (), None)
        drawn = {id(s): [nothing] * width for s in running}
        if active:
            all_drawn = list(zip(*super().decode([mine[id(s)][1] for s in active], width)(), strict=True))
            for i, s in enumerate(active):
                own = mine[id(s)][1]
                for j, (token, logprob, sketch, kept) in enumerate(all_drawn[i * width : (i + 1) * width]):
                    if token < 0 or id(s) in self.ended:
                        break
                    own.tokens.append(token)
                    drawn[id(s)][j] = token, logprob, sketch, kept
                    if token in s.request.sampling.stop_tokens or len(own.tokens) >= s.limit:
                        self.ended.add(id(s))
        out = [row for s in running for row in drawn[id(s)]]
        return lambda: StepTokens(*([row[place] for row in out] for place in range(4)))


@pytest.fixture(autouse=True)
def late_runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[LateRunner] = []

    def make(policy: Policy, cache: KVCache, config: EngineConfig, **settings: Any) -> ModelRunner:
        made.append(LateRunner(policy, cache, **settings))
        return made[-1]

    monkeypatch.setattr(engine, "make_runner", make)
    yield
    assert made


def test_results_really_are_late(tiny_policy: TinyPolicy) -> None:  # noqa: F405
    async def use(engine: NativeEngine) -> int:  # noqa: F405
        await engine.generate(Request("r", (5, 6), SamplingParams(max_tokens=20), 0))  # noqa: F405
        return engine.runner.late  # type: ignore[no-any-return]

    assert with_engine(tiny_policy(), use) >= 15  # noqa: F405


def test_few_free_slots_wait_for_more_prompts(tiny_policy: TinyPolicy) -> None:  # noqa: F405
    """With 16 slots and answers of many lengths, prompts that fill one slot are not computed one by one."""
    sizes: list[int] = []
    plain = LateRunner.prefill

    def prefill(self: LateRunner, admission: Admission) -> Result:
        sizes.append(len(admission.fresh))
        return plain(self, admission)

    async def use(engine: NativeEngine) -> list[tuple[int, ...]]:  # noqa: F405
        requests = [
            Request(f"r{i}", (5, 6, i), SamplingParams(max_tokens=4 + (i * 7) % 29), seed=i)  # noqa: F405
            for i in range(64)
        ]
        return [c.tokens for c in await asyncio.gather(*map(engine.generate, requests))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateRunner, "prefill", prefill)
        together = with_engine(tiny_policy(), use, max_batch=16)  # noqa: F405
        assert len(sizes) < 30, "of 64 if each free slot were filled at once"
        patch.setattr(engine, "_STEPS_BETWEEN_PROMPTS", 0)
        sizes.clear()
        assert with_engine(tiny_policy(), use, max_batch=16) == together  # noqa: F405
        assert len(sizes) > 30
