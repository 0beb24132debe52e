"""What the addresses of a language model answer: chats, texts, tokens.

    body ─► order ─► places ─► an ask for each choice ─► model ─► answers ─► JSON, whole or as a stream

Who answers is looked up for each request (`Find`), so one set of addresses can serve one model or many.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kitae.engines.base import Sampled, stream_seed
from kitae.serving.admission import Places
from kitae.serving.base import Answer, Ask, Heard, Model
from kitae.serving.fields import Fields
from kitae.serving.http_bodies import EventStream, Json, json_response, place_of, read_fields, unless_gone
from kitae.serving.refusals import Refused
from kitae.serving.requests import AnswerOrder, Wish, read_chat, read_completion
from kitae.serving.responses import Choice, Teller, Telling, Voice
from kitae.serving.text_scoring import ScoredText, TextScorer
from kitae.types import Turn

Find = Callable[[Request], Model]
"""Who answers a request; raises `Refused` with status 404 where nobody does."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How strictly a client is taken at its word: `Manners(tries=3)`.

    tries: how often an answer is sampled until it has the call of a tool that `tool_choice` asks for. answer_anyway:
    the last one is then told as it is, with `unmet` in it; else the request is refused. any_name: whatever model the
    client names is meant. ignored: fields that are taken and change nothing.
    """

    tries: int = 3
    answer_anyway: bool = False
    any_name: bool = False
    ignored: tuple[str, ...] = ()


class Desk:
    """The handlers. scorer: gives log-probs of prompts and of likeliest tokens; None: nobody can."""

    def __init__(
        self,
        find: Find,
        voice: Voice,
        places: Places,
        scorer: TextScorer | None = None,
        manners: Manners | None = None,
        gone: Callable[[str], None] = lambda path: None,
    ) -> None:
        self._find, self._voice, self._places, self._scorer = find, voice, places, scorer
        self._manners = manners or Manners()
        self._gone = gone

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`"""
        fields = await read_fields(request)
        fields.ignore(*self._manners.ignored)
        return await self._serve(request, read_chat(fields, self._voice.chat, _is_retry(request)))

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`"""
        order = read_completion(await read_fields(request), self._voice.chat, _is_retry(request))
        return await self._serve(request, order)

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: a prompt, or messages with tools, as tokens."""
        fields = await read_fields(request)
        tokens = _tokens(fields, self._voice)
        return json_response({"tokens": tokens, "count": len(tokens)})

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: tokens as a text, special ones too."""
        fields = await read_fields(request)
        tokens = fields.take("tokens")
        fields.ignore("model")
        fields.finish()
        if not isinstance(tokens, list) or not all(isinstance(t, int) and 0 <= t < 2**31 for t in tokens):
            raise Refused("tokens must be a list of token ids", param="tokens")
        return json_response({"prompt": self._voice.chat.spell(*tokens)})

    # One request.

    async def _serve(self, request: Request, order: AnswerOrder) -> Response:
        model = self._find(request)
        if order.model and order.model != self._voice.name and not self._manners.any_name:
            raise Refused(
                f"there is no model {order.model!r} here, only {self._voice.name!r}", 404, param="model",
                code="model_not_found",
            )  # fmt: skip
        if _needs_scores(order) and self._scorer is None:
            raise Refused("this address gives no log-probs but those of sampled tokens", param="logprobs")
        if not order.stream:
            return json_response(await unless_gone(request.receive, self._whole(model, order)))
        events = self._events(model, order)
        first = await unless_gone(request.receive, anext(events))
        return EventStream(events, first, lambda: self._gone(place_of(request)))

    async def _whole(self, model: Model, order: AnswerOrder) -> Json:
        with self._places.take(len(order.asks)):
            async with asyncio.TaskGroup() as tasks:
                made = [tasks.create_task(self._choice(model, order, i)) for i in range(len(order.asks))]
        choices, unmet = zip(*(task.result() for task in made), strict=True)
        body = Teller(order, self._voice).whole(choices)
        for told, why in zip(body["choices"], unmet, strict=True):
            told.update({"unmet": why} if why else {})
        return body

    async def _events(self, model: Model, order: AnswerOrder) -> AsyncGenerator[Json, None]:
        """Of all choices, in the order in which they come."""
        with self._places.take(len(order.asks)):
            events: asyncio.Queue[Json | None] = asyncio.Queue()
            working = asyncio.create_task(self._tell_all(model, order, events))
            try:
                while (event := await events.get()) is not None:
                    yield event
                await working
            finally:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    async def _tell_all(self, model: Model, order: AnswerOrder, events: "asyncio.Queue[Json | None]") -> None:
        teller = Teller(order, self._voice)
        try:
            async with asyncio.TaskGroup() as tasks:
                made = [tasks.create_task(self._tell(model, teller, i, events)) for i in range(len(order.asks))]
            if order.usage:
                events.put_nowait(teller.last([task.result() for task in made]))
        finally:
            events.put_nowait(None)

    async def _tell(self, model: Model, teller: Teller, index: int, events: "asyncio.Queue[Json | None]") -> Answer:
        order = teller.order
        if order.wish.any or _needs_scores(order) or not order.generates:  # nothing is certain before the end
            choice, why = await self._choice(model, order, index)
            for event in teller.pieces_of(choice):
                event["choices"][0].update({"unmet": why} if why else {})
                events.put_nowait(event)
            return choice.answer
        telling = Telling(teller, index)

        def heard(news: Sampled) -> None:
            for event in telling.hear(news):
                events.put_nowait(event)

        answer = await model.ask(order.asks[index], heard)
        for event in telling.end(answer):
            events.put_nowait(event)
        return answer

    async def _choice(self, model: Model, order: AnswerOrder, index: int) -> tuple[Choice, str]:
        """And why it is not what was asked for, where it is told all the same."""
        ask = order.asks[index]
        if order.generates:
            answer, unmet = await self._insist(model, ask, order.wish)
        else:
            assert ask.prompt_tokens is not None
            answer, unmet = Answer(ask.prompt_tokens, Sampled(), "length", Turn("")), ""
        return Choice(index, answer, await self._scores(order, answer)), unmet

    async def _insist(self, model: Model, ask: Ask, wish: Wish, heard: Heard | None = None) -> tuple[Answer, str]:
        """An answer with the calls that are wished for, and why not. A greedy one would only be the same again."""
        answer = await model.ask(ask, heard)
        tries = self._manners.tries if ask.sampling.temperature > 0 else 1
        for number in range(1, tries):
            if not wish.unmet(answer.turn):
                break
            seed = None if ask.seed is None else stream_seed(ask.seed, "again", number)
            answer = await model.ask(replace(ask, id=f"{ask.id}/{number}", seed=seed), heard)
        unmet = wish.unmet(answer.turn)
        if unmet and not self._manners.answer_anyway:
            said = answer.turn.text.strip()[:200]
            times = "once" if tries == 1 else f"{tries} times"
            raise Refused(f"{unmet}; asked {times}, it said last: {said!r}", 422, param="tool_choice", code="unmet")
        return answer, unmet

    async def _scores(self, order: AnswerOrder, answer: Answer) -> ScoredText | None:
        if not _needs_scores(order):
            return None
        assert self._scorer is not None
        tokens = (*answer.prompt_tokens, *answer.sampled.tokens)
        return await self._scorer.score(tokens, order.top, order.asks[0].sampling.temperature)


def _needs_scores(order: AnswerOrder) -> bool:
    """Whether log-probs are wanted that sampling does not give: of the prompt, or of tokens that were not drawn."""
    return order.logprobs and (order.top > 0 or order.echo)


def _is_retry(request: Request) -> bool:
    """OpenAI's clients count."""
    return request.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")


def _tokens(fields: Fields, voice: Voice) -> list[int]:
    text = fields.take("prompt")
    if text is None:
        fields = Fields({"messages": fields.take("messages"), "tools": fields.take("tools")})
        ask = read_chat(fields, voice.chat).asks[0]
        return list(voice.chat.encode_prompt(ask.messages, ask.tools))
    special = fields.flag("add_special_tokens", True)
    fields.ignore("model")
    fields.finish()
    if not isinstance(text, str):
        raise Refused(f"prompt must be a text, got {type(text).__name__}", param="prompt")
    return [*(voice.chat.begin() if special else ()), *voice.chat.encode(text)]


async def no_responses(_: Any) -> Response:
    raise Refused(
        "this server has no Responses API: use chat completions. In openai-agents: "
        "set_default_openai_api('chat_completions'), or OpenAIChatCompletionsModel",
        404,
        code="no_responses_api",
    )
