"""Handlers of the addresses of a language model: chats, texts, tokens.

    body ─► order ─► admission ─► an ask for each choice ─► model ─► answers ─► JSON, whole or as a stream

The model is looked up for each request (`Find`), so one set of addresses can serve one model or many.

A reward model has an address of its own:

    POST /v1/score
    {"messages": [{"role": "user", "content": "Hello"}], "response": "Hello!"}         one answer
    {"messages": [… the last of them the assistant's]}                                 the same
    {"items": [{"messages": […], "response": "…"}, …]}                                 several
    {"text_1": "Hello", "text_2": "Hello!"}                                  a question and an answer, as texts

    {"data": [{"index": 0, "score": 0.71}, …]}

Answers that come within a few milliseconds of each other are scored as one batch. In a list, an answer that cannot be
scored has `"error"` in place of its score; a single answer is refused.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from kitae.data.data_files import clip
from kitae.engines.base import Sampled, stream_seed
from kitae.serving.answers import AnswerRenderer, Asking, Choice, Speak, Teller
from kitae.serving.api_keys import Account
from kitae.serving.base import Answer, Ask, Model, OnTokens
from kitae.serving.http_bodies import (
    EventStream,
    Handler,
    Json,
    end_tasks,
    endpoint,
    json_response,
    place_of,
    unless_gone,
)
from kitae.serving.kept_answers import KeptAnswers
from kitae.serving.messages_bodies import CountBody
from kitae.serving.prompt_reader import PromptReader, RequestReader
from kitae.serving.refusals import AdmissionControl, Refused
from kitae.serving.request_bodies import ChatBody, DetokenizeBody, RequestBody, TokenizeBody
from kitae.serving.requests import ROLE_OF, AnswerOrder, ToolChoice, read_chat
from kitae.serving.responses_answers import find_kept
from kitae.serving.server_metrics import Counters
from kitae.serving.text_scoring import ScoredText, TextScorer
from kitae.types import Turn
from kitae.verifiers.reward_model_verifier import RewardService

_MOST_WAITING = 16_384  # events of a stream

Answered = Callable[[Account | None, float, Sequence[Answer], int], None]
"""Takes the account of a client, how long its request waited, its answers, and the number of tokens of its prompts."""

Relay = Callable[[Request, Json], Awaitable[Response]]
"""Answers a request with this body in place of the model."""

Find = Callable[[Request], Model]
"""Gives the model that answers a request; raises `Refused` with status 404 where there is none."""


@dataclass(frozen=True, slots=True)
class AnswerPolicy:
    """How far a server goes to give what a request asks for: `AnswerPolicy(tries=3)`.

    tries: how often an answer is sampled until it has the tool call that `tool_choice` asks for. answer_anyway: the
    last answer is returned as it is, with the reason in `unmet`; otherwise the request is refused. names: further
    ones under which the model answers. roles: also `policy/` and the name of a role. ignored: fields that are accepted
    and have no effect. hint: what a refusal of another name says beyond that.
    """

    tries: int = 3
    answer_anyway: bool = False
    names: frozenset[str] = frozenset()
    roles: bool = False
    ignored: tuple[str, ...] = ()
    hint: str = ""


class ChatHandlers:
    """The handlers of one server. scorer: computes log-probs of prompts and of the likeliest tokens; None: requests for
    them are refused. gone: is called with the path of a request whose client has gone before the end of the stream.
    reader: reads requests; None: for models that make tokens of messages themselves. answered: is called with the
    answers to each request. owner: to whom answers belong that can be asked for again; they end with it.
    relays: who answers requests to other models, by their names. adapters: the same model with an adapter, by names."""

    def __init__(
        self,
        find: Find,
        renderer: AnswerRenderer,
        admission: AdmissionControl,
        scorer: TextScorer | None = None,
        answer_policy: AnswerPolicy | None = None,
        gone: Callable[[str], None] = lambda path: None,
        reader: RequestReader[PromptReader] | None = None,
        answered: Answered = lambda *_: None,
        owner: Callable[[Request], object] = lambda request: request.scope.get("account"),
        relays: Mapping[str, Relay] = MappingProxyType({}),
        adapters: Mapping[str, Model] = MappingProxyType({}),
    ) -> None:
        self._find, self._renderer, self._admission, self._scorer = find, renderer, admission, scorer
        self._answer_policy = answer_policy or AnswerPolicy()
        self._gone, self._answered, self._owner, self._relays = gone, answered, owner, relays
        self._adapters = adapters
        self._kept: WeakKeyDictionary[object, KeptAnswers] = WeakKeyDictionary()
        self._reader = reader or RequestReader([PromptReader.for_models(renderer.chat)])

    def speaking(self, speak: Speak) -> Handler:
        """The handler of requests for answers in one dialect."""

        async def answer(request: Request) -> Response:
            kept, retry = self._kept_of(request), _is_retry(request)

            def tell(body: Json, prompts: PromptReader) -> Teller | Json:
                name = str(body.get("model"))
                if name in self._relays:
                    return body
                renderer = replace(self._renderer, name=name) if name in self._adapters else self._renderer
                return speak(_without(body, self._answer_policy.ignored), prompts, Asking(renderer, kept, retry))

            read = await self._reader.read(request, tell)
            if isinstance(read, dict):
                return await self._relays[read["model"]](request, read)
            return await self._serve(request, read)

        return answer

    async def kept_response(self, request: Request) -> Response:
        """`GET` and `DELETE /v1/responses/{id}`"""
        kept, id = self._kept_of(request), request.path_params["id"]
        told = find_kept(kept, id).told
        if request.method == "DELETE":
            kept.drop(id)
            told = {"id": id, "object": "response", "deleted": True}
        return json_response(told)

    async def count_tokens(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`"""

        def read(body: Json, prompts: PromptReader) -> AnswerOrder:
            counted = CountBody.read(_without(body, self._answer_policy.ignored))
            return read_chat(ChatBody.read(counted.as_chat()), prompts)

        order, model = await self._reader.read(request, read), self._find(request)
        self._check_name(order.model)
        ask = order.asks[0]
        tokens = ask.prompt_tokens or model.chat.encode_prompt(ask.messages, ask.tools)
        return json_response({"input_tokens": len(tokens)})

    def _check_name(self, name: str) -> None:
        if self._answer_policy.roles and name.startswith(ROLE_OF):
            return
        known = (self._renderer.name, "", *self._answer_policy.names, *self._adapters)
        if name not in known:
            message = f"there is no model {name[:100]!r} here, only {self._renderer.name!r}{self._answer_policy.hint}"
            raise Refused(message, 404, param="model", code="model_not_found")

    def _kept_of(self, request: Request) -> KeptAnswers:
        """The answers that this client may go on from."""
        return self._kept.setdefault(self._owner(request) or self, KeptAnswers())

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: a prompt, or messages with tools, as tokens."""
        tokens = await self._reader.read(request, lambda body, prompts: _tokens(TokenizeBody.read(body), prompts))
        return json_response({"tokens": tokens, "count": len(tokens)})

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: tokens as a text, special ones too."""
        text = await self._reader.read(
            request, lambda body, prompts: prompts.chat.spell(*DetokenizeBody.read(body).tokens)
        )
        return json_response({"prompt": text})

    # One request.

    async def _serve(self, request: Request, teller: Teller) -> Response:
        order = teller.order
        model = self._adapters.get(order.model) or self._find(request)
        self._check_name(order.model)
        if _needs_scores(order) and (self._scorer is None or order.model in self._adapters):
            raise Refused("this address gives no log-probs but those of sampled tokens", param="logprobs")
        if not order.stream:
            return json_response(await unless_gone(request.receive, self._whole(model, teller, request.scope)))
        events = self._events(model, teller, request.scope)
        first = await unless_gone(request.receive, anext(events))
        return EventStream(events, first, lambda: self._gone(place_of(request)), teller.failed, teller.ends)

    async def _whole(self, model: Model, teller: Teller, scope: Scope) -> Json:
        waited, order = _since_arrival(scope), teller.order
        with self._admission.take(len(order.asks)):
            async with asyncio.TaskGroup() as tasks:
                made = [tasks.create_task(self._choice(model, order, i)) for i in range(len(order.asks))]
        choices = [task.result() for task in made]
        self._note(order, scope, waited, [choice.answer for choice in choices])
        return teller.whole(choices)

    def _note(self, order: AnswerOrder, scope: Scope, waited: float, answers: Sequence[Answer]) -> None:
        prompts = sum(len(answer.prompt_tokens) for answer in answers[:: order.choices])
        self._answered(scope.get("account"), waited, answers, prompts)

    async def _events(self, model: Model, teller: Teller, scope: Scope) -> AsyncGenerator[Json, None]:
        """Events of all choices, in the order in which they come."""
        waited, order = _since_arrival(scope), teller.order
        with self._admission.take(len(order.asks)):
            events: asyncio.Queue[Json | None] = asyncio.Queue()
            working = asyncio.create_task(self._tell_all(model, teller, events))
            try:
                while (event := await events.get()) is not None:
                    yield event
                self._note(order, scope, waited, await working)
            finally:
                await end_tasks(working)

    async def _tell_all(self, model: Model, teller: Teller, events: "asyncio.Queue[Json | None]") -> list[Answer]:
        try:
            async with asyncio.TaskGroup() as tasks:
                made = [tasks.create_task(self._tell(model, teller, i, events)) for i in range(len(teller.order.asks))]
            answers = [task.result() for task in made]
            for event in teller.last(answers):
                events.put_nowait(event)
            return answers
        finally:
            events.put_nowait(None)

    async def _tell(self, model: Model, teller: Teller, index: int, events: "asyncio.Queue[Json | None]") -> Answer:
        order = teller.order
        if order.tool_choice.any or _needs_scores(order) or not order.generates:  # nothing is certain before the end
            choice = await self._choice(model, order, index)
            for event in teller.pieces_of(choice):
                events.put_nowait(event)
            return choice.answer
        telling, late = teller.stream(index), False
        asking = asyncio.current_task()

        def on_tokens(news: Sampled) -> None:
            nonlocal late
            if events.qsize() >= _MOST_WAITING and not late and asking is not None:
                late = asking.cancel()
            for event in telling.add(news) if not late else ():
                events.put_nowait(event)

        try:
            answer = await model.ask(order.asks[index], on_tokens)
        except asyncio.CancelledError:
            if not late:
                raise
            message = f"at most {_MOST_WAITING} events of a stream may wait to be read, got more"
            raise Refused(message, 408, code="too_slow") from None
        finally:
            asking = None  # a task that its own frame holds is freed late
        for event in telling.end(answer):
            events.put_nowait(event)
        return answer

    async def _choice(self, model: Model, order: AnswerOrder, index: int) -> Choice:
        ask = order.asks[index]
        if order.generates:
            answer, unmet = await self._insist(model, ask, order.tool_choice)
        else:
            assert ask.prompt_tokens is not None
            answer, unmet = Answer(ask.prompt_tokens, Sampled(), "length", Turn("")), ""
        return Choice(index, answer, await self._scores(order, answer), unmet)

    async def _insist(
        self, model: Model, ask: Ask, tool_choice: ToolChoice, on_tokens: OnTokens | None = None
    ) -> tuple[Answer, str]:
        """An answer, sampled again until it has the calls that were asked for, and what it still lacks. A greedy
        answer is sampled once, because it would be the same again."""
        answer = await model.ask(ask, on_tokens)
        tries = self._answer_policy.tries if ask.sampling.temperature > 0 else 1
        for number in range(1, tries):
            if not tool_choice.unmet(answer.turn):
                break
            seed = None if ask.seed is None else stream_seed(ask.seed, "again", number)
            answer = await model.ask(replace(ask, id=f"{ask.id}/{number}", seed=seed), on_tokens)
        unmet = tool_choice.unmet(answer.turn)
        if unmet and not self._answer_policy.answer_anyway:
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


