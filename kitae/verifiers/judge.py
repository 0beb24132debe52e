r"""Verifiers that query another model over HTTP: `judge` has a chat model grade a response, `reward_model` a scoring
one.

Both are coroutines: they wait for a server, so many can run at once in one event loop and need no worker process. A
server that cannot be reached, or that returns no grade, makes an error, never a 0.

What prevents a response from grading itself:
- It stands in a block marked with a hash of everything that is graded. A response cannot contain its own hash, so it
cannot close its block.
- What tokenizers may turn into control tokens (<|im_end|>, <eos>, [INST] and whatever has their form) is broken up in
it.
- The instructions for the verdict come after it and require the mark. Only a verdict with the mark counts, the last
one, in the judge's own message, after its reasoning; scores without it, in JSON or in prose, are never read.
Not covered: a judge that is talked into a high grade. Read samples of what it rewards.
"""

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kitae.clients.http_client import ask
from kitae.clients.service import Service
from kitae.errors import RemoteError, VerifierError
from kitae.types import TURN, Score
from kitae.verifiers.base import batched
from kitae.verifiers.judge_texts import (
    EXCERPT,
    LONGEST_REASON,
    PARTIAL_RUBRICS,
    PLACES,
    RUBRICS,
    Grade,
    answer_text,
    as_number,
    judge_messages,
    mark_for,
    merged,
    read_verdict,
    text_parts,
)
from kitae.verifiers.options import service_options


@service_options()
async def judge(
    response: str,
    reference: Any,
    context: Mapping[str, Any],
    *,
    base_url: str,
    model: str,
    key_env: str = "OPENAI_API_KEY",
    rubric: str = "reference",
    question_key: str = "question",
    scale_min: float = 0.0,
    scale_max: float = 10.0,
    out_of_range: str = "error",
    temperature: float = 0.0,
    max_tokens: int = 1024,
    max_input_tokens: int = 16_000,
    votes: int = 1,
    extra: str = "",
    **options: Any,
) -> Score:
    """The grade that a chat model at an OpenAI-compatible endpoint gives, with its scale mapped to 0…1.

    rubric: a key of `RUBRICS`, or a text with {response} and, if it likes, {question} and {reference}. The question is
    `context[question_key]`; only the rubric "reference" does without. "points" asks for each criterion apart: the
    reference is a list of `{"criterion": "names a source", "points": 2}`, and the score is the share of the points
    that can be had; negative points are for faults. "turn" asks for each turn of an episode apart: the score is the
    mean, and each turn has its share as its reward (component turn/0, …). votes: how often each question is asked, with
    seeds 0, 1, …: the mean counts, so it needs a temperature. out_of_range: what a grade off the scale means,
    "error" or "clip". max_input_tokens: of question, reference and response together, counted as three bytes each, of
    which question and reference may take a quarter; what is longer loses its middle. extra: a JSON object that is
    merged into the request, where null takes a field out: OpenAI's reasoning models need
    `{"max_tokens": null, "max_completion_tokens": 2048, "temperature": null}`. The options after it are `Service`'s.
    """
    try:
        service = Service(base_url=base_url, model=model, key_env=key_env, **options)
        scale = _scale(scale_min, scale_max, out_of_range)
        if votes < 1 or (votes > 1 and not temperature):
            raise VerifierError(f"votes must be at least 1, and several need a temperature, got {votes}")
        body = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        grader = Grader(service, body, rubric, scale, (scale_min, scale_max), votes, max_input_tokens, extra)
        given = {"question": context.get(question_key), "reference": reference, "response": response}
        if rubric == "points":
            return await _points(grader, given)
        if rubric == "turn":
            return await _turns(grader, context)
        raw, reason = await grader.grade(given)
        value = scale(raw)
    except (VerifierError, RemoteError) as error:
        return Score.error(f"judge: {error}")
    return Score(value, {"judge": value, "judge_raw": raw}, detail=reason)


