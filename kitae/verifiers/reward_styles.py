"""Reward functions as other trainers call them: TRL's, verl's and OpenRLHF's, unchanged.

    trl        f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns)
               → one number or None for each; several functions are added up with their weights
    verl       compute_score(data_source, solution_str, ground_truth, extra_info) → a number, or {"score": …}
    openrlhf   reward_func(queries, prompts, labels) → {"rewards", "scores", "extra_logs"}; or the address of a server

`verifier.style = "trl"` with `verifier.name = "rewards.py:f"` names one; `verifier.name = "trl"` with `verifier.params
= {function = ["rewards.py:f", "rewards.py:g"], weights = [1, 0.5]}` several. Columns are those of the data, which is
read with `data.format = "trl"` or `"verl"` so that none is left out. Functions may be `async def`, or objects that can
be called.

A verifier's process has no trainer and no engine: `trainer_state` refuses to be read, `completion_ids` are the tokens
of the text again (`verifier.params.tokenizer` says of which model), and `environments` are not given.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from kitae.errors import VerifierError
from kitae.plugins import load_function
from kitae.types import Score
from kitae.verifiers.base import Verifier, batched
from kitae.verifiers.given_functions import given_name, is_given, load_given
from kitae.verifiers.verl_scores import score_by_source

Answers = Callable[[Sequence[str], Sequence[Any], Sequence[Mapping[str, Any]]], Any]
"""A verifier of all answers to a prompt: (responses, references, contexts) → a score for each."""

_OURS = ("prompt_messages", "transcript", "prompt", "completion", "completion_ids")  # no columns of the data


def prepare_trl(params: Mapping[str, Any]) -> Verifier:
    names = params["function"]
    names = [names] if isinstance(names, str) else list(names)
    if not names or not all(isinstance(name, str) for name in names):
        raise VerifierError(f"function of 'trl' must be file.py:function, or a list of them, got {names!r}")
    weights = params.get("weights") or [1.0] * len(names)
    if len(weights) != len(names):
        raise VerifierError(f"weights of 'trl' must be one for each of {len(names)} functions, got {len(weights)}")
    functions = {_short(name): _loaded(name) for name in names}
    if len(functions) < len(names):
        raise VerifierError(f"functions of 'trl' must have names of their own, got {', '.join(names)}")
    return _verifier("trl", partial(_trl, functions, weights, _tokenizer(params)))


def _short(name: str) -> str:
    known = given_name(name)
    return name.rpartition(":")[2] if known is None else known.label


def prepare_verl(params: Mapping[str, Any]) -> Verifier:
    function = _loaded(params["function"]) if params.get("function") else score_by_source
    return _verifier("verl", partial(_verl, function, dict(params.get("arguments") or {})))


def prepare_openrlhf(params: Mapping[str, Any]) -> Verifier:
    name = str(params["function"])
    function = partial(_posted, name) if name.startswith("http") else _loaded(name)
    return _verifier("openrlhf", partial(_openrlhf, function, _tokenizer(params)))


def trl(response: str, reference: Any, context: Any, *, function: Any, weights: Any = None, tokenizer: str = "") -> Any:
    """The weighted sum of reward functions that were written for TRL; those that return None are left out."""
    raise AssertionError("prepare makes the verifier")


def verl(response: str, reference: Any, context: Any, *, function: str = "", arguments: Any = None) -> Any:
    """What a compute_score written for verl says; without one, the usual score of the row's data_source."""
    raise AssertionError("prepare makes the verifier")


def openrlhf(response: str, reference: Any, context: Any, *, function: str, tokenizer: str = "") -> Any:
    """What a reward_func written for OpenRLHF says, of a file or of a server."""
    raise AssertionError("prepare makes the verifier")


def _tokenizer(params: Mapping[str, Any]) -> str:
    """The model whose tokens are meant; it is loaded here, before workers are forked."""
    name = str(params.get("tokenizer") or "")
    if name:
        _encoder(name)
    return name


def _verifier(name: str, answers: Answers) -> Verifier:
    @batched
    def score(
        responses: Sequence[str], references: Sequence[Any], contexts: Sequence[Mapping[str, Any]], **_: Any
    ) -> Any:
        return answers(responses, references, contexts)

    return Verifier(name, score, "error", gold=False, batched=True, right_is_one=False)


def _loaded(name: str) -> Callable[..., Any]:
    if is_given(name):
        return load_given(name)
    return load_function(name, "reward function", (), VerifierError)


# TRL.


def _trl(
    functions: Mapping[str, Callable[..., Any]],
    weights: Sequence[float],
    tokenizer: str,
    responses: Sequence[str],
    references: Sequence[Any],
    contexts: Sequence[Mapping[str, Any]],
) -> list[Score | None]:
    log = _Log(len(responses))
    found = [
        _numbers(name, _called(function, **_trl_arguments(responses, contexts, tokenizer, log)), len(responses))
        for name, function in functions.items()
    ]
    return [_sum(functions, weights, [values[i] for values in found], log.of(i)) for i in range(len(responses))]


def _sum(
    names: Mapping[str, Any], weights: Sequence[float], values: Sequence[float | None], logged: Mapping[str, float]
) -> Score | None:
    applied = {name: x for name, x in zip(names, values, strict=True) if x is not None}
    if not applied:
        return None
    total = sum(w * x for w, x in zip(weights, values, strict=True) if x is not None)
    return Score(total, {**logged, **applied})


