"""An episode driven by an agent: it sends requests, the engine answers, and both become chains."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

from kitae.data.chat import Chat
from kitae.engines.base import Request, Sampled, SamplingParams, stream_seed
from kitae.envs.base import Agent, Outcome
from kitae.envs.blocking_calls import Blocked, WatchedCall
from kitae.envs.conversations import AgentConversation, Conversations, Position
from kitae.envs.episode_context import (
    OWN_ERRORS,
    EpisodeContext,
    Failure,
    RunningEpisode,
    Suspended,
    described,
    is_episode_error,
    read_reward,
    shortened,
    with_note,
)
from kitae.errors import DataError, RequestError
from kitae.serving.base import Answer, Ask, OnTokens, with_ids
from kitae.types import ROLE, Chain, FinishReason, Message, Prompt, Rollout, Score, Segment, Status

Context = tuple[int, ...]


class AgentEpisode(RunningEpisode):
    """One rollout while its agent runs; it is also the model that the agent queries. Call `run` once.

    record: the part of the rollout that the journal has; a request whose context is in it is answered from there. The
    random stream of an answer depends on its context and on how many answers that context has: a request that was
    cancelled and is sent again gets the same tokens, and two equal requests get different ones.
    """

    def __init__(
        self,
        on: EpisodeContext,
        agent: Agent,
        group: int,
        index: int,
        prompt: Prompt,
        record: Rollout | None = None,
    ) -> None:
        super().__init__(on, agent, group, index, prompt, record)
        self._agent = agent
        self._outcome = Outcome()
        self._recorded = _turns_of(record.chains) if record else {}
        self._conversations = Conversations(on.chat)
        self._pending: dict[Context, asyncio.Future[None]] = {}
        self._latest: dict[Context, Answer] = {}
        self._numbers: defaultdict[Context, set[int]] = defaultdict(set)  # those in flight included
        self._asked = 0  # requests in flight
        self._turns = 0
        self._places = list[tuple[AgentConversation, int]]()  # of the turns, in the order of their ends
        self._fatal: BaseException | None = None  # an error that ends the run, raised while answering
        self._cut = False  # whether a limit of the episode was reached
        self._transcript: tuple[Message, ...] = ()
        self._finish: FinishReason = "stop"
        self._texts = list[str]()
        self._copied = sum(len(s.tokens) for s in record.segments) if record else 0

    @property
    def chat(self) -> Chat:
        return self._on.chat

    async def _play(self) -> None:
        try:
            self._outcome = await self._call()
        except Failure:
            if not self._cut:  # an agent whose request is refused may well break down
                raise
        if not self._conversations.chains:
            raise Failure("the agent ended without asking the model anything")

    async def _call(self) -> Outcome:
        """Run the agent, unless it sends no request for too long."""
        await self._go_on()
        seconds, note = self._on.limits.seconds, self._on.note
        self._deadline = asyncio.timeout(None)
        whole = asyncio.timeout(None)
        try:
            with self._on.waiting("the environment", self.id):
                async with whole, self._deadline:
                    await WatchedCall(note, self.id, seconds, self._agent.enter)
                    now = asyncio.get_running_loop().time()
                    whole.reschedule(now + self._on.limits.deadline if self._on.limits.deadline else None)
                    self._deadline.reschedule(now + seconds)
                    outcome = await WatchedCall(note, self.id, seconds, lambda: self._agent.run(self))
        except Blocked as block:
            await self._go_on()
            raise Failure(f"run was interrupted: {block}") from block
        except BaseException as error:
            if self._fatal is not None:
                raise self._fatal from None
            if not is_episode_error(error):
                raise
            if self._on.running.suspending:
                raise Suspended from None
            if whole.expired():
                self._cut, self._finish = True, "length"
                raise Failure(f"it took longer than {self._on.limits.deadline:g} s") from error
            if self._deadline.expired():
                raise Failure(f"it asked nothing for {seconds:g} s") from error
            raise Failure(f"run raised {described(error)}") from error
        finally:
            self._deadline = None
        if not isinstance(outcome, Outcome):
            raise Failure(f"run must return an Outcome, got {type(outcome).__name__}")
        turns = {number: read_reward(reward) or 0.0 for number, reward in outcome.turns.items()}
        if wrong := [number for number in turns if number not in range(self._turns)]:
            raise Failure(f"a reward must be of one of the {self._turns} turns, counted from 0, got turn {wrong[0]!r}")
        spoke = {conversation.role for conversation, _ in self._places}
        if other := next((role for role in outcome.roles if role not in spoke), None):
            raise Failure(f"a reward must be of a role that has spoken, got {shortened(repr(other))}")
        roles = {role: read_reward(reward) or 0.0 for role, reward in outcome.roles.items()}
        return replace(outcome, reward=read_reward(outcome.reward), turns=turns, roles=roles)

    # Requests of the agent.

    async def ask(self, ask: Ask, on_tokens: OnTokens | None = None) -> Answer:
        """See `Model`. Temperature and other sampling settings are the run's, because the tokens are trained on."""
        with self._working():
            position = self._position_of(ask)
            answer = await self._repeated(position.context) if ask.retry else None
            if answer is None:
                self._check_limits(position.context)
                answer = await self._answer(ask, position)
        if on_tokens:
            on_tokens(answer.sampled)
        return answer

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Suspend the agent's time limit while a request is in flight."""
        if self._on.running.suspending:
            raise Suspended
        if self._deadline is None or self._deadline.expired():
            raise RequestError(f"episode {self.id} is over")
        self._asked += 1
        self._deadline.reschedule(None)
        try:
            yield
        except OWN_ERRORS as error:
            if not isinstance(error, RequestError):
                self._fatal = error
                self.interrupt()
            raise
        finally:
            self._asked -= 1
            if self._deadline is not None and not self._asked and not self._stopping:
                self._deadline.reschedule(asyncio.get_running_loop().time() + self._on.limits.seconds)

    @property
    def _stopping(self) -> bool:
        ended = self._deadline is None or self._deadline.expired()
        return ended or self._on.running.suspending or self._fatal is not None

    def _position_of(self, ask: Ask) -> Position:
        if ask.prompt_tokens is not None:
            raise RequestError("an episode takes chat messages, got a prompt of text or tokens")
        try:
            position = self._conversations.find(ask.messages, ask.tools, ask.role)
        except DataError as problem:
            raise RequestError(shortened(str(problem))) from problem
        limits = self._on.limits
        if len(position.added) > limits.tokens:
            raise RequestError(f"an observation must have at most {limits.tokens} tokens, got {len(position.added)}")
        return position

    async def _repeated(self, context: Context) -> Answer | None:
        """The answer that a client requests again because it never received it. If that answer is still being
        generated, wait until it is complete or was cancelled."""
        if context in self._pending:
            await asyncio.wait([self._pending[context]])
        return self._latest.get(context)

    async def _answer(self, ask: Ask, position: Position) -> Answer:
        context, conversation = position.context, position.conversation
        sampling = self._asked_sampling(ask)
        taken = self._numbers[context]
        number = next(n for n in count() if n not in taken)
        taken.add(number)
        gone = self._pending[context] = asyncio.get_running_loop().create_future()
        conversation.busy = True
        try:
            recorded = self._recorded.get((context, number))
            if recorded is not None:
                segment, finish = recorded, self._ended_by(recorded, sampling)
            else:
                segment, finish = await self._sample(position, number, sampling)
            # Nothing is awaited from here on, so the sampled tokens are kept as a whole or not at all.
            turn = self._on.chat.read(segment.tokens, sampling.stop_strings, ask.tools, ask.thoughts)
            turn = with_ids(turn, f"{stream_seed(self.id, context, number):x}")
            said = Message("assistant", turn.told, turn.calls, problem=turn.problem)
            self._conversations.grow(position, segment, said)
        except BaseException:
            taken.remove(number)
            raise
        finally:
            conversation.busy = False
            gone.set_result(None)
            if self._pending.get(context) is gone:  # an equal request that came later may have replaced it
                del self._pending[context]
        answer = Answer(context, Sampled.of(segment), finish, turn)
        self._latest[context] = answer
        self._places.append((conversation, len(conversation.segments) - 1))
        self._turns += 1
        self._finish = finish
        self._transcript = conversation.messages
        self._texts.append(turn.text)
        return answer

    def _check_limits(self, context: Context) -> None:
        """Raise if a limit of the episode is used up. Requests in flight count as turns, but not yet their tokens."""
        limits, most = self._on.limits, self._sampling.max_tokens
        used_up = {
            f"{limits.turns} turns (env.turns)": self._turns + self._asked > limits.turns,
            f"{most} tokens (sampling.max_tokens)": self._tokens_left <= 0,
            f"context of {limits.context} tokens": limits.context is not None and len(context) >= limits.context,
        }
        for what, is_so in used_up.items():
            if is_so:
                self._cut, self._finish = True, "length"
                raise RequestError(f"the episode has used up its {what}")

    def _asked_sampling(self, ask: Ask) -> SamplingParams:
        """The run's sampling settings, shortened to what the client wants, and in the form that it wants."""
        if named := ask.sampling.penalised:
            names = ", ".join(named)
            raise RequestError(f"{names} must be off in an episode: the trainer's logits are the model's own")
        stops = tuple(dict.fromkeys((*self._sampling.stop_strings, *ask.sampling.stop_strings)))
        most = min(self._tokens_left, ask.sampling.max_tokens, self._on.limits.turn_tokens or self._tokens_left)
        return replace(self._sampling, max_tokens=most, stop_strings=stops, constraint=ask.sampling.constraint)

    async def _sample(self, position: Position, number: int, sampling: SamplingParams) -> tuple[Segment, FinishReason]:
        on, context = self._on, position.context
        seed = stream_seed(on.seed, on.label, self._group, self._index, context, number)
        request = Request(
            id=f"{on.label}/{self._group}/{self._index}/{seed:x}",
            prompt_tokens=context,
            sampling=sampling,
            seed=seed,
            share=f"{on.label}/{self._group}" if not self._turns else "",
            session=f"{on.label}/{self._group}/{self._index}/{position.conversation.number}",
            experts_from=on.experts_from(position.conversation.chain(), self._index),
            keeps=on.keeps(self._index),
        )
        with on.waiting("the engine", request.id):
            done = await on.engine.generate(request)
        if done.finish == "suspended":
            raise Suspended
        return done.sampled.segment(done.experts), done.finish

    @property
    def _tokens_left(self) -> int:
        """How many tokens the model may still generate."""
        said = sum(len(s.tokens) for chain in self._conversations.chains for s in chain.segments if s.source == "model")
        return self._sampling.max_tokens - said

    def _ended_by(self, turn: Segment, sampling: SamplingParams) -> FinishReason:
        if turn.tokens[-1] in sampling.stop_tokens:
            return "stop"
        text = self._on.chat.decode(turn.tokens)
        return "stop" if any(stop in text for stop in sampling.stop_strings) else "length"

    # The rollout.

    def _failed(self, reason: str) -> Rollout:
        return self._ended("failed", with_note(Score.error(reason), self.complaint))

    def _complete(self) -> Rollout:
        outcome = self._outcome
        score = None
        for number, reward in outcome.turns.items():
            conversation, place = self._places[number]
            conversation.segments[place] = replace(conversation.segments[place], reward=reward)
        if outcome.reward is not None or outcome.turns or outcome.roles or self._on.verifier is None:
            value = (outcome.reward or 0.0) + sum(outcome.turns.values())
            parts = {"environment": value} | {f"{ROLE}{role}": reward for role, reward in outcome.roles.items()}
            score = with_note(Score(value, parts, detail=shortened(outcome.detail)), self.complaint)
        return self._ended("complete", score)

    def _ended(self, status: Status, score: Score | None) -> Rollout:
        chains = self._conversations.chains or (Chain((), ()),)
        text = "\n\n".join(self._texts)
        return Rollout(self._group, self._index, chains, self._finish, text, score, status, self._transcript)

    def _suspended(self) -> Rollout:
        """A rollout to be continued: the chains so far, or the recorded ones if the agent has not got as far again."""
        chains = self._conversations.chains
        if self._record is not None and sum(map(_length, self._record.chains)) > sum(map(_length, chains)):
            chains = self._record.chains
        return Rollout(self._group, self._index, chains, "stop", "", None, "suspended", self._transcript)

    def grown(self, news: Sampled, least: int) -> tuple[Rollout, int] | None:
        """The rollout so far, if at least `least` tokens are new."""
        length = sum(map(_length, self._conversations.chains))
        if length - self._copied < max(1, least):
            return None
        self._copied = length
        return self._suspended(), 0


def _turns_of(chains: tuple[Chain, ...]) -> dict[tuple[Context, int], Segment]:
    """The recorded answers, by the context before each and by how many earlier answers that context had."""
    found: dict[tuple[Context, int], Segment] = {}
    times: Counter[Context] = Counter()
    for chain in chains:
        context = chain.prompt_tokens
        for segment in chain.segments:
            if segment.source == "model":
                found[context, times[context]] = segment
                times[context] += 1
            context += tuple(segment.tokens)
    return found


def _length(chain: Chain) -> int:
    return sum(len(s.tokens) for s in chain.segments)