@dataclass(frozen=True, slots=True)
class Grader:
    """A judge with a rubric: `await Grader(…).grade({"question": "2 + 2", "response": "4"})` → `Grade(10.0, …)`."""

    service: Service
    body: Mapping[str, Any]
    rubric: str
    scale: Callable[[float], float]
    limits: tuple[float, float]
    votes: int
    max_input_tokens: int
    extra: str

    async def grade(self, given: Mapping[str, Any]) -> Grade:
        """The mean of the votes, with the reason of the first."""
        template = {**RUBRICS, **PARTIAL_RUBRICS}.get(self.rubric, self.rubric)
        places = set(PLACES.findall(template))
        if "other" in places and "other" not in given:
            raise VerifierError(f"a rubric with {{other}} is for the verifier 'judge_pairs', got {self.rubric[:100]!r}")
        if "response" not in places:
            known = ", ".join((*RUBRICS, "points", "turn"))
            raise VerifierError(f"rubric must be {known} or a text with {{response}}, got {self.rubric[:100]!r}")
        parts = text_parts(given, places, {"question"} if self.rubric == "reference" else set(), self.max_input_tokens)
        mark, (low, high) = mark_for(parts), self.limits

        def read(answer: Any) -> Grade:
            text, complete = answer_text(answer)
            verdict = read_verdict(text, low, high, mark)
            if verdict is None:
                cut = "" if complete else ", cut off at max_tokens"
                raise VerifierError(f"the judge must give a score with the mark, got {text[-EXCERPT:]!r}{cut}")
            self.scale(verdict.raw)  # a grade outside the scale is not cached either
            return verdict

        body = {**self.body, "messages": judge_messages(template, parts, mark, low, high)}
        asked = [body] if self.votes == 1 else [{**body, "seed": seed} for seed in range(self.votes)]
        paths = [ask(self.service, "/chat/completions", merged(one, self.extra), read) for one in asked]
        grades = await asyncio.gather(*paths)
        return Grade(sum(raw for raw, _ in grades) / len(grades), grades[0][1])  # a cached one is a list

    async def values(self, given: Sequence[Mapping[str, Any]]) -> list[float]:
        """Several at once, mapped to 0…1."""
        return [self.scale(raw) for raw, _ in await asyncio.gather(*map(self.grade, given))]


async def _points(grader: Grader, given: Mapping[str, Any]) -> Score:
    criteria = given["reference"]
    whole = isinstance(criteria, list) and all(
        isinstance(c, dict) and {"criterion", "points"} <= set(c) for c in criteria
    )
    if not whole or not any(_points_of(c) > 0 for c in criteria):
        raise VerifierError(
            f'the reference must be a list of {{"criterion": …, "points": …}}, with points to be had, got {criteria!r}'
        )
    met = await grader.values([{**given, "reference": c["criterion"]} for c in criteria])
    earned = sum(_points_of(c) * share for c, share in zip(criteria, met, strict=True))
    value = min(max(earned / sum(max(0.0, _points_of(c)) for c in criteria), 0.0), 1.0)
    told = "; ".join(f"{share:g} × {c['points']} {c['criterion']}" for c, share in zip(criteria, met, strict=True))
    return Score(value, {"judge": value, "points": earned}, detail=told[:LONGEST_REASON])


def _points_of(criterion: Mapping[str, Any]) -> float:
    points = criterion["points"]
    if isinstance(points, bool) or not isinstance(points, int | float) or not math.isfinite(points):
        raise VerifierError(f"points must be a number, got {points!r}")
    return float(points)


async def _turns(grader: Grader, context: Mapping[str, Any]) -> Score:
    transcript = context.get("transcript") or []
    places = [i for i, message in enumerate(transcript) if message["role"] == "assistant"]
    if not places:
        raise VerifierError("the rubric 'turn' is for episodes with turns, got one without a transcript")
    said = [f"{m['role']}: {m['content']}" for m in transcript]
    given = [
        {"question": "\n\n".join(said[:i]), "reference": None, "response": transcript[i]["content"]} for i in places
    ]
    shares = [value / len(places) for value in await grader.values(given)]
    return Score(sum(shares), {"judge": sum(shares)} | {f"{TURN}{n}": share for n, share in enumerate(shares)})


