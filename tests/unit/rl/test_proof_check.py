"""Answers that an engine did not compute are found, each for its reason; honest ones pass while weights change."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from short_settings import algorithm_of

from kitae.engines.base import Completion, Request, Sampled, SamplingParams
from kitae.engines.config import EngineConfig, ProofConfig
from kitae.engines.native.engine import NativeEngine
from kitae.engines.proof import SKETCH, Tolerance
from kitae.errors import EngineError
from kitae.models.facts import ModelFacts
from kitae.models.policy import Policy
from kitae.rl.proof_check import ProofCheck, tolerance_of
from kitae.trainer.build_worker import reinforced
from kitae.trainer.config import TrainingConfig
from kitae.trainer.local_trainer import LocalTrainer

PROMPT = tuple(range(5, 17))
VERSION = 4
ASKED = Request("train/3/1/0", PROMPT, SamplingParams(max_tokens=24), seed=31)
Lie = Callable[[Completion], Completion]


@dataclass
class Bench:
    """A check on a trainer of a policy. updates: of the trainer; held: what it was at the version it has."""

    policy: Policy
    share: float = 1.0
    recompute: bool = False
    tolerance: Tolerance | None = None
    updates: int = 10
    held: tuple[int, int] = (VERSION, 10)
    told: list[str] = field(default_factory=list)
    withdrawn: list[tuple[int, int]] = field(default_factory=list)

    async def examined(self, pairs: Sequence[tuple[Request, Completion]], served: int = VERSION) -> list[str]:
        training = reinforced(
            self.policy, TrainingConfig(), algorithm_of({"preset": "grpo"}), max_tokens=24, temperature=1.0
        )
        trainer = LocalTrainer(training)
        try:
            check = self.check(trainer)
            return list(await asyncio.gather(*(check.examine(r, done, served) for r, done in pairs)))
        finally:
            await trainer.close()
            self.numbers = check.taken()

    def check(self, trainer: Any) -> ProofCheck:
        self.learner: Any = SimpleNamespace(trainer=trainer, updates=self.updates)
        facts = ModelFacts.of(self.policy)
        tolerance = self.tolerance or tolerance_of(self.policy.dtype)
        check = ProofCheck(
            self.learner, facts, share=self.share, tolerance=tolerance, temperature=1.0,
            recompute=self.recompute,
        )  # fmt: skip

        async def withdraw(rollouts: Sequence[tuple[int, int]]) -> int:
            self.withdrawn += rollouts
            return len(rollouts) - 1

        async def tell(sentence: str) -> None:
            self.told.append(sentence)

        check.begin(SimpleNamespace(check=None, withdrawn=set()), lambda: self.held, withdraw, tell)  # type: ignore[arg-type]
        return check

    def judge(self, *pairs: tuple[Request, Completion], served: int = VERSION) -> list[str]:
        return asyncio.run(self.examined(pairs, served))


async def _sampled(policy: Policy, requests: Sequence[Request], **settings: Any) -> list[Completion]:
    config = EngineConfig(kind="process", memory_gb=0.02, proof=ProofConfig(share=1.0), **settings)
    engine = NativeEngine(policy, config, VERSION)
    try:
        return list(await asyncio.gather(*map(engine.generate, requests)))
    finally:
        await engine.close()


def answer(policy: Policy, request: Request = ASKED, **settings: Any) -> Completion:
    return asyncio.run(_sampled(policy, [request], **settings))[0]


@pytest.mark.parametrize("settings", [{}, {"speculation": False}, {"memory_gb": 0.004}])
@pytest.mark.parametrize("temperature", [1.0, 0.0, 0.5])
def test_honest_answers_pass(tiny_policy: Any, settings: dict[str, Any], temperature: float) -> None:
    """Also drafted ones, in a full cache, of another temperature, and what continues from prior tokens."""
    policy = tiny_policy("llama")
    sampling = SamplingParams(temperature=temperature, max_tokens=24)
    asked = [Request(f"train/{i // 4}/{i % 4}/0", PROMPT[: 8 + i // 4], sampling, seed=i) for i in range(8)]
    config = {"memory_gb": 0.02, **settings}

    async def sampled() -> list[Completion]:
        engine = NativeEngine(policy, EngineConfig(kind="process", proof=ProofConfig(share=1.0), **config), VERSION)
        try:
            return list(await asyncio.gather(*map(engine.generate, asked)))
        finally:
            await engine.close()

    found = asyncio.run(sampled())
    assert all(done.proof is not None and done.proof.shape == (24, SKETCH) for done in found)
    bench = Bench(policy)
    assert bench.judge(*zip(asked, found, strict=True)) == [""] * 8
    assert bench.numbers["proof_checked"] == 8 and bench.numbers["proof_tokens"] == 8 * 24
    assert 0 < bench.numbers["proof_gap"] < 1e-5 and not bench.numbers["proof_moved_on"]


def test_what_continues_is_proved_from_where_it_continues(tiny_policy: Any) -> None:
    policy = tiny_policy("llama")
    whole = answer(policy)
    request = replace(ASKED, prior=whole.sampled.until(9))
    done = answer(policy, request)
    assert done.tokens == whole.tokens and done.proof is not None and len(done.proof) == 15
    assert Bench(policy).judge((request, done)) == [""]
    other = Sampled((*whole.tokens[:8], 77), whole.logprobs[:9], whole.versions[:9])
    assert "continue from the tokens" in Bench(policy).judge((replace(request, prior=other), done))[0]


def edited(at: int) -> Lie:
    def lie(done: Completion) -> Completion:
        tokens = list(done.tokens)
        tokens[at] = (tokens[at] + 40) % 200 + 3
        return replace(done, tokens=tuple(tokens))

    return lie


LIES: dict[str, tuple[Lie, str]] = {
    "token": (edited(5), "states"),
    "last token": (edited(-1), "seed draws"),
    "log-probs": (lambda d: replace(d, logprobs=tuple(x + 0.01 for x in d.logprobs)), "log-probs must be within"),
    "no number": (lambda d: replace(d, logprobs=(float("nan"), *d.logprobs[1:])), "log-probs must be within"),
    "no proof": (lambda d: replace(d, proof=None), "a proof has 4 numbers"),
    "half a proof": (lambda d: replace(d, proof=d.proof[:12]), "a proof has 4 numbers"),
    "infinite": (lambda d: replace(d, proof=np.full_like(d.proof, np.inf)), "a proof has 4 numbers"),
    "zeros": (lambda d: replace(d, proof=np.zeros_like(d.proof)), "states"),
    "turned": (lambda d: replace(d, proof=d.proof[::-1].copy()), "states"),
    "newer": (lambda d: replace(d, versions=(VERSION + 1,) * 24), "of versions 4 to 4"),
    "older": (lambda d: replace(d, versions=(VERSION - 1,) * 24), "of versions 4 to 4"),
    "cut": (
        lambda d: replace(
            d, tokens=d.tokens[:9], logprobs=d.logprobs[:9], versions=d.versions[:9], proof=d.proof[:9]
        ),
        "an answer that is cut has 24 tokens",
    ),
    "stopped": (lambda d: replace(d, finish="stop"), "first stop token"),
    "no token": (lambda d: replace(d, tokens=(*d.tokens[:-1], 10**6)), "tokens must be in 0"),
    "negative": (lambda d: replace(d, tokens=(-1, *d.tokens[1:])), "tokens must be in 0"),
    "short": (lambda d: replace(d, logprobs=d.logprobs[1:]), "a log-prob and a version each"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_lies_are_found(tiny_policy: Any, name: str) -> None:
    policy = tiny_policy("llama")
    done = answer(policy)
    lie, why = LIES[name]
    bench = Bench(policy)
    (wrong,) = bench.judge((ASKED, lie(done)))
    assert why in wrong and bench.numbers["proof_failed"] == 1


def test_the_right_states_of_tokens_that_another_model_chose(tiny_policy: Any, copy_policy: Any) -> None:
    """The cheat computes the states and log-probs of its text with the right weights: draws alone betray it."""
    policy = tiny_policy("llama")
    done = answer(policy)
    text = edited(5)(done)
    forced = replace(ASKED, prior=Sampled(text.tokens[:6], text.logprobs[:6], text.versions[:6]))
    rest = answer(policy, forced)
    assert rest.proof is not None and done.proof is not None
    with torch.no_grad():
        logp_T = policy.score(torch.tensor((*PROMPT, *rest.tokens)))
    true = logp_T[len(PROMPT) - 1 :].tolist()
    cheat = replace(rest, logprobs=tuple(true), proof=np.concatenate((done.proof[:6], rest.proof)))
    assert "seed draws" in Bench(policy).judge((ASKED, cheat))[0]
    filtered = replace(ASKED, sampling=replace(ASKED.sampling, top_p=0.9))
    assert Bench(policy).judge((filtered, cheat)) == [""], "of other distributions the draws are not known"


def test_other_weights_and_another_prompt(tiny_policy: Any) -> None:
    policy = tiny_policy("llama")
    other = tiny_policy("qwen3")
    assert "states" in Bench(policy).judge((ASKED, answer(other)))[0]
    swapped = replace(ASKED, prompt_tokens=(*PROMPT[:3], PROMPT[4], PROMPT[3], *PROMPT[5:]))
    assert "states" in Bench(policy).judge((ASKED, answer(policy, swapped)))[0]
    rounded = answer(policy, weights_dtype="float8")
    assert "states" in Bench(policy).judge((ASKED, rounded))[0]
    assert Bench(policy, tolerance=tolerance_of(torch.float32, ["weights_dtype"])).judge((ASKED, rounded)) == [""]


def test_weights_that_have_moved_on(tiny_policy: Any) -> None:
    """Nothing is said of what the trainer's weights did not sample."""
    policy = tiny_policy("llama")
    done = answer(policy)
    for settings in ({"held": (VERSION + 1, 10)}, {"updates": 11}):
        bench = Bench(policy, **settings)
        assert bench.judge((ASKED, done)) == [""]
        assert bench.numbers["proof_moved_on"] == 1 and not bench.numbers["proof_checked"]
    later = replace(done, versions=(VERSION,) * 10 + (VERSION + 1,) * 14)
    bench = Bench(policy)
    bench.held = (VERSION + 1, 10)
    assert bench.judge((ASKED, later)) == [""], "the rest has keys and values of the version before"
    assert bench.numbers["proof_moved_on"] == 1
    bench = Bench(policy, recompute=True, held=(VERSION + 1, 10))
    assert bench.judge((ASKED, later)) == [""]
    assert bench.numbers["proof_tokens"] == 14
    wrong = replace(later, proof=np.concatenate((later.proof[:23], np.ones((1, SKETCH), np.float32))))  # type: ignore[index]
    assert "states" in Bench(policy, recompute=True, held=(VERSION + 1, 10)).judge((ASKED, wrong))[0]


