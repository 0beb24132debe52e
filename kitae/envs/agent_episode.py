"""An episode that a program holds: it asks, the engine answers, and what was asked and answered becomes chains."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

from kitae.data.chat import Chat
from kitae.engines.base import Request, Sampled, SamplingParams, stream_seed
from kitae.envs.base import Agent, Outcome
from kitae.envs.conversations import Place, Threads
from kitae.envs.episode_context import (
    OWN_ERRORS,
    EpisodeContext,
    Failure,
    Suspended,
    is_its_own,
    noted,
    read_reward,
    shortened,
    told,
)
from kitae.errors import DataError, RequestError
from kitae.serving.base import Answer, Ask, Heard, with_ids
from kitae.types import GREEDY, Chain, FinishReason, Message, Prompt, Rollout, Score, Segment, Status

Context = tuple[int, ...]


class AgentEpisode:
    """One rollout as it comes about, and the model that its agent asks; `run` it once. `record` is what the journal has
    of it: an ask whose context is on record is answered from there.

    The tokens of an answer are drawn by the context and by how often it was answered before: an ask that was taken back
    and comes again gets the same ones, and two that are alike get different ones.
    """

    asking = ""  # answers are copied when they are complete
    copied_of_turn = 0

    def __init__(
        self,
        on: EpisodeContext,
        agent: Agent,
        group: int,
        index: int,
        prompt: Prompt,
        record: Rollout | None = None,
    ) -> None:
        self.complaint = ""
        self._on = on
        self._agent = agent
        self._group, self._index, self._prompt = group, index, prompt
        self._sampling = replace(on.sampling, temperature=0.0) if index == GREEDY else on.sampling
        self._record = record
        self._recorded = _turns_of(record.chains) if record else {}
        self._threads = Threads(on.chat)
        self._pending: dict[Context, asyncio.Future[None]] = {}
        self._latest: dict[Context, Answer] = {}
        self._numbers: defaultdict[Context, set[int]] = defaultdict(set)  # of answers, also of those on their way
        self._asked = 0  # in flight
        self._turns = 0
        self._deadline: asyncio.Timeout | None = None
        self._fatal: BaseException | None = None  # an error of the run's own, met while answering
        self._cut = False  # the model has used up what it may say
        self._transcript: tuple[Message, ...] = ()
        self._finish: FinishReason = "stop"
        self._said = list[str]()
        self._copied = sum(len(s.tokens) for s in record.segments) if record else 0

    @property
    def chat(self) -> Chat:
        return self._on.chat

    @property
    def id(self) -> str:
        return f"{self._group}/{self._index}"

    async def run(self) -> Rollout:
        """The rollout: complete, failed or suspended. Raises errors that are the run's own."""
        self._on.running.episodes[self.id] = self
        outcome, failure, suspended = Outcome(), "", False
        try:
            outcome = await self._call()
        except Suspended:
            suspended = True
        except Failure as problem:
            failure = "" if self._cut else f"environment: {problem}"  # an agent that is refused may well break down
        finally:
            self.complaint = await self._on.close(self._agent, self.id)
            del self._on.running.episodes[self.id]
        if suspended:
            return self._unfinished()
        if not failure and not self._threads.chains:
            failure = "environment: the agent ended without asking the model anything"
        if failure:
            return self._ended("failed", noted(Score.error(failure), self.complaint))
        return self._complete(outcome)

    async def _call(self) -> Outcome:
        """Let the agent run, as long as it does not stand still."""
        if self._on.running.suspending:
            raise Suspended
        seconds = self._on.limits.seconds
        self._deadline = asyncio.timeout(None)
        try:
            with self._on.waiting("the environment", self.id):
                async with self._deadline:
                    await self._agent.enter()
                    self._deadline.reschedule(asyncio.get_running_loop().time() + seconds)
                    outcome = await self._agent.run(self)
        except BaseException as error:
            if self._fatal is not None:
                raise self._fatal from None
            if not is_its_own(error):
                raise
            if self._on.running.suspending:
                raise Suspended from None
            if self._deadline.expired():
                raise Failure(f"it asked nothing for {seconds:g} s") from error
            raise Failure(f"run raised {told(error)}") from error
        finally:
            self._deadline = None
        if not isinstance(outcome, Outcome):
            raise Failure(f"run must return an Outcome, got {type(outcome).__name__}")
        return replace(outcome, reward=read_reward(outcome.reward))

    def interrupt(self) -> None:
        """Wait no longer for the agent: it runs again when the episode is continued."""
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())

    # What the agent asks.

    async def ask(self, ask: Ask, heard: Heard | None = None) -> Answer:
        """See `Model`. Temperature and other choices of how to sample are the run's: the tokens are trained on."""
        with self._working():
            place = self._place(ask)
            answer = await self._repeated(place.context) if ask.retry else None
            if answer is None:
                self._check_limits(place.context)
                answer = await self._answer(ask, place)
        if heard:
            heard(answer.sampled)
        return answer

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Time in which the agent waits for the model is not its own."""
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

    def _place(self, ask: Ask) -> Place:
        if ask.prompt_tokens is not None:
            raise RequestError("an episode takes chat messages, got a prompt of text or tokens")
        try:
            place = self._threads.place(ask.messages, ask.tools)
        except DataError as problem:
            raise RequestError(shortened(str(problem))) from problem
        limits = self._on.limits
        if len(place.added) > limits.tokens:
            raise RequestError(f"an observation must have at most {limits.tokens} tokens, got {len(place.added)}")
        return place

    async def _repeated(self, context: Context) -> Answer | None:
        """The answer that a client asks for again, because it never got it. One that is on its way is waited for, until
        it is there or was taken back."""
        if context in self._pending:
            await asyncio.wait([self._pending[context]])
        return self._latest.get(context)

    async def _answer(self, ask: Ask, place: Place) -> Answer:
        context, thread = place.context, place.thread
        sampling = self._asked_sampling(ask)
        taken = self._numbers[context]
        number = next(n for n in count() if n not in taken)
        taken.add(number)
        gone = self._pending[context] = asyncio.get_running_loop().create_future()
        thread.busy = True
        try:
            recorded = self._recorded.get((context, number))
            if recorded is not None:
                segment, finish = recorded, self._ended_by(recorded, sampling)
            else:
                segment, finish = await self._sample(place, number, sampling)
            # No wait from here on: what was sampled is kept whole, or not at all.
            turn = self._on.chat.read(segment.tokens, sampling.stop_strings, ask.tools)
            turn = with_ids(turn, f"{stream_seed(self.id, context, number):x}")
            said = Message("assistant", turn.told, turn.calls, problem=turn.problem)
            self._threads.grow(place, segment, said)
        except BaseException:
            taken.remove(number)
            raise
        finally:
            thread.busy = False
            gone.set_result(None)
            if self._pending.get(context) is gone:  # not that of one alike that came later
                del self._pending[context]
        answer = Answer(context, Sampled(segment.tokens, segment.logprobs, segment.versions), finish, turn)
        self._latest[context] = answer
        self._turns += 1
        self._finish = finish
        self._transcript = thread.messages
        self._said.append(turn.text)
        return answer

    def _check_limits(self, context: Context) -> None:
        """Whether the model may say anything more. An answer in flight counts as a turn, but not yet its tokens."""
        limits, most = self._on.limits, self._sampling.max_tokens
        used_up = {
            f"{limits.turns} turns (env.turns)": self._turns + self._asked > limits.turns,
            f"{most} tokens (sampling.max_tokens)": self._left <= 0,
            f"context of {limits.context} tokens": limits.context is not None and len(context) >= limits.context,
        }
        for what, is_so in used_up.items():
            if is_so:
                self._cut, self._finish = True, "length"
                raise RequestError(f"the episode has used up its {what}")

    def _asked_sampling(self, ask: Ask) -> SamplingParams:
        """The run's, as much shorter as the client wants it."""
        stops = tuple(dict.fromkeys((*self._sampling.stop_strings, *ask.sampling.stop_strings)))
        return replace(self._sampling, max_tokens=min(self._left, ask.sampling.max_tokens), stop_strings=stops)

    async def _sample(self, place: Place, number: int, sampling: SamplingParams) -> tuple[Segment, FinishReason]:
        on, context = self._on, place.context
        seed = stream_seed(on.seed, on.label, self._group, self._index, context, number)
        request = Request(
            id=f"{on.label}/{self._group}/{self._index}/{seed:x}",
            prompt_tokens=context,
            sampling=sampling,
            seed=seed,
            share=f"{on.label}/{self._group}" if not self._turns else "",
            session=f"{on.label}/{self._group}/{self._index}/{place.thread.number}",
            experts_from=on.experts_from(place.thread.chain(), self._index),
        )
        with on.waiting("the engine", request.id):
            done = await on.engine.generate(request)
        if done.finish == "suspended":
            raise Suspended
        return Segment("model", done.tokens, done.logprobs, done.versions, experts=done.experts), done.finish

    @property
    def _left(self) -> int:
        """Tokens that the model may still say."""
        said = sum(len(s.tokens) for chain in self._threads.chains for s in chain.segments if s.source == "model")
        return self._sampling.max_tokens - said

    def _ended_by(self, turn: Segment, sampling: SamplingParams) -> FinishReason:
        if turn.tokens[-1] in sampling.stop_tokens:
            return "stop"
        text = self._on.chat.decode(turn.tokens)
        return "stop" if any(stop in text for stop in sampling.stop_strings) else "length"

    # What becomes of it.

    def _complete(self, outcome: Outcome) -> Rollout:
        score = None
        if outcome.reward is not None or self._on.verifier is None:
            value = outcome.reward or 0.0
            score = noted(Score(value, {"environment": value}, detail=shortened(outcome.detail)), self.complaint)
        return self._ended("complete", score)

    def _ended(self, status: Status, score: Score | None) -> Rollout:
        chains = self._threads.chains or (Chain((), ()),)
        text = "\n\n".join(self._said)
        return Rollout(self._group, self._index, chains, self._finish, text, score, status, self._transcript)

    def _unfinished(self) -> Rollout:
        """With what is on record and was not asked again."""
        chains = self._threads.chains
        if self._record is not None and sum(map(_length, self._record.chains)) > sum(map(_length, chains)):
            chains = self._record.chains
        return Rollout(self._group, self._index, chains, "stop", "", None, "suspended", self._transcript)

    def grown(self, news: Sampled, least: int) -> tuple[Rollout, int] | None:
        """All answers so far, if there are enough new ones."""
        length = sum(map(_length, self._threads.chains))
        if length - self._copied < max(1, least):
            return None
        self._copied = length
        return self._unfinished(), 0


def _turns_of(chains: tuple[Chain, ...]) -> dict[tuple[Context, int], Segment]:
    """The answers on record, by what the model had read before each, and how many times before it had."""
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
