"""Run one episode, and all episodes of one prompt."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from kitae.data.chat import Chat
from kitae.engines.base import Engine, Request, SamplingParams
from kitae.engines.native.sampler import stream_seed
from kitae.envs.base import Environment
from kitae.errors import root_cause
from kitae.store.journal import Journal
from kitae.types import GREEDY, FinishReason, Group, Prompt, Rollout, Segment
from kitae.verifiers.pool import VerifierPool

MakeEnvironment = Callable[[Prompt], Environment]


@dataclass(frozen=True, slots=True)
class Runner:
    """What an episode needs. `label` keeps the random streams of training and evaluation apart."""

    engine: Engine
    chat: Chat
    verifier: VerifierPool
    environment: MakeEnvironment
    sampling: SamplingParams
    seed: int
    label: str = "train"

    async def group(
        self, group: int, prompt: Prompt, size: int, journal: Journal | None = None, *, greedy: bool = False
    ) -> Group:
        """All samples of one prompt, and the greedy response if asked for, which has the index `GREEDY`.

        Those that the journal has already are taken from there, never sampled again.

        Journalled answers that could not be judged are judged once more. Raises `RequestError` if the engine cannot
        take the prompt at all.
        """
        known = {r.index: r for r in journal.rollouts(group)} if journal else {}

        async def one(index: int) -> Rollout:
            rollout = known.get(index)
            if rollout is not None and rollout.score is not None and rollout.score.valid:
                return rollout
            rollout = rollout or await self.rollout(group, index, prompt)
            score = await self.verifier.score(rollout.text, prompt.reference, prompt.context)
            rollout = replace(rollout, score=score)
            if journal:
                await (journal.update_score if index in known else journal.add_rollout)(rollout)
            return rollout

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(one(index)) for index in range(size)]
                best = tasks.create_task(one(GREEDY)) if greedy else None
        except BaseExceptionGroup as problem:
            raise root_cause(problem) from None
        return Group(group, prompt, tuple(task.result() for task in running), best.result() if best else None)

    async def rollout(self, group: int, index: int, prompt: Prompt) -> Rollout:
        """One episode: model turns and the environment's answers, until it is done or the tokens are used up."""
        environment = self.environment(prompt)
        settings = replace(self.sampling, temperature=0.0) if index == GREEDY else self.sampling
        segments: list[Segment] = []
        finish: FinishReason = "stop"
        try:
            prompt_tokens = self.chat.encode_prompt(await environment.start())
            left = settings.max_tokens
            text = ""
            while left > 0:
                context = prompt_tokens + tuple(t for s in segments for t in s.tokens)
                done = await self.engine.generate(
                    Request(
                        id=f"{self.label}/{group}/{index}/{len(segments)}",
                        prompt_tokens=context,
                        sampling=replace(settings, max_tokens=left),
                        seed=stream_seed(self.seed, self.label, group, index, len(segments)),
                        share=f"{self.label}/{group}" if not segments else "",
                    )
                )
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
        return Rollout(group, index, prompt_tokens, tuple(segments), finish, text)

    def _text(self, tokens: tuple[int, ...]) -> str:
        """The response as the verifier sees it: without special tokens, cut before a stop string."""
        text = self.chat.decode(tokens)
        cuts = [text.find(stop) for stop in self.sampling.stop_strings if stop in text]
        return text[: min(cuts)] if cuts else text