@batched
@service_options()
async def judge_pairs(
    responses: Sequence[str],
    references: Sequence[Any],
    contexts: Sequence[Mapping[str, Any]],
    *,
    base_url: str,
    model: str,
    key_env: str = "OPENAI_API_KEY",
    rubric: str = "better",
    question_key: str = "question",
    temperature: float = 0.0,
    max_tokens: int = 1024,
    max_input_tokens: int = 16_000,
    votes: int = 1,
    extra: str = "",
    **options: Any,
) -> list[Score]:
    """Each answer of a group against the next one, both ways round, so that what stands first has no advantage: the
    mean share of its four comparisons. An answer that is alone is compared with the reference.

    rubric: "better", or a text with {response}, {other} and {question}. The other options are those of `judge`.
    """
    size = len(responses)
    others = [responses[(i + 1) % size] if size > 1 else references[0] for i in range(size)]
    try:
        service = Service(base_url=base_url, model=model, key_env=key_env, **options)
        body = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        grader = Grader(service, body, rubric, _scale(0, 10, "error"), (0, 10), votes, max_input_tokens, extra)
        pairs = [
            {"question": c.get(question_key), "reference": None, "response": one, "other": other}
            for r, o, c in zip(responses, others, contexts, strict=True)
            for one, other in ((r, o), (o, r))
        ]
        found = await grader.values(pairs)
    except (VerifierError, RemoteError) as error:
        return [Score.error(f"judge_pairs: {error}")] * size
    wins = [(found[2 * i] + 1 - found[2 * i + 1]) / 2 for i in range(size)]  # of each against the next
    shares = [(wins[i] + 1 - wins[i - 1]) / 2 for i in range(size)] if size > 1 else wins
    return [Score(share, {"judge": share}) for share in shares]


@service_options()
async def reward_model(
    response: str,
    reference: Any,
    context: Mapping[str, Any],
    *,
    model: str,
    base_url: str = "",
    device: str = "auto",
    dtype: str = "auto",
    threads: int = 1,
    key_env: str = "",
    style: str = "pooling",
    index: int = -1,
    template: str = "",
    question_key: str = "question",
    center: float = 0.0,
    spread: float = 1.0,
    squash: str = "none",
    clip: float = 0.0,
    max_input_tokens: int = 16_000,
    extra: str = "",
    **options: Any,
) -> Score:
    """The number that a reward model gives, as (number − center) / spread; squash "sigmoid" then maps it to 0…1.

    Without a base_url, model is a folder or a run, and runs in a process beside this one: see `rewards`. With one, how
    its server is spoken to is what style says:

        pooling    POST /pooling    a chat, or a text       → data[0].data      vLLM, reward models
        classify   POST /classify   a chat, or a text       → data[0].probs     vLLM, SGLang (under /v1)
        score      POST /score      question and response   → data[0].score     vLLM, models of pairs
        sglang     POST /classify   a text                  → [0].embedding     SGLang, reward models
        kitae      POST /score      messages and response   → data[0].score     `kitae serve REWARD_MODEL`
        plain      POST base_url    {model, question, reference, response} → score or reward: a server of your own

    index: which number, where there are several (classes, or tokens: the last one is the whole text's). template: the
    text, with {question}, {reference} and {response} in it; "" sends a chat where the style knows chats, so that the
    server's chat template is used, and else the question, an empty line and the response. clip: numbers beyond ±clip
    are cut off there, last of all; 0: none are.
    """
    try:
        service = Service(base_url=base_url, model=model, key_env=key_env, **options)
        value_of = mapped_reward(center, spread, squash, clip)
        pick: Callable[[Any], Any] = _first_score
        if style == "kitae":
            path, body = "/score", _talk_for_kitae(response, context, question_key, template)
        else:
            places = set(PLACES.findall(template)) if template else {"question", "response"}
            if "response" not in places:
                raise VerifierError(f"template must be a text with {{response}}, got {template[:100]!r}")
            optional = {"reference"} if style == "plain" else set()
            given = {"question": context.get(question_key), "reference": reference, "response": response}
            parts = text_parts(given, places | optional, optional, max_input_tokens)
            path, body, pick = _adapter(style, parts, template)
        raw = await ask(service, path, merged({"model": model, **body}, extra), lambda got: _reward(got, pick, index))
        value = value_of(raw)
    except (VerifierError, RemoteError) as error:
        return Score.error(f"reward_model: {error}")
    return Score(value, {"reward_model": value, "reward_raw": raw})