def _without(body: Json, names: Sequence[str]) -> Json:
    """A body without some fields; `text.verbosity` is one inside another."""
    for name in names:
        head, _, inside = name.partition(".")
        if inside and isinstance(body.get(head), dict):
            body = {**body, head: _without(body[head], [inside])}
        elif not inside:
            body = {field: value for field, value in body.items() if field != head}
    return body


def _needs_scores(order: AnswerOrder) -> bool:
    """Whether log-probs are wanted that sampling does not give: of the prompt, or of tokens that were not drawn."""
    return order.logprobs and (order.top > 0 or order.echo)


def _since_arrival(scope: Scope) -> float:
    return max(0.0, time.monotonic() - scope["arrived"]) if "arrived" in scope else 0.0


def _is_retry(request: Request) -> bool:
    """OpenAI's clients count their retries in a header."""
    return request.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")


def _tokens(body: TokenizeBody, prompts: PromptReader) -> list[int]:
    if body.prompt is None:
        known = {"messages": body.messages, "tools": body.tools, "control_tokens": body.control_tokens}
        tokens = read_chat(ChatBody.read(known), prompts).asks[0].prompt_tokens
        assert tokens is not None
        return list(tokens)
    begun = prompts.encode_text(body.prompt, body.control_tokens)
    return list(begun if body.add_special_tokens else begun[len(prompts.chat.begin()) :])