def test_the_trainer_moves_on_while_it_computes(tiny_policy: Any) -> None:
    policy = tiny_policy("llama")
    bench = Bench(policy)

    class Moves:
        async def annotate(self, samples: Any, columns: Any) -> Any:
            bench.learner.updates += 1
            return samples

    async def body() -> str:
        return await bench.check(Moves()).examine(ASKED, answered, VERSION)

    answered = replace(answer(policy), proof=np.zeros((24, SKETCH), np.float32))
    assert asyncio.run(body()) == ""


def test_a_conversation_of_two_versions(tiny_policy: Any) -> None:
    """An engine keeps the keys and values of the turns before, which may be of older weights."""
    policy = tiny_policy("llama")
    request = replace(ASKED, session="train/3/1")
    done = answer(policy)

    async def body(versions: Sequence[int]) -> list[float]:
        trainer = LocalTrainer(
            reinforced(policy, TrainingConfig(), algorithm_of({"preset": "grpo"}), max_tokens=24, temperature=1.0)
        )
        found, check = [], bench.check(trainer)
        for version in versions:
            bench.held = (version, 10)
            assert await check.examine(request, replace(done, versions=(version,) * 24), version) == ""
            found.append(check.taken()["proof_checked"])
        await trainer.close()
        return found

    bench = Bench(policy)
    assert asyncio.run(body((3, 3, 4, 4))) == [1, 1, 0, 0]
    bench = Bench(policy, recompute=True)
    assert asyncio.run(body((3, 3, 4, 4))) == [1, 1, 1, 1]


