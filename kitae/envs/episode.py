"""Episodes: the model and its environment by turns, until one of them has an end; and all episodes of one prompt.

    start ─► say ─► hear ─► say ─► hear ─► … ─► close      say: the engine samples a turn; hear: the environment answers

What the model said and read is kept as tokens, in one chain that only grows: every request begins with the one before
and its completion. An episode that was interrupted is continued from the tokens in the journal.
"""

import asyncio
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any, Protocol, TypeVar

from kitae.clock import now
from kitae.data.chat import Chat, as_dict
from kitae.engines.base import Completion, Engine, Request, Sampled, SamplingParams
from kitae.engines.native.sampler import stream_seed
from kitae.envs.base import Environment, EpisodeLimits, Observation
from kitae.errors import DataError, EngineError, Interrupted, RequestError, StalledError, StoreError, root_cause
from kitae.store.journal import Journal
from kitae.types import GREEDY, Chain, FinishReason, Group, Message, Prompt, Rollout, Score, Segment, Status

T = TypeVar("T")
MakeEnvironment = Callable[[Prompt], Environment]

_OWN = (EngineError, StoreError, StalledError, Interrupted)  # they end the run, whoever calls into them
_LONGEST_REASON = 500  # characters
_LAST_SECONDS = 2.0  # to close an environment while the run is stopping


class Judge(Protocol):
    """Scores a response: a `VerifierPool`, or whatever stands in for one."""

    async def score(self, response: str, reference: Any, context: Mapping[str, Any]) -> Score: ...


class Parked(Exception):
    """The run is stopping; what was sampled is in the journal."""


class _Failure(Exception):
    """The episode cannot go on, and the model is not to blame; the message says why."""


@dataclass(slots=True)
class Running:
    """The episodes under way, by the ids of their rollouts. parking: they end as soon as they can."""

    episodes: "dict[str, Episode]" = field(default_factory=dict)
    parking: bool = False


@dataclass(frozen=True, slots=True)
class Episodes:
    """What episodes need. `label` keeps the random streams of training and evaluation apart.

    verifier: None where the environment gives all rewards. `span` hears of each group when it was sampled ("generate")
    and judged ("verify"). `waiting` is entered around each wait, with what is waited for and by which rollout.
    """

    engine: Engine
    chat: Chat
    verifier: Judge | None
    environment: MakeEnvironment
    sampling: SamplingParams
    seed: int
    label: str = "train"
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    span: Callable[[str, float, float], None] = lambda part, start, end: None
    waiting: Callable[[str, str], AbstractContextManager[None]] = lambda what, which: nullcontext()
    running: Running = field(default_factory=Running)

    async def group(
        self, group: int, prompt: Prompt, size: int, journal: Journal | None = None, *, greedy: bool = False
    ) -> Group:
        """All samples of one prompt, and the greedy response if asked for, which has the index `GREEDY`.

        Those that the journal has already are taken from there, never sampled again, and those that it has in part are
        continued. Complete ones are journalled before they are judged; those without a verdict, or that could not be
        judged, are judged (once more). An episode that failed stays so. Raises `RequestError` or `DataError` if the
        prompt is impossible, and `Parked` if the run is stopping.
        """
        known = {r.index: r for r in journal.rollouts(group)} if journal else {}
        parked = {r.index: r for r in journal.parked(group)} if journal else {}
        sampled, judged = [now()], list[float]()

        async def one(index: int) -> Rollout:
            rollout, complaint = known.get(index), ""
            if rollout is not None and _is_settled(rollout):
                return rollout
            if rollout is None:
                episode = Episode(self, group, index, prompt, parked.get(index))
                rollout, complaint = await self._sample(episode, journal), episode.complaint
            sampled.append(now())
            if not _is_settled(rollout):
                rollout = await self._judge(rollout, prompt, complaint, judged, journal)
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
        if len(sampled) > 1:
            self.span("generate", sampled[0], max(sampled))
        if judged:
            self.span("verify", sampled[1], max(judged))
        return Group(group, prompt, complete, last)

    async def _sample(self, episode: "Episode", journal: Journal | None) -> Rollout:
        """Run an episode to its end, and journal it."""
        rollout = await episode.run()
        if rollout.status == "parked":
            if journal and rollout.response_length:
                await journal.park(rollout)
            raise Parked
        if journal:
            with self.waiting("the journal", rollout.id):
                await journal.add_rollout(rollout)
        return rollout

    async def _judge(
        self, rollout: Rollout, prompt: Prompt, complaint: str, judged: list[float], journal: Journal | None
    ) -> Rollout:
        assert self.verifier is not None, f"rollout {rollout.id} has no reward, and there is no verifier"
        context = prompt.context
        if prompt.messages != (Message("user", str(context.get("question"))),):  # the question is not all that was said
            context = {**context, "prompt_messages": [as_dict(m) for m in prompt.messages]}
        if rollout.transcript:
            context = {**context, "transcript": [as_dict(m) for m in rollout.transcript]}
        with self.waiting("the verifier", rollout.id):
            score = await self.verifier.score(rollout.text, prompt.reference, context)
        judged.append(now())
        rollout = replace(rollout, score=_noted(score, complaint))
        if journal:
            with self.waiting("the journal", rollout.id):
                await journal.update_score(rollout)
        return rollout

    async def park(self) -> None:
        """End all episodes as soon as possible, to be continued in another run; their groups raise `Parked`."""
        self.running.parking = True
        for episode in list(self.running.episodes.values()):
            episode.interrupt()
        await self.engine.park()

    def grown(self, least: int) -> list[tuple[Rollout, int]]:
        """What the journal does not have yet of the episodes under way, if it is at least so many tokens; as
        `Journal.extend_parked` wants it. It counts as copied."""
        asking = {e.asking: e.copied_of_turn for e in self.running.episodes.values() if e.asking}
        sampled = self.engine.progress(asking)
        found = (e.grown(sampled.get(e.asking, Sampled()), least) for e in self.running.episodes.values())
        return [news for news in found if news is not None]