Talk = tuple[list[Any], str]
"""Messages, and the response to them."""

_MOST_ITEMS = 1024


class ScoreBody(RequestBody):
    """The body of `POST /v1/score`, in any of its three forms."""

    model: str = ""
    items: list[Any] | None = None
    text_1: str | None = None
    text_2: str | None = None
    messages: Any = None
    response: Any = None
    user: Any = None


class RewardHandlers:
    def __init__(
        self, service: RewardService, name: str, admission: AdmissionControl, reader: RequestReader[None]
    ) -> None:
        self._service, self._name, self._admission, self._reader = service, name, admission, reader

    async def score(self, request: Request) -> Response:
        talks, alone = await self._reader.read(request, lambda body, _: self._talks(ScoreBody.read(body)))
        with self._admission.take(len(talks)):
            work = asyncio.gather(*(self._one(*talk) for talk in talks))
            found = await unless_gone(request.receive, work)
        if alone and "error" in found[0]:
            raise Refused(found[0]["error"])
        rows = [{"index": i, "object": "score", **one} for i, one in enumerate(found)]
        return json_response({"object": "list", "model": self._name, "data": rows})

    def _talks(self, body: ScoreBody) -> tuple[list[Talk], bool]:
        if body.model and body.model != self._name:
            message = f"there is no model {clip(repr(body.model))} here, only {self._name!r}"
            raise Refused(message, 404, param="model")
        return _talks(body)

    async def _one(self, messages: list[Any], response: str) -> dict[str, Any]:
        found = await self._service.score(response, None, {"prompt_messages": messages})
        return {"score": found.components["reward_raw"]} if found.valid else {"error": found.detail}