def test_a_share_is_checked_and_nobody_knows_which(tiny_policy: Any) -> None:
    policy = tiny_policy("llama")
    pairs = [(replace(ASKED, id=f"train/{i}/0/0"), answer(policy)) for i in range(2)] * 100
    bench = Bench(policy, share=0.5)
    assert set(bench.judge(*pairs)) == {""}
    assert 60 < bench.numbers["proof_checked"] < 140
    found = Bench(policy, share=0.5).judge(*[(r, edited(5)(d)) for r, d in pairs])
    assert 60 < sum(map(bool, found)) < 140
    form = Bench(policy, share=1e-9).judge(*[(r, replace(d, proof=None)) for r, d in pairs])
    assert all("a proof has" in wrong for wrong in form), "the form of each is looked at"


def test_one_that_is_gone_does_not_keep_others_waiting(tiny_policy: Any) -> None:
    policy = tiny_policy("llama")
    done, bench = answer(policy), Bench(policy)

    async def body() -> tuple[str, str]:
        trainer = LocalTrainer(
            reinforced(policy, TrainingConfig(), algorithm_of({"preset": "grpo"}), max_tokens=24, temperature=1.0)
        )
        check = bench.check(trainer)
        first, *rest = (asyncio.create_task(check.examine(ASKED, done, VERSION)) for _ in range(3))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        found = await asyncio.wait_for(asyncio.gather(*rest), 30)
        await trainer.close()
        return tuple(found)  # type: ignore[return-value]

    assert asyncio.run(body()) == ("", "")


def test_three_engines_in_a_row_end_the_run(tiny_policy: Any) -> None:
    bench = Bench(tiny_policy("llama"))
    check = bench.check(None)

    async def body() -> None:
        for number in range(3):
            await check.refused(f"engine {number}", "why", [f"train/{number}/0", "train/9/1", "eval/7/0"])

    with pytest.raises(EngineError, match="3 engines failed the proof and no answer passed"):
        asyncio.run(body())
    assert bench.told[0] == "engine 0 is out: why; 1 of its rollouts are sampled again; 1 were part of steps before"
    assert bench.withdrawn[:2] == [(0, 0), (9, 1)], "evaluations are not trained on"