def _scale(low: float, high: float, out_of_range: str) -> Callable[[float], float]:
    """A function from a grade to 0…1."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise VerifierError(f"scale_min must be below scale_max, got {low} and {high}")
    if out_of_range not in ("error", "clip"):
        raise VerifierError(f"out_of_range must be error or clip, got {out_of_range!r}")

    def scale(raw: float) -> float:
        if not low <= raw <= high and out_of_range == "error":
            raise VerifierError(f"a score must be from {low:g} to {high:g}, got {raw:g}")
        return min(max((raw - low) / (high - low), 0.0), 1.0)

    return scale


def mapped_reward(center: float, spread: float, squash: str, clip: float) -> Callable[[float], float]:
    """A function from a reward model's output to a score."""
    if not spread > 0:
        raise VerifierError(f"spread must be above 0, got {spread}")
    if squash not in ("none", "sigmoid"):
        raise VerifierError(f"squash must be none or sigmoid, got {squash!r}")
    if not clip >= 0:
        raise VerifierError(f"clip must be at least 0, got {clip}")

    def value(raw: float) -> float:
        shifted = (raw - center) / spread
        if not math.isfinite(shifted):
            raise VerifierError(f"a reward must be finite, got {raw:g} with center {center:g} and spread {spread:g}")
        squashed = shifted if squash == "none" else 0.5 + 0.5 * math.tanh(shifted / 2)  # a sigmoid without overflow
        return min(max(squashed, -clip), clip) if clip else squashed

    return value


def _adapter(style: str, parts: Mapping[str, str], template: str) -> tuple[str, dict[str, Any], Callable[[Any], Any]]:
    """How to query a style of server: the path, the body, and a reader of the numbers in its answer."""
    chat = [{"role": "user", "content": parts["question"]}, {"role": "assistant", "content": parts["response"]}]
    text = PLACES.sub(lambda place: parts[place[1]], template or "{question}\n\n{response}")
    either: dict[str, Any] = {"input": text} if template else {"messages": chat}
    match style:
        case "pooling":
            return "/pooling", either, lambda got: got["data"][0]["data"]
        case "classify":
            return "/classify", either, lambda got: got["data"][0]["probs"]
        case "score":
            pair = {"text_1": parts["question"], "text_2": parts["response"]}
            return "/score", pair, _first_score
        case "sglang":
            return "/classify", {"text": text}, lambda got: (got[0] if isinstance(got, list) else got)["embedding"]
        case "plain":
            return "", dict(parts), lambda got: got["score"] if "score" in got else got["reward"]
    raise VerifierError(f"style must be pooling, classify, score, sglang, kitae or plain, got {style!r}")


def talk_of(response: str, context: Mapping[str, Any], question_key: str) -> dict[str, Any]:
    """The conversation to score: all turns of an episode, else the prompt as the model saw it, else the question."""
    if transcript := context.get("transcript"):
        turns = [i for i, turn in enumerate(transcript) if turn["role"] == "assistant"]
        if turns:
            return {"messages": transcript[: turns[-1]], "response": transcript[turns[-1]]["content"]}
    messages, question = context.get("prompt_messages"), context.get(question_key)
    if not messages and not (isinstance(question, str) and question):
        raise VerifierError(f"the question must be a text in the context, under question_key, got {question!r}")
    return {"messages": messages or [{"role": "user", "content": question}], "response": response}


def _talk_for_kitae(response: str, context: Mapping[str, Any], question_key: str, template: str) -> dict[str, Any]:
    """The body for Kitae's server, which renders the conversation as in training and refuses what is too long."""
    if template:
        raise VerifierError(f"template must be empty with style kitae: the server has its own, got {template[:100]!r}")
    return talk_of(response, context, question_key)


def _first_score(answer: Any) -> Any:
    return answer["data"][0]["score"]


def _reward(answer: Any, pick: Callable[[Any], Any], index: int) -> float:
    """The number in an answer; in a list, or a list of lists, the one at `index`."""
    try:
        found = pick(answer)
        while isinstance(found, list):
            found = found[0] if len(found) == 1 else found[index]
    except (LookupError, TypeError):
        found = None
    number = None if isinstance(found, bool | str) else as_number(found, 0, 1)
    if number is None:
        raise VerifierError(f"the reward model must answer with a number, got {json.dumps(answer)[:EXCERPT]}")
    return number