def _trl_arguments(
    responses: Sequence[str], contexts: Sequence[Mapping[str, Any]], tokenizer: str, log: "_Log"
) -> dict[str, Any]:
    pairs = [_trl_pair(r, c) for r, c in zip(responses, contexts, strict=True)]
    keys = dict.fromkeys(key for c in contexts for key in c if key not in _OURS)
    return {
        "prompts": [prompt for prompt, _ in pairs],
        "completions": [completion for _, completion in pairs],
        "completion_ids": _TokenIds(responses, tokenizer),
        "trainer_state": _Absent("trainer_state"),
        "log_extra": log.extra,
        "log_metric": log.metric,
        **{key: [c.get(key) for c in contexts] for key in keys},
    }


def _trl_pair(response: str, context: Mapping[str, Any]) -> tuple[Any, Any]:
    """Prompt and completion: lists of messages where the prompt of the data is one, or more than a question."""
    prompt = context.get("prompt", context.get("prompt_messages", context.get("question", "")))
    said = context.get("transcript")
    if isinstance(prompt, str) and not said:
        return prompt, response
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    turns = list(said or ())
    first = next((i for i, turn in enumerate(turns) if turn.get("role") == "assistant"), len(turns))
    return prompt, turns[first:] or [{"role": "assistant", "content": response}]


class _Log:
    """What functions note beside their rewards: numbers become components of the scores."""

    def __init__(self, count: int) -> None:
        self._columns: dict[str, Sequence[Any]] = {}
        self._count = count

    def extra(self, column: str, values: Sequence[Any]) -> None:
        self._columns[column] = list(values)

    def metric(self, name: str, value: float) -> None:
        self._columns[name] = [value] * self._count

    def of(self, index: int) -> dict[str, float]:
        rows = {name: values[index] for name, values in self._columns.items() if index < len(values)}
        return {name: float(x) for name, x in rows.items() if isinstance(x, int | float) and math.isfinite(x)}


class _Absent:
    """Something of a trainer that a verifier's process has not."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, key: str) -> Any:
        raise VerifierError(f"{self._name}.{key} is not known where answers are judged")


class _TokenIds(Sequence[list[int]]):
    """The tokens of each response, when somebody looks."""

    def __init__(self, responses: Sequence[str], tokenizer: str) -> None:
        self._responses, self._tokenizer = responses, tokenizer

    def __len__(self) -> int:
        return len(self._responses)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return _encoder(self._tokenizer)(self._responses[index], add_special_tokens=False)["input_ids"]


@cache
def _encoder(model: str) -> Any:
    if not model:
        raise VerifierError("tokens need verifier.params.tokenizer, the model whose tokens they are")
    from transformers import AutoTokenizer

    from kitae.models.load import find_model

    return AutoTokenizer.from_pretrained(str(find_model(model)))


# verl and OpenRLHF.


def _verl(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    responses: Sequence[str],
    references: Sequence[Any],
    contexts: Sequence[Mapping[str, Any]],
) -> list[Any]:
    found = []
    for response, reference, context in zip(responses, references, contexts, strict=True):
        info = {"num_turns": None, "rollout_reward_scores": {}, **(context.get("extra_info") or {})}
        given = {"data_source": context.get("data_source"), "solution_str": response, "ground_truth": reference}
        result = _called(function, **given, extra_info=info, **arguments)
        found.append(result[0] if isinstance(result, tuple) else result)
    return found


def _openrlhf(
    function: Callable[..., Any],
    tokenizer: str,
    responses: Sequence[str],
    references: Sequence[Any],
    contexts: Sequence[Mapping[str, Any]],
) -> list[Any]:
    prompts = [_prompt_text(c, tokenizer) for c in contexts]
    queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    found = _called(function, queries=queries, prompts=prompts, labels=list(references))
    if not isinstance(found, Mapping):
        found = {"rewards": found}
    if "rewards" not in found:
        raise VerifierError(f"a reward_func must return 'rewards', got the keys {', '.join(map(str, found))}")
    count = len(responses)
    rewards = _numbers("reward_func", found["rewards"], count)
    logs = {name: _numbers(name, values, count) for name, values in (found.get("extra_logs") or {}).items()}
    if found.get("scores") is not None:
        logs["score"] = _numbers("scores", found["scores"], count)
    noted = [{name: x for name, xs in logs.items() if (x := xs[i]) is not None} for i in range(count)]
    return [None if r is None else Score(r, noted[i]) for i, r in enumerate(rewards)]


def _prompt_text(context: Mapping[str, Any], tokenizer: str) -> str:
    """As the template of the model writes it, where the tokenizer is named; else the contents of the messages."""
    question = str(context.get("question", ""))
    messages = context.get("prompt_messages") or [{"role": "user", "content": question}]
    if tokenizer:
        text: str = _encoder(tokenizer).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text
    return "\n".join(str(message.get("content") or "") for message in messages)


def _posted(address: str, *, queries: list[str], prompts: list[str], labels: list[Any]) -> Any:
    import httpx

    answer = httpx.post(address, json={"query": queries, "prompts": prompts, "labels": labels}, timeout=180.0)
    answer.raise_for_status()
    return answer.json()


# Of all.


def _called(function: Callable[..., Any], **given: Any) -> Any:
    """Call with what the function takes of it: all, where it takes anything."""
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        given = {p.name: given[p.name] for p in parameters if p.name in given}
    result = function(**given)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def _numbers(name: str, values: Any, count: int) -> list[float | None]:
    """One number or None for each answer, of a list, an array or a tensor."""
    values = values.tolist() if hasattr(values, "tolist") else values
    values = [values] if isinstance(values, int | float) else values
    if not isinstance(values, Sequence) or len(values) != count:
        got = len(values) if isinstance(values, Sequence) else repr(values)[:100]
        raise VerifierError(f"{name} must return one reward for each of {count} answers, got {got}")
    plain = [value.item() if hasattr(value, "item") else value for value in values]
    return [None if x is None or (isinstance(x, float) and math.isnan(x)) else float(x) for x in plain]
