"""The engine with a runner that keeps the state of its rows and is read one step late, as on a GPU: all tests again."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kitae.engines.config import EngineConfig
from kitae.engines.native import engine
from kitae.engines.native.cache import KVCache
from kitae.engines.native.decoding import Decoding
from kitae.engines.native.runner import ModelRunner, Result
from kitae.engines.native.scheduler import Admission
from kitae.models.policy import Policy

sys.path.append(str(Path(__file__).parent))
from test_native_engine import *  # noqa: F403


class LateRunner(ModelRunner):
    """Knows by itself which token comes next and which rows have ended; the host learns it later."""

    ahead = 1

    def __init__(self, policy: Policy, cache: KVCache, fast: bool) -> None:
        super().__init__(policy, cache, fast)
        self.rows: dict[int, tuple[Decoding, Decoding]] = {}  # the host's and the runner's own
        self.ended: set[int] = set()
        self.late = 0

    def prefill(self, admission: Admission) -> Result:
        for s in (*admission.fresh, *admission.resumed):
            self.rows.pop(id(s), None)
            self.ended.discard(id(s))
        return super().prefill(admission)

    def decode(self, running: list[Decoding]) -> Result:
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
        drawn = {}
        if active:
            for s, token, logprob in zip(active, *super().decode([mine[id(s)][1] for s in active])(), strict=True):
                own = mine[id(s)][1]
                own.tokens.append(token)
                drawn[id(s)] = token, logprob
                if token in s.request.sampling.stop_tokens or len(own.tokens) >= s.limit:
                    self.ended.add(id(s))
        out = [drawn.get(id(s), (-1, 0.0)) for s in running]
        return lambda: ([token for token, _ in out], [logprob for _, logprob in out])


@pytest.fixture(autouse=True)
def late_runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[LateRunner] = []

    def make(policy: Policy, cache: KVCache, config: EngineConfig) -> ModelRunner:
        made.append(LateRunner(policy, cache, config.fast))
        return made[-1]

    monkeypatch.setattr(engine, "make_runner", make)
    yield
    assert made


def test_results_really_are_late(tiny_policy: TinyPolicy) -> None:  # noqa: F405
    async def use(engine: NativeEngine) -> int:  # noqa: F405
        await engine.generate(Request("r", (5, 6), SamplingParams(max_tokens=20), 0))  # noqa: F405
        return engine.runner.late  # type: ignore[no-any-return]

    assert with_engine(tiny_policy(), use) >= 15  # noqa: F405