class Episode:
    """One rollout as it comes about; `run` it once. `record` is what the journal has of it.

    complaint: what went wrong when the environment was closed. asking: the id of the request in flight, or "".
    """

    def __init__(self, on: Episodes, group: int, index: int, prompt: Prompt, record: Rollout | None = None) -> None:
        self.complaint = ""
        self.asking = ""
        self._on = on
        self._group, self._index, self._prompt = group, index, prompt
        self._sampling = replace(on.sampling, temperature=0.0) if index == GREEDY else on.sampling
        self._environment: Environment | None = None
        self._deadline: asyncio.Timeout | None = None  # of the environment's call
        self._record = record
        self._recorded = deque(record.segments if record else ())  # what is left of it: the model's turns and answers
        self._prompt_tokens = record.chains[0].prompt_tokens if record else ()
        self._segments: list[Segment] = []
        self._finish: FinishReason = "parked"  # until the model has ended a turn
        self._texts: list[str] = []  # of the model's turns
        self._transcript = list(record.transcript or prompt.messages) if record else []
        self._read = len(self._transcript)  # messages of it up to the last answer that the model has read, or will
        self._copied = sum(len(s.tokens) for s in self._recorded)  # tokens after the prompt that the journal has

    @property
    def id(self) -> str:
        return f"{self._group}/{self._index}"

    async def run(self) -> Rollout:
        """The rollout: complete, failed or parked. Raises `RequestError` or `DataError` where the prompt is impossible,
        and errors that are the run's own."""
        self._on.running.episodes[self.id] = self
        failure = ""
        parked = False
        try:
            await self._start()
            while await self._say() and await self._hear():
                pass
        except Parked:
            parked = True
        except _Failure as problem:
            failure = f"environment: {problem}"
        finally:
            await self._close()
            del self._on.running.episodes[self.id]
        if parked:
            finish = self._record.finish if self._record and self._recorded else self._finish
            return self._unfinished([*self._segments, *self._recorded], finish)
        return self._failed(failure) if failure else self._complete()

    # The turns.

    async def _start(self) -> None:
        self._environment = self._make()
        answer = await self._call("start", self._environment.start)
        if self._record is None:
            messages = answer if answer is self._prompt.messages else _messages("start", answer)
            self._prompt_tokens = self._on.chat.encode_prompt(messages)
            self._transcript = list(messages)
            self._read = len(messages)

    def _make(self) -> Environment:
        try:
            return self._on.environment(self._prompt)
        except Exception as error:
            if not _is_its_own(error):
                raise
            raise _Failure(f"making it raised {_told(error)}") from error

    async def _say(self) -> bool:
        """A turn of the model, from the record as far as that has it. Whether the model ended it itself."""
        turn = self._recorded[0] if self._recorded else Segment("model", (), (), ())
        ended = self._how_it_ended(turn)
        if ended is None:
            done = await self._ask(Sampled(turn.tokens, turn.logprobs, turn.versions))
            turn, ended = Segment("model", done.tokens, done.logprobs, done.versions), done.finish
        if ended == "parked" and not turn.tokens:
            raise Parked
        if self._recorded:
            self._recorded.popleft()
        self._segments.append(turn)
        self._finish = ended
        if ended == "parked":
            raise Parked
        self._texts.append(self._text(turn.tokens))
        if not self._recorded:  # or the record has it in its transcript
            self._transcript.append(Message("assistant", self._texts[-1]))
        return ended == "stop"

    def _how_it_ended(self, turn: Segment) -> FinishReason | None:
        """How a recorded turn ended; None: it did not. One that was copied right at its last token does not say so."""
        if self._record is None or not self._recorded:
            return None
        if len(self._recorded) > 1 or self._record.finish == "stop":
            return "stop"
        if turn.tokens and turn.tokens[-1] in self._sampling.stop_tokens:
            return "stop"
        stops = self._sampling.stop_strings
        if stops and any(stop in self._on.chat.decode(turn.tokens) for stop in stops):
            return "stop"
        used_up = len(turn.tokens) >= self._left or not self._has_room(len(turn.tokens))
        return "length" if used_up else None

    async def _ask(self, prior: Sampled) -> Completion:
        """Let the engine sample a turn; `prior` is what it had sampled of it."""
        if self._on.running.parking:
            raise Parked
        on, number = self._on, len(self._segments)
        request = Request(
            id=f"{on.label}/{self._group}/{self._index}/{number}",
            prompt_tokens=self._context,
            sampling=replace(self._sampling, max_tokens=self._left),
            seed=stream_seed(on.seed, on.label, self._group, self._index, number),
            share=f"{on.label}/{self._group}" if not number else "",
            prior=prior,
        )
        self.asking = request.id
        try:
            with on.waiting("the engine", request.id):
                return await on.engine.generate(request)
        except RequestError as refusal:
            if not number:  # the prompt itself is impossible
                raise
            raise _Failure(f"the engine refuses turn {len(self._texts) + 1}: {refusal}") from refusal
        finally:
            self.asking = ""

    async def _hear(self) -> bool:
        """The environment's answer to the last turn. Whether the model is to read it and go on."""
        environment, said = self._environment, self._texts[-1]
        assert environment is not None
        answer = await self._call("step", lambda: environment.step(said))
        if not isinstance(answer, Observation):
            raise _Failure(f"step must return an Observation, got {type(answer).__name__}")
        if answer.error is not None:
            raise _Failure(_shortened(str(answer.error)))
        if self._recorded:
            return self._hear_again(answer)
        messages = _messages("step", answer.messages)
        tokens = () if answer.done else self._encode(messages)
        self._segments[-1] = replace(self._segments[-1], reward=_reward(answer.reward))
        self._transcript += messages
        if answer.done:
            return False
        if len(self._texts) >= self._on.limits.turns or self._left <= 0 or not self._has_room(len(tokens)):
            self._finish = "length"
            return False
        self._segments.append(Segment.observed(tokens))
        self._read = len(self._transcript)
        return True

    def _hear_again(self, answer: Observation) -> bool:
        """The model has read the answer that is on record, so this one does not count."""
        if answer.done:
            turns = len(self._texts)
            raise _Failure(f"it ended after turn {turns} this time, where the record of the episode goes on")
        self._segments.append(self._recorded.popleft())
        return True

    def _encode(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """An observation as tokens, if it is not too long."""
        last, limits = self._segments[-1].tokens, self._on.limits
        try:
            tokens = self._on.chat.encode_turn(
                messages, closed=last[-1:] != () and last[-1] in self._on.chat.stop_tokens
            )
        except DataError as problem:
            raise _Failure(_shortened(str(problem))) from problem
        if len(tokens) > limits.tokens:
            raise _Failure(f"an observation must have at most {limits.tokens} tokens, got {len(tokens)}")
        before = len(self._context)
        if len(tokens) > before and not self._has_room(len(tokens)):
            raise _Failure(
                f"an observation of {len(tokens)} tokens, after {before} that were said before, leaves no room in "
                f"the context of {limits.context}"
            )
        return tokens

    @property
    def _context(self) -> tuple[int, ...]:
        return Chain(self._prompt_tokens, tuple(self._segments)).tokens

    @property
    def _left(self) -> int:
        """Tokens that the model may still say."""
        return self._sampling.max_tokens - sum(len(s.tokens) for s in self._segments if s.source == "model")

    def _has_room(self, tokens: int) -> bool:
        """Whether the model could say something after so many more tokens."""
        context = self._on.limits.context
        return context is None or len(self._context) + tokens < context

    def _text(self, tokens: tuple[int, ...]) -> str:
        """A turn as environment and verifier see it: without special tokens, cut before a stop string."""
        text = self._on.chat.decode(tokens)
        cuts = [text.find(stop) for stop in self._sampling.stop_strings if stop in text]
        return text[: min(cuts)] if cuts else text

    # The environment.

    async def _call(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """A call of the environment, in the time that it has. What goes wrong in it is a failure of the episode, unless
        it is the run's own error."""
        if self._on.running.parking:
            raise Parked
        seconds = self._on.limits.seconds
        deadline = asyncio.timeout(seconds)
        try:
            with self._on.waiting("the environment", self.id):
                async with deadline:
                    self._deadline = deadline
                    return await call()
        except BaseException as error:
            if not _is_its_own(error):
                raise
            if not deadline.expired():
                raise _Failure(f"{name} raised {_told(error)}") from error
            if self._on.running.parking:
                raise Parked from None
            raise _Failure(f"{name} took longer than {seconds:g} s") from error
        finally:
            self._deadline = None

    def interrupt(self) -> None:
        """Wait no longer for the environment: it is asked again when the episode is continued."""
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())

    async def _close(self) -> None:
        if self._environment is None:
            return
        seconds = self._on.limits.seconds
        if self._on.running.parking:  # what was sampled must be in the journal soon
            seconds = min(seconds, _LAST_SECONDS)
        try:
            with self._on.waiting("the environment to close", self.id):
                async with asyncio.timeout(seconds):
                    await self._environment.close()
        except BaseException as error:
            if not _is_its_own(error):
                raise
            self.complaint = f"the environment could not be closed: {_told(error)}"

    # What becomes of it.

    def _complete(self) -> Rollout:
        rewards = [s.reward for s in self._segments if s.reward is not None]
        score = None
        if rewards or self._on.verifier is None:
            total = sum(rewards)
            score = _noted(Score(total, {"environment": total}), self.complaint)
        return self._ended("complete", score)

    def _failed(self, reason: str) -> Rollout:
        """With the part of the record that it did not come to."""
        for segment in self._recorded:
            self._segments.append(segment)
            self._texts += [self._text(segment.tokens)] if segment.source == "model" else []
        if self._recorded:
            assert self._record is not None
            self._finish = self._record.finish
            if self._recorded[-1].source == "model":
                self._transcript.append(Message("assistant", self._texts[-1]))
        self._finish = "abort" if self._finish == "parked" else self._finish
        return self._ended("failed", _noted(Score.error(reason), self.complaint))

    def _ended(self, status: Status, score: Score | None) -> Rollout:
        chains = (Chain(self._prompt_tokens, tuple(self._segments)),)
        text = "\n\n".join(self._texts)
        plain = (*self._prompt.messages, *(Message("assistant", said) for said in self._texts[:1]))
        transcript = () if (said := tuple(self._transcript)) == plain else said
        return Rollout(self._group, self._index, chains, self._finish, text, score, status, transcript)

    def _unfinished(self, segments: Sequence[Segment], finish: FinishReason) -> Rollout:
        """To be continued. Its transcript ends before its last turn, if that has no answer yet."""
        read = tuple(self._transcript[: self._read])
        transcript = () if read == self._prompt.messages else read
        chains = (Chain(self._prompt_tokens, tuple(segments)),)
        return Rollout(self._group, self._index, chains, finish, "", None, "parked", transcript)

    # Copies of it while it grows.

    @property
    def copied_of_turn(self) -> int:
        """Tokens of the turn in flight that the journal has."""
        return max(0, self._copied - self._length)

    @property
    def _length(self) -> int:
        return sum(len(s.tokens) for s in self._segments)

    def grown(self, news: Sampled, least: int) -> tuple[Rollout, int] | None:
        """See `Episodes.grown`; `news` is what the turn in flight has beyond `copied_of_turn`."""
        segments, finish, end, known = list(self._segments), self._finish, self._length, 0
        if news.tokens:
            known = self.copied_of_turn
            segments.append(Segment("model", news.tokens, news.logprobs, news.versions))
            finish, end = "parked", end + known + len(news.tokens)
        elif segments and segments[-1].source == "model":
            last = segments.pop()
            known = max(0, self._copied - (end - len(last.tokens)))
            segments.append(Segment("model", last.tokens[known:], last.logprobs[known:], last.versions[known:]))
        if end - self._copied < max(1, least):
            return None
        self._copied = end
        return self._unfinished(segments, finish), known


def _is_settled(rollout: Rollout) -> bool:
    """Whether its score is what it will stay."""
    return rollout.status == "failed" or (rollout.score is not None and rollout.score.valid)


def _noted(score: Score, complaint: str) -> Score:
    return replace(score, detail="; ".join(filter(None, (score.detail, complaint)))) if complaint else score


def _is_its_own(error: BaseException) -> bool:
    """Whether an error that comes out of an environment is its own: not the end of this task, nor of the run."""
    cause = root_cause(error) if isinstance(error, ExceptionGroup) else error
    if isinstance(cause, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or not task.cancelling()
    return isinstance(cause, Exception) and (isinstance(cause, RequestError) or not isinstance(cause, _OWN))


def _messages(name: str, found: object) -> tuple[Message, ...]:
    """What an environment says, if it is messages that can be kept."""
    if not isinstance(found, tuple | list):
        raise _Failure(f"the messages of {name} must be a tuple, got {type(found).__name__}")
    for message in found:
        if not isinstance(message, Message):
            raise _Failure(f"the messages of {name} must be of type Message, got {type(message).__name__}")
        if not isinstance(message.role, str) or not isinstance(message.content, str):
            raise _Failure(f"role and content of a message of {name} must be text, got {_shortened(repr(message))}")
        try:
            json.dumps(asdict(message))
        except Exception as error:
            raise _Failure(f"a message of {name} must hold JSON: {_told(error)}") from error
    return tuple(found)


def _reward(found: object) -> float | None:
    if found is None:
        return None
    if not isinstance(found, Real) or not math.isfinite(found):
        raise _Failure(f"a reward must be a finite number or None, got {_shortened(repr(found))}")
    return float(found)


def _told(error: BaseException) -> str:
    try:
        return _shortened(f"{type(error).__name__}: {error}")
    except Exception:  # it cannot even say what it is
        return type(error).__name__


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} …"
