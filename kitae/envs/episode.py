"""An episode by turns: the model and its environment, until one of them ends it.

    start ─► sample ─► step ─► sample ─► step ─► … ─► close

`sample`: the engine generates a turn of the model; `step`: the environment answers it. Turns and observations are kept
as tokens, in one chain that only grows: the prompt of each request is the prompt before and its completion, with the
observation added. An interrupted episode is continued from the tokens in the journal.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from kitae.data.chat import as_message
from kitae.engines.base import Completion, Request, Sampled, stream_seed
from kitae.engines.constraint import Constraint
from kitae.envs.base import Environment, Observation, Opening, SingleTurn
from kitae.envs.blocking_calls import Blocked, WatchedCall
from kitae.envs.episode_context import (
    EpisodeContext,
    Failure,
    RunningEpisode,
    Suspended,
    described,
    is_episode_error,
    read_constraint,
    read_messages,
    read_reward,
    read_state,
    read_tools,
    shortened,
    with_note,
)
from kitae.errors import DataError, RequestError
from kitae.store.columns import LazyColumn
from kitae.types import (
    Chain,
    ExpertArray,
    FinishReason,
    LazyText,
    Message,
    Prompt,
    Rollout,
    Score,
    Segment,
    Status,
    Tool,
    Turn,
)

T = TypeVar("T")


class _OutOfTime(Exception):
    """The deadline of the whole episode is over."""


class Episode(RunningEpisode):
    """An episode of an `Environment`, by turns."""

    def __init__(
        self,
        on: EpisodeContext,
        environment: Environment,
        group: int,
        index: int,
        prompt: Prompt,
        record: Rollout | None = None,
    ) -> None:
        super().__init__(on, environment, group, index, prompt, record)
        self._environment = environment
        self._recorded = deque(record.segments if record else ())  # the recorded segments that were not replayed yet
        self._prompt_tokens = record.chains[0].prompt_tokens if record else ()
        self._segments: list[Segment] = []
        self._finish: FinishReason = "suspended"  # until the model has ended a turn
        self._tools: tuple[Tool, ...] = ()
        self._constraint: Constraint | None = None  # of the next turn
        self._state: tuple[str, float] = ("", 0.0)  # its name and its potential
        self._turns: list[Turn] = []
        self._lazy_text: LazyText | None = None  # the last turn's text, if it was left in a file
        self._transcript = list(record.transcript or prompt.messages) if record else []
        self._read = len(self._transcript)  # how many of its messages the model has read, or will read next
        self._end: float | None = None  # when the whole episode must be over, by the loop's clock
        self._copied = sum(len(s.tokens) for s in self._recorded)  # how many tokens after the prompt the journal has

    async def _play(self) -> None:
        if (seconds := self._on.limits.deadline) is not None:
            self._end = asyncio.get_running_loop().time() + seconds
        try:
            await self._start()
            while await self._sample_turn() and await self._step():
                pass
        except _OutOfTime:
            self._finish = "length"

    # The turns.

    async def _start(self) -> None:
        answer = await self._call("start", self._environment.start)
        if not isinstance(answer, Opening):
            raise Failure(f"start must return an Opening, got {type(answer).__name__}")
        self._tools = read_tools(answer.tools)
        self._constraint = read_constraint("start", answer.constraint)
        self._state = read_state(answer)
        if self._record is None:
            messages = answer.messages
            if messages is not self._prompt.messages:
                messages = read_messages("start", messages)
            self._prompt_tokens = self._on.chat.encode_prompt(messages, self._tools)
            self._transcript = list(messages)
            self._read = len(messages)

    async def _sample_turn(self) -> bool:
        """Add a turn of the model, from the record as far as it goes. Returns whether the model ended it itself."""
        turn = self._recorded[0] if self._recorded else Segment("model", (), (), ())
        ended = self._recorded_finish(turn)
        if ended is None:
            done = await self._generate(Sampled.of(turn), turn.experts)
            turn, ended = done.sampled.segment(done.experts), done.finish
        elif not self._has_all_experts(turn):
            turn = replace(turn, experts=None)
        if ended == "suspended" and not turn.tokens:
            raise Suspended
        if self._recorded:
            self._recorded.popleft()
        self._segments.append(turn if turn.state else replace(turn, state=self._state[0], potential=self._state[1]))
        self._finish = ended
        if ended == "suspended":
            raise Suspended
        if type(self._environment) is SingleTurn and isinstance(
            turn.tokens, LazyColumn
        ):  # a subclass may read the turn
            self._lazy_text = turn.tokens.text  # the verifier reads it from the journal's files
        if self._lazy_text is not None:
            return False
        self._turns.append(self._turn(turn.tokens))
        if not self._recorded:  # otherwise the record's transcript has it
            self._transcript.append(as_message(self._turns[-1]))
        return ended == "stop" or self._is_cut(turn)

    def _is_cut(self, turn: Segment) -> bool:
        """Whether a turn ended by its own limit, so that the episode may go on."""
        most = self._on.limits.turn_tokens
        return most is not None and len(turn.tokens) >= most and self._tokens_left > 0 and self._has_room(0)

    def _has_all_experts(self, turn: Segment) -> bool:
        """Whether a recorded turn has the experts of all its positions.

        A turn that was suspended, continued, and copied to the journal just at its end lacks those of its first part.
        """
        places = self._chain.length + len(turn.tokens) - 1 - self._chain.unrouted
        return turn.experts is None or len(turn.experts) == places

    def _recorded_finish(self, turn: Segment) -> FinishReason | None:
        """How a recorded turn ended; None: it was interrupted. A copy that was made at the turn's last token does not
        have the reason recorded, so it is derived from the tokens."""
        if self._record is None or not self._recorded:
            return None
        if len(self._recorded) > 1 or self._record.finish == "stop":
            return "stop"
        if turn.tokens and turn.tokens[-1] in self._sampling.stop_tokens:
            return "stop"
        stops = self._sampling.stop_strings
        if stops and any(stop in self._on.chat.decode(turn.tokens) for stop in stops):
            return "stop"
        used_up = len(turn.tokens) >= self._turn_tokens or not self._has_room(len(turn.tokens))
        return "length" if used_up else None

    async def _generate(self, prior: Sampled, prior_experts: ExpertArray | None) -> Completion:
        """Let the engine generate a turn. prior: the tokens sampled of it so far; prior_experts: theirs."""
        if self._on.running.suspending:
            raise Suspended
        on, number = self._on, len(self._segments)
        request = Request(
            id=f"{on.label}/{self._group}/{self._index}/{number}",
            prompt_tokens=self._chain.tokens,
            sampling=replace(self._sampling, max_tokens=self._turn_tokens, constraint=self._constraint),
            seed=stream_seed(on.seed, on.label, self._group, self._index, number),
            share=f"{on.label}/{self._group}" if not number else "",
            prior=prior,
            session=f"{on.label}/{self._group}/{self._index}" if on.limits.turns > 1 else "",
            experts_from=on.experts_from(self._chain, self._index),
            prior_experts=prior_experts,
            keeps=on.keeps(self._index),
        )
        self.asking = request.id
        try:
            with on.waiting("the engine", request.id):
                return await on.engine.generate(request)
        except RequestError as refusal:
            if not number:  # the prompt itself is impossible
                raise
            raise Failure(f"the engine refuses turn {len(self._turns) + 1}: {refusal}") from refusal
        finally:
            self.asking = ""

    async def _step(self) -> bool:
        """Pass the last turn to the environment. Returns whether the model is to read the observation and go on."""
        environment, said = self._environment, self._turns[-1]
        answer = await self._call("step", lambda: environment.step(said))
        if not isinstance(answer, Observation):
            raise Failure(f"step must return an Observation, got {type(answer).__name__}")
        if answer.error is not None:
            raise Failure(shortened(str(answer.error)))
        self._constraint = read_constraint("step", answer.constraint)
        self._state = read_state(answer)
        if self._recorded:
            return self._replay_step(answer)
        messages = read_messages("step", answer.messages)
        tokens = () if answer.done else self._encode(messages)
        self._segments[-1] = replace(self._segments[-1], reward=read_reward(answer.reward))
        self._transcript += messages
        if answer.done:
            return False
        if len(self._turns) >= self._on.limits.turns or self._tokens_left <= 0 or not self._has_room(len(tokens)):
            self._finish = "length"
            return False
        self._segments.append(Segment.observed(tokens))
        self._read = len(self._transcript)
        return True

    def _replay_step(self, answer: Observation) -> bool:
        """Use the recorded observation, which the model has read, instead of the one that was just returned."""
        if answer.done:
            turns = len(self._turns)
            raise Failure(f"it ended after turn {turns} this time, where the record of the episode goes on")
        self._segments.append(self._recorded.popleft())
        return True

    def _encode(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """The tokens of an observation. Raises `Failure` if it is too long."""
        last, limits = self._segments[-1].tokens, self._on.limits
        try:
            tokens = self._on.chat.encode_turn(messages, closed=len(last) > 0 and last[-1] in self._on.chat.stop_tokens)
        except DataError as problem:
            raise Failure(shortened(str(problem))) from problem
        if len(tokens) > limits.tokens:
            raise Failure(f"an observation must have at most {limits.tokens} tokens, got {len(tokens)}")
        before = self._chain.length
        if len(tokens) > before and not self._has_room(len(tokens)):
            raise Failure(
                f"an observation of {len(tokens)} tokens, after {before} that were said before, leaves no room in "
                f"the context of {limits.context}"
            )
        return tokens

    @property
    def _chain(self) -> Chain:
        return Chain(self._prompt_tokens, tuple(self._segments))

    @property
    def _tokens_left(self) -> int:
        """How many tokens the model may still generate."""
        return self._sampling.max_tokens - sum(len(s.tokens) for s in self._segments if s.source == "model")

    @property
    def _turn_tokens(self) -> int:
        """How many tokens the turn that is next may have."""
        most = self._on.limits.turn_tokens
        return self._tokens_left if most is None else min(most, self._tokens_left)

    def _has_room(self, tokens: int) -> bool:
        """Whether the context has room for a turn after this many more tokens."""
        context = self._on.limits.context
        return context is None or self._chain.length + tokens < context

    def _turn(self, tokens: Sequence[int]) -> Turn:
        return self._on.chat.read(tokens, self._sampling.stop_strings, self._tools)

    # The environment.

    async def _call(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Call the environment, with its time limit. An error fails the episode, unless it ends the whole run."""
        await self._go_on()
        seconds = self._on.limits.seconds
        left = seconds if self._end is None else self._end - asyncio.get_running_loop().time()
        deadline = asyncio.timeout(min(seconds, left))
        try:
            with self._on.waiting("the environment", self.id):
                async with deadline:
                    self._deadline = deadline
                    return await WatchedCall(self._on.note, self.id, seconds, call)
        except Failure:
            raise
        except Blocked as block:
            await self._go_on()
            raise Failure(f"{name} was interrupted: {block}") from block
        except BaseException as error:
            if not is_episode_error(error):
                raise
            if not deadline.expired():
                raise Failure(f"{name} raised {described(error)}") from error
            if self._on.running.suspending:
                raise Suspended from None
            if left < seconds and self._segments:
                raise _OutOfTime from error
            raise Failure(f"{name} took longer than {min(seconds, self._on.limits.deadline or seconds):g} s") from error
        finally:
            self._deadline = None

    # The rollout.

    def _suspended(self) -> Rollout:
        finish = self._record.finish if self._record and self._recorded else self._finish
        return self._unfinished([*self._segments, *self._recorded], finish)

    def _complete(self) -> Rollout:
        rewards = [s.reward for s in self._segments if s.reward is not None]
        score = None
        if (rewards and not getattr(self._environment, "judged", False)) or self._on.verifier is None:
            total = sum(rewards)
            score = with_note(Score(total, {"environment": total}), self.complaint)
        return self._ended("complete", score)

    def _failed(self, reason: str) -> Rollout:
        """A failed rollout, with the part of the record that was not replayed."""
        for segment in self._recorded:
            self._segments.append(segment)
            self._turns += [self._turn(segment.tokens)] if segment.source == "model" else []
        if self._recorded:
            assert self._record is not None
            self._finish = self._record.finish
            if self._recorded[-1].source == "model":
                self._transcript.append(as_message(self._turns[-1]))
        self._finish = "abort" if self._finish == "suspended" else self._finish
        return self._ended("failed", with_note(Score.error(reason), self.complaint))

    def _ended(self, status: Status, score: Score | None) -> Rollout:
        chains = (self._chain,)
        text = self._lazy_text or "\n\n".join(turn.text for turn in self._turns)
        plain = (*self._prompt.messages, *map(as_message, self._turns[:1]))
        transcript = () if (said := tuple(self._transcript)) == plain else said
        return Rollout(self._group, self._index, chains, self._finish, text, score, status, transcript)

    def _unfinished(self, segments: Sequence[Segment], finish: FinishReason) -> Rollout:
        """A rollout to be continued. Its transcript ends before the last turn if that has no observation yet."""
        read = tuple(self._transcript[: self._read])
        transcript = () if read == self._prompt.messages else read
        chains = (Chain(self._prompt_tokens, tuple(segments)),)
        return Rollout(self._group, self._index, chains, finish, "", None, "suspended", transcript)

    # Copies for the journal.

    @property
    def copied_of_turn(self) -> int:
        return max(0, self._copied - self._length)

    @property
    def _length(self) -> int:
        return sum(len(s.tokens) for s in self._segments)

    def grown(self, news: Sampled, least: int) -> tuple[Rollout, int] | None:
        segments, finish, end, known = list(self._segments), self._finish, self._length, 0
        if news.tokens:
            known = self.copied_of_turn
            segments.append(news.segment())
            finish, end = "suspended", end + known + len(news.tokens)
        elif segments and segments[-1].source == "model":
            last = segments.pop()
            known = max(0, self._copied - (end - len(last.tokens)))
            segments.append(Sampled.of(last).after(known).segment(last.experts))
        if end - self._copied < max(1, least):
            return None
        self._copied = end
        return self._unfinished(segments, finish), known
