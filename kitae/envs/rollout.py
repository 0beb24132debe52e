"""Run one episode, and all episodes of one prompt."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kitae.clock import now
from kitae.data.chat import Chat
from kitae.engines.base import Completion, Engine, Request, Sampled, SamplingParams
from kitae.engines.native.sampler import stream_seed
from kitae.envs.base import Environment
from kitae.errors import root_cause
from kitae.store.journal import Journal
from kitae.types import GREEDY, Chain, FinishReason, Group, Prompt, Rollout, Score, Segment, Status

MakeEnvironment = Callable[[Prompt], Environment]


class Judge(Protocol):
    """Scores a response: a `VerifierPool`, or whatever stands in for one."""

    async def score(self, response: str, reference: Any, context: Mapping[str, Any]) -> Score: ...


class Parked(Exception):
    """The engine was told to park; what was sampled is in the journal."""


@dataclass(frozen=True, slots=True)
class Runner:
    """What an episode needs. `label` keeps the random streams of training and evaluation apart.

    `span` hears of each group when it was sampled ("generate") and judged ("verify"). `waiting` is entered around each
    wait, with what is waited for and by which rollout. `begun` has, by request in flight, the turns before it, and
    `copied` how many of its tokens the journal has.
    """

    engine: Engine
    chat: Chat
    verifier: Judge
    environment: MakeEnvironment
    sampling: SamplingParams
    seed: int
    label: str = "train"
    span: Callable[[str, float, float], None] = lambda part, start, end: None
    waiting: Callable[[str, str], AbstractContextManager[None]] = lambda what, which: nullcontext()
    begun: dict[str, Rollout] = field(default_factory=dict)
    copied: dict[str, int] = field(default_factory=dict)

    async def group(
        self, group: int, prompt: Prompt, size: int, journal: Journal | None = None, *, greedy: bool = False
    ) -> Group:
        """All samples of one prompt, and the greedy response if asked for, which has the index `GREEDY`.

        Those that the journal has already are taken from there, never sampled again, and those that it has in part are
        continued. Complete ones are journalled before they are judged; those without a verdict, or that could not be
        judged, are judged (once more). Raises `RequestError` or `DataError` if the prompt is impossible, and `Parked`
        if the engine was told to park.
        """
        known = {r.index: r for r in journal.rollouts(group)} if journal else {}
        parked = {r.index: r for r in journal.parked(group)} if journal else {}

        sampled, judged = [now()], list[float]()

        async def one(index: int) -> Rollout:
            rollout = known.get(index)
            if rollout is not None and rollout.score is not None and rollout.score.valid:
                return rollout
            if rollout is None:
                rollout = await self.rollout(group, index, prompt, parked.get(index))
                if rollout.status == "parked":
                    if journal and rollout.response_length:
                        await journal.park(rollout)
                    raise Parked
                if journal:
                    with self.waiting("the journal", rollout.id):
                        await journal.add_rollout(rollout)
            sampled.append(now())
            with self.waiting("the verifier", rollout.id):
                score = await self.verifier.score(rollout.text, prompt.reference, prompt.context)
            judged.append(now())
            rollout = replace(rollout, score=score)
            if journal:
                with self.waiting("the journal", rollout.id):
                    await journal.update_score(rollout)
            return rollout

        async def unless_parked(index: int) -> Rollout | None:
            try:
                return await one(index)
            except Parked:  # the others must be journalled too
                return None

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(unless_parked(index)) for index in range(size)]
                best = tasks.create_task(unless_parked(GREEDY)) if greedy else None
        except BaseExceptionGroup as problem:
            raise root_cause(problem) from None
        results = [task.result() for task in running]
        last = best.result() if best else None
        complete = tuple(r for r in results if r is not None)
        if len(complete) < size or (best and last is None):
            raise Parked
        if judged:
            self.span("generate", sampled[0], max(sampled))
            self.span("verify", sampled[1], max(judged))
        return Group(group, prompt, complete, last)

    async def rollout(self, group: int, index: int, prompt: Prompt, begun: Rollout | None = None) -> Rollout:
        """One episode: model turns and the environment's answers, until it is done or the tokens are used up.

        Turns of a `begun` one are not sampled again: the environment hears them once more, the last is continued. A
        rollout with finish "parked" is not complete.
        """
        environment = self.environment(prompt)
        settings = replace(self.sampling, temperature=0.0) if index == GREEDY else self.sampling
        segments: list[Segment] = []
        finish: FinishReason = "stop"
        try:
            prompt_tokens = self.chat.encode_prompt(await environment.start())
            left = settings.max_tokens
            text = ""
            past = [s for s in begun.segments if s.source == "model"] if begun else []
            while left > 0:
                prior = past.pop(0) if past else None
                context = prompt_tokens + tuple(t for s in segments for t in s.tokens)
                request = Request(
                    id=f"{self.label}/{group}/{index}/{len(segments)}",
                    prompt_tokens=context,
                    sampling=replace(settings, max_tokens=left),
                    seed=stream_seed(self.seed, self.label, group, index, len(segments)),
                    share=f"{self.label}/{group}" if not segments else "",
                    prior=Sampled(prior.tokens, prior.logprobs, prior.versions) if prior else Sampled(),
                )
                if prior and past:  # this turn was complete
                    done = Completion(request.id, prior.tokens, prior.logprobs, prior.versions, "stop")
                else:
                    so_far = Chain(prompt_tokens, tuple(segments))
                    self.begun[request.id] = Rollout(group, index, (so_far,), "parked", "", status="parked")
                    self.copied[request.id] = len(request.prior.tokens)  # that is where they are from
                    try:
                        with self.waiting("the engine", request.id):
                            done = await self.engine.generate(request)
                    finally:
                        del self.begun[request.id], self.copied[request.id]
                segments.append(Segment("model", done.tokens, done.logprobs, done.versions))
                finish = done.finish
                text = self._text(done.tokens)
                left -= len(done.tokens)
                if finish != "stop":
                    break
                observation = await environment.step(text)
                if observation.done:
                    break
                closed = done.tokens[-1] in self.chat.stop_tokens
                turn = self.chat.encode_turn(observation.messages, closed=closed)
                segments.append(Segment.observed(turn))
                left -= len(turn)
                finish = "length"
        finally:
            await environment.close()
        chains = (Chain(prompt_tokens, tuple(segments)),)
        status: Status = "parked" if finish == "parked" else "complete"
        return Rollout(group, index, chains, finish, text, status=status)

    def grown(self, least: int) -> list[tuple[Rollout, int]]:
        """What the journal does not have yet of the rollouts in flight, if it is at least so many tokens; as
        `Journal.extend_parked` wants it. It counts as copied."""
        found = []
        for id, news in self.engine.progress(self.copied).items():
            if len(news.tokens) >= least and id in self.begun:
                before, known = self.begun[id], self.copied[id]
                turn = Segment("model", news.tokens, news.logprobs, news.versions)
                last = before.chains[-1]
                grown = replace(last, segments=(*last.segments, turn))
                found.append((replace(before, chains=(*before.chains[:-1], grown)), known))
                self.copied[id] = known + len(news.tokens)
        return found

    def _text(self, tokens: tuple[int, ...]) -> str:
        """The response as the verifier sees it: without special tokens, cut before a stop string."""
        text = self.chat.decode(tokens)
        cuts = [text.find(stop) for stop in self.sampling.stop_strings if stop in text]
        return text[: min(cuts)] if cuts else text
