"""Answers of engines that are not trusted, computed again by the trainer as they arrive, before anything uses them.

    engine ── answer, proof ──► pool ── a share of them ──► ProofCheck ──► the trainer's forward pass
                                  │ in order                    │ a fault
                                  ▼                             ▼
                      episodes, journal, …       the engine is out; the request goes on elsewhere, from what others
                                                 have sampled; what it had answered before, and was not checked, is
                                                 sampled again, unless a step has been trained on it

A proof holds for the weights that sampled, and the trainer moves on. So answers are checked when they arrive, and of
their tokens those of the version that the trainer has at that moment, on keys and values of that version alone. An
answer without any such token counts as `proof_moved_on`; where no step begins before the last has settled there are
none. An engine cannot claim a version that it was not given, or one before the request.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Self

import numpy as np
import torch

from kitae.config.root import RLConfig
from kitae.data.chat import Chat
from kitae.engines.base import Completion, Provable, Request, rollout_of
from kitae.engines.native import sampler
from kitae.engines.proof import SKETCH, UNIFORM, Differences, Tolerance
from kitae.errors import CorruptError, EngineError
from kitae.models.facts import ModelFacts
from kitae.store.columns import LazyColumn
from kitae.trainer.base import Column
from kitae.trainer.learner import Learner
from kitae.types import BoolArray, FloatArray, IntArray, Sample

_MOST_IN_A_ROW = 3  # engines that fail, with no answer that passes: then it is not they that are wrong
_MOST_SESSIONS = 100_000  # that are remembered
_MIXED = -1  # the version of a session of several
_NUMBERS = ("proof_checked", "proof_tokens", "proof_moved_on", "proof_failed", "proof_gap")
_FLOAT32 = Tolerance(state=1e-4, draw=1e-3, logprob=1e-3)
_BFLOAT16 = Tolerance(state=0.05, draw=0.15, logprob=0.25)
_INT8_CACHE = Tolerance(state=0.1, draw=0.3, logprob=0.3)
_FLOAT8_WEIGHTS = Tolerance(state=0.45, draw=0.8, logprob=1.5)


def tolerance_of(dtype: torch.dtype, rounding: Collection[str] = ()) -> Tolerance:
    """As measured (`benchmarks/proofs.py`), with room. rounding: what the engine keeps in 8 bits (`weights_dtype`,
    `cache_dtype`)."""
    if "weights_dtype" in rounding:
        return _FLOAT8_WEIGHTS
    return _INT8_CACHE if rounding else _FLOAT32 if dtype == torch.float32 else _BFLOAT16


class ProofCheck:
    """Implements `kitae.engines.base.AnswerCheck`. `begin` comes first.

    share: of the answers that are computed again; which ones, no engine can know. temperature: that of training, at
    which draws and log-probs are compared; other answers show their states alone. recompute: whether keys and values
    are made again when weights arrive.
    """

    def __init__(
        self,
        learner: Learner,
        facts: ModelFacts,
        *,
        share: float,
        tolerance: Tolerance,
        temperature: float,
        recompute: bool,
    ) -> None:
        self._learner = learner
        self._facts = facts
        self._chat = Chat(facts.tokenizer, facts.generation)
        self._share = share
        self._tolerance = tolerance
        self._temperature = temperature
        self._recompute = recompute
        self._secret = random.SystemRandom()
        self._sessions: OrderedDict[str, int] = OrderedDict()  # the version of all their tokens
        self._in_a_row = 0
        self._waiting: list[tuple[Sample, asyncio.Future[Sample]]] = []
        self._turn = asyncio.Lock()
        self._numbers = dict.fromkeys(_NUMBERS, 0.0)

    @classmethod
    def of(cls, config: RLConfig, learner: Learner, facts: ModelFacts) -> Self | None:
        """By the settings; None: no proofs are wanted."""
        proof = config.engine.proof
        if not proof.share:
            return None
        tolerance = tolerance_of(learner.trainer.dtype, config.engine.rounding)
        return cls(
            learner,
            facts,
            share=proof.share,
            tolerance=tolerance if proof.tolerance is None else replace(tolerance, state=proof.tolerance),
            temperature=config.sampling.temperature,
            recompute=config.pipeline.in_flight == "recompute",
        )

    def begin(
        self,
        engine: Provable,
        held: Callable[[], tuple[int, int]],
        withdraw: Callable[[Sequence[tuple[int, int]]], Awaitable[int]],
        tell: Callable[[str], Awaitable[None]],
    ) -> None:
        engine.check = self
        self._held, self._withdraw, self._tell = held, withdraw, tell

    def taken(self) -> dict[str, float]:
        """proof_gap: the largest difference of states in an answer that was in order."""
        found, self._numbers = self._numbers, dict.fromkeys(_NUMBERS, 0.0)
        return found

    async def examine(self, request: Request, done: Completion, served: int) -> str:
        start = len(request.prior.tokens)
        versions_N = np.asarray(done.versions[start:], np.int64)
        mixed = self._is_mixed(request.session, versions_N)
        try:
            wrong = self._malformed(request, done, versions_N, served)
            if not wrong and len(versions_N) and self._secret.random() < self._share:
                wrong = await self._compare(request, done, versions_N, mixed)
        except CorruptError as error:
            wrong = f"what it filed cannot be read: {error}"
        self._numbers["proof_failed"] += bool(wrong)
        return wrong

    async def refused(self, engine: str, why: str, rollouts: Sequence[str]) -> None:
        self._in_a_row += 1
        known = [rollout_of(rollout) for rollout in rollouts if rollout.startswith("train/")]
        again = await self._withdraw(known)
        trained = f"; {len(known) - again} were part of steps before" if len(known) > again else ""
        await self._tell(f"{engine} is out: {why}; {again} of its rollouts are sampled again{trained}")
        if self._in_a_row >= _MOST_IN_A_ROW:
            raise EngineError(
                f"{self._in_a_row} engines failed the proof and no answer passed meanwhile: either all are wrong, or "
                f"rounding is larger here than engine.proof.tolerance allows; the last one: {why}"
            )

    def _malformed(self, request: Request, done: Completion, versions_N: IntArray, served: int) -> str:
        """What is wrong with the form of an answer, which costs nothing to see."""
        start, count, newest = len(request.prior.tokens), len(done.tokens), self._held()[0]
        limit = min(request.sampling.max_tokens, self._facts.max_context - len(request.prompt_tokens))
        proof = done.proof if done.proof is not None else np.zeros((0, SKETCH), np.float32)
        if not len(done.logprobs) == len(done.versions) == count or not start <= count <= limit:
            return f"an answer has {start} to {limit} tokens with a log-prob and a version each, got {count}"
        if tuple(done.tokens[:start]) != tuple(request.prior.tokens):
            return "it must continue from the tokens that it was given, got others"
        if proof.shape != (count - start, SKETCH) or not np.isfinite(proof).all():
            return f"a proof has {SKETCH} numbers for each of {count - start} new tokens, got {proof.shape}"
        if len(versions_N) and not served <= versions_N.min() <= versions_N.max() <= newest:
            return f"its tokens must be of versions {served} to {newest}, got {versions_N.min()} to {versions_N.max()}"
        if done.finish == "length" and count < limit:
            return f"an answer that is cut has {limit} tokens, got {count}"
        return ""

    async def _compare(self, request: Request, done: Completion, versions_N: IntArray, mixed: bool) -> str:
        start, (version, updates) = len(request.prior.tokens), self._held()
        own_N = versions_N == version
        if not self._recompute:  # what follows on older keys and values is of neither version
            own_N = np.logical_and.accumulate(own_N) & (not mixed)
        tokens = np.asarray(done.tokens, np.int64)
        if wrong := self._misread(request, done, tokens):
            return wrong
        if own_N.any() and self._learner.updates == updates:
            found = await self._recomputed(self._sample(request, tokens, own_N))
        if not own_N.any() or self._learner.updates != updates:
            self._numbers["proof_moved_on"] += 1
            return ""
        assert done.proof is not None
        found_NC = np.stack([found.loss(f"{Column.PROOF.value}{i}") for i in range(2 + SKETCH)], 1)
        claimed_N: FloatArray = np.asarray(done.logprobs[start:], np.float32)[own_N]
        logp_N = claimed_N if self._as_in_training(request) else found_NC[:, 0]
        differences = Differences.of(done.proof[own_N], logp_N, found_NC)
        wrong = differences.fault(self._tolerance)
        self._numbers["proof_checked"] += 1
        self._numbers["proof_tokens"] += int(own_N.sum())
        if not wrong:
            self._in_a_row, self._numbers["proof_gap"] = 0, max(self._numbers["proof_gap"], differences.state)
        return wrong

    def _misread(self, request: Request, done: Completion, tokens: IntArray) -> str:
        """What is wrong with tokens, end or text, whatever the weights."""
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._facts.vocabulary:
            return f"tokens must be in 0…{self._facts.vocabulary - 1}, got {tokens.min()} to {tokens.max()}"
        sampling = request.sampling
        ends_N = np.isin(tokens, sampling.stop_tokens)
        if ends_N[:-1].any() or (done.finish == "stop" and not (sampling.stop_strings or ends_N[-1:].any())):
            return "an answer ends with its first stop token, got one that does not"
        text = done.tokens.text if isinstance(done.tokens, LazyColumn) else None
        if text is not None and str(text) != self._chat.read(tokens.tolist(), sampling.stop_strings).text:
            return "the text of an answer must be that of its tokens, got another"
        return ""

    def _as_in_training(self, request: Request) -> bool:
        """Whether its tokens are drawn from the distribution that the trainer computes."""
        sampling = request.sampling
        return not sampler.is_filtered(sampling) and sampling.temperature == self._temperature

    def _sample(self, request: Request, tokens: IntArray, own_N: BoolArray) -> Sample:
        tokens_T = np.concatenate((np.asarray(request.prompt_tokens, np.int64), tokens))
        first, places = len(tokens_T) - len(own_N), list(range(len(tokens) - len(own_N), len(tokens)))
        mask_T, uniform_T = np.zeros(len(tokens_T), bool), np.full(len(tokens_T), -1.0, np.float32)
        mask_T[first:] = own_N
        if self._as_in_training(request):
            uniform_T[first:] = sampler.uniforms([request.seed] * len(places), places).numpy()
        weight_T = np.zeros(len(tokens_T), np.float32)
        return Sample(0, 0, tokens_T, len(request.prompt_tokens), mask_T, weight_T, {UNIFORM: uniform_T})

    async def _recomputed(self, sample: Sample) -> Sample:
        """With the columns of a proof. What arrives while the trainer computes is computed together after that."""
        ready: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, ready))
        async with self._turn:
            if not ready.done():
                batch, self._waiting = self._waiting, []
                numbered = [replace(s, index=number) for number, (s, _) in enumerate(batch)]
                try:
                    found = await self._learner.trainer.annotate(numbered, [Column.PROOF])
                except BaseException:  # this caller is gone: the others compute theirs
                    self._waiting = batch + self._waiting
                    raise
                for each, (_, waits) in zip(found, batch, strict=True):
                    if not waits.done():
                        waits.set_result(each)
        return await ready

    def _is_mixed(self, session: str, versions_N: IntArray) -> bool:
        """Whether what an engine kept of a conversation may be of other weights than the new tokens."""
        if not session or not len(versions_N):
            return False
        before = self._sessions.pop(session, int(versions_N[0]))
        self._sessions[session] = before if (versions_N == before).all() else _MIXED
        if len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return bool(before != versions_N[0])