def reward_routes(handlers: RewardHandlers, counters: Counters) -> list[BaseRoute]:
    async def elsewhere(_: Request) -> Response:
        raise Refused("this server serves a reward model: it answers at /v1/score alone", 404)

    chats = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
    others = (*chats, "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize")
    return [
        Route("/v1/score", endpoint(handlers.score, counters), methods=["POST"]),
        *(Route(path, endpoint(elsewhere, counters), methods=["POST"]) for path in others),
    ]


def _talks(body: ScoreBody) -> tuple[list[Talk], bool]:
    """The answers to score, and whether the body has a single one instead of a list."""
    items = body.items
    if items is not None:
        if not 0 < len(items) <= _MOST_ITEMS:
            raise Refused(f"items must be a list of 1 to {_MOST_ITEMS} objects, got {clip(repr(items))}", param="items")
        return [_talk(item, f"items[{i}]") for i, item in enumerate(items)], False
    if body.text_1 is not None or body.text_2 is not None:
        if body.text_1 is None or body.text_2 is None:
            raise Refused("text_1 and text_2 must both be texts", param="text_1")
        return [([{"role": "user", "content": body.text_1}], body.text_2)], True
    return [_talk({"messages": body.messages, "response": body.response}, "the body")], True


def _talk(item: Any, where: str) -> Talk:
    messages = item.get("messages") if isinstance(item, Mapping) else None
    if not isinstance(messages, list) or not messages:
        raise Refused(f"{where} must have messages, a list, got {clip(repr(messages))}", param="messages")
    if extra := sorted(item.keys() - {"messages", "response"}):
        raise Refused(f"{where}: unknown field {extra[0]!r}", param=extra[0])
    response = item.get("response")
    if response is None:
        last = messages[-1]
        if not isinstance(last, Mapping) or last.get("role") != "assistant" or len(messages) < 2:
            raise Refused(f"{where} must have a response, or end with a message of the assistant", param="response")
        messages, response = messages[:-1], last.get("content")
    if not isinstance(response, str):
        raise Refused(f"{where}: the response must be a text, got {clip(repr(response))}", param="response")
    return messages, response
