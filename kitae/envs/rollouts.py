"""All episodes of one prompt: generated, journalled and judged."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kitae.clock import now
from kitae.config.root import RLConfig
from kitae.data.chat import Chat, as_dict
from kitae.engines.base import Engine, Sampled, SamplingParams
from kitae.envs.agent_episode import AgentEpisode
from kitae.envs.base import Agent, World
from kitae.envs.environment_registry import limits_of
from kitae.envs.episode import Episode
from kitae.envs.episode_context import EpisodeContext, GroupVerifier, ResponseVerifier, Suspended, with_note
from kitae.errors import root_cause
from kitae.models.facts import ModelFacts
from kitae.store.journal import Journal
from kitae.types import GREEDY, Group, LazyText, Message, Prompt, Rollout, Score


@dataclass(frozen=True, slots=True)
class Episodes(EpisodeContext):
    """Runs the episodes of prompts. span: receives when a group was generated ("generate") and judged ("verify")."""

    span: Callable[[str, float, float], None] = lambda part, start, end: None

    async def group(
        self, group: int, prompt: Prompt, size: int, journal: Journal | None = None, *, greedy: bool = False
    ) -> Group:
        """All samples of one prompt, and the greedy response if wanted, which has the index `GREEDY`.

        Rollouts that the journal has are taken from it and never sampled again; those that it has in part are
        continued. Complete rollouts are journalled before they are judged. A rollout without a valid verdict is judged
        (again); a failed episode stays failed. Raises `RequestError` or `DataError` if the prompt is impossible, and
        `Suspended` if the run is stopping. A verifier that judges a group together gets all of its answers when the
        last one is there; those that were judged before a run was killed keep their scores.
        """
        known = {r.index: r for r in journal.rollouts(group)} if journal else {}
        suspended = {r.index: r for r in journal.suspended(group)} if journal else {}
        sampled, judged = [now()], list[float]()
        together = isinstance(self.verifier, GroupVerifier) and self.verifier.grouped
        complaints = dict[int, str]()

        async def one(index: int) -> Rollout:
            rollout, complaint = known.get(index), ""
            if rollout is not None and _is_settled(rollout):
                return rollout
            if rollout is None:
                episode = self._begin(group, index, prompt, suspended.get(index))
                rollout, complaint = await self._sample(episode, journal), episode.complaint
            sampled.append(now())
            complaints[index] = complaint
            if not _is_settled(rollout) and not (together and index != GREEDY):
                (rollout,) = await self._judge([rollout], prompt, [complaint], judged, journal)
            return rollout

        async def unless_suspended(index: int) -> Rollout | None:
            try:
                return await one(index)
            except Suspended:  # the group's other episodes must be journalled too
                return None

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(unless_suspended(index)) for index in range(size)]
                best = tasks.create_task(unless_suspended(GREEDY)) if greedy else None
        except BaseExceptionGroup as problem:
            raise root_cause(problem) from None
        results = [task.result() for task in running]
        last = best.result() if best else None
        complete = tuple(r for r in results if r is not None)
        if len(complete) < size or (best and last is None):
            raise Suspended
        if together and not all(map(_is_settled, complete)):
            said = [complaints.get(r.index, "") for r in complete]
            complete = tuple(await self._judge(complete, prompt, said, judged, journal))
        if len(sampled) > 1:
            self.span("generate", sampled[0], max(sampled))
        if judged:
            self.span("verify", sampled[1], max(judged))
        return Group(group, prompt, complete, last)

    def _begin(self, group: int, index: int, prompt: Prompt, record: Rollout | None) -> Episode | AgentEpisode:
        environment = self.make(prompt)
        if isinstance(environment, Agent):
            return AgentEpisode(self, environment, group, index, prompt, record)
        return Episode(self, environment, group, index, prompt, record)

    async def _sample(self, episode: Episode | AgentEpisode, journal: Journal | None) -> Rollout:
        """Run an episode to its end and journal its rollout."""
        rollout = await episode.run()
        if rollout.status == "suspended":
            if journal and rollout.response_length:
                await journal.suspend(rollout)
            raise Suspended
        if journal:
            with self.waiting("the journal", rollout.id):
                await journal.add_rollout(rollout)
        return rollout

    async def _judge(
        self,
        rollouts: Sequence[Rollout],
        prompt: Prompt,
        complaints: Sequence[str],
        judged: list[float],
        journal: Journal | None,
    ) -> list[Rollout]:
        """The rollouts with scores, in one call of the verifier. Failed ones are not shown to it, and those that have a
        score keep it."""
        shown = [i for i, rollout in enumerate(rollouts) if rollout.status != "failed"]
        asked = [(_last_turn(rollouts[i]), _context(rollouts[i], prompt)) for i in shown]
        which = rollouts[shown[0]].id
        assert self.verifier is not None, f"rollout {which} has no reward, and there is no verifier"
        with self.waiting("the verifier", which):
            if isinstance(self.verifier, GroupVerifier):
                scores = await self.verifier.scores([r for r, _ in asked], prompt.reference, [c for _, c in asked])
            else:
                scores = [await self.verifier.score(r, prompt.reference, c) for r, c in asked]
        judged.append(now())
        found = list(rollouts)
        for i, score in zip(shown, scores, strict=True):
            if _is_settled(found[i]):
                continue
            found[i] = replace(found[i], score=with_note(with_turns(score, found[i]), complaints[i]))
            if journal:
                with self.waiting("the journal", found[i].id):
                    await journal.update_score(found[i])
        return found

    async def suspend(self) -> None:
        """End all episodes as soon as possible, to be continued by another run. Their groups raise `Suspended`."""
        self.running.suspending = True
        for episode in list(self.running.episodes.values()):
            episode.interrupt()
        await self.engine.suspend()

    def grown(self, least: int) -> list[tuple[Rollout, int]]:
        """What the journal lacks of the episodes under way, each if at least `least` tokens are new, as arguments of
        `Journal.extend_suspended`. It then counts as copied."""
        asking = {e.asking: e.copied_of_turn for e in self.running.episodes.values() if e.asking}
        sampled = self.engine.progress(asking)
        found = (e.grown(sampled.get(e.asking, Sampled()), least) for e in self.running.episodes.values())
        return [news for news in found if news is not None]


def episodes_of(
    config: RLConfig, engine: Engine, verifier: ResponseVerifier, world: World, model: ModelFacts
) -> Episodes:
    """Episodes by the settings of a run, for training; others are made from them with `dataclasses.replace`."""
    chat = Chat(model.tokenizer, model.generation)
    sampling = SamplingParams(
        temperature=config.sampling.temperature,
        max_tokens=config.sampling.max_tokens,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        min_p=config.sampling.min_p,
        stop_tokens=chat.stop_tokens,
        stop_strings=config.sampling.stop,
    )
    limits = limits_of(config.env, model.max_context)
    experts = config.algorithm.experts.routing == "engine"
    return Episodes(
        engine, chat, verifier, world.make, sampling, config.run.seed, limits=limits, experts=experts, trains=True
    )


def _context(rollout: Rollout, prompt: Prompt) -> Mapping[str, Any]:
    """What the verifier gets beside the answer and the reference."""
    context = prompt.context
    if prompt.messages != (Message("user", str(context.get("question"))),):  # the prompt is more than the question
        context = {**context, "prompt_messages": [as_dict(m) for m in prompt.messages]}
    if rollout.transcript:
        context = {**context, "transcript": [as_dict(m) for m in rollout.transcript]}
    return context


def _last_turn(rollout: Rollout) -> str | LazyText:
    """What the verifier judges: the model's last turn."""
    said = [m for m in rollout.transcript if m.role == "assistant"]
    return said[-1].content if said else rollout.text


def with_turns(score: Score, rollout: Rollout) -> Score:
    """A verdict and the rewards that the environment gave for turns, together."""
    rewards = [s.reward for s in rollout.segments if s.reward is not None]
    if not rewards or not score.valid:
        return score
    total = sum(rewards)
    return replace(score, value=score.value + total, components={**score.components, "environment": total})


def _is_settled(rollout: Rollout) -> bool:
    """Whether the rollout's score is final."""
    return rollout.status == "failed" or (rollout.score is not None and rollout.score.valid)
