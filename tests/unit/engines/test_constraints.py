"""Constraints are enforced: every answer that is not cut matches, whatever else is asked of it."""

import asyncio
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from test_exact import TinyPolicy, gap, generate, requests, to_samples

from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.constraint import Constraint
from kitae.engines.native.engine import NativeEngine
from kitae.errors import RequestError
from kitae.kept_sets import ids_of
from kitae.models.policy import Policy

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
    },
    "required": ["ok", "n", "tags"],
    "additionalProperties": False,
}


def fits(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


PATTERN = "[ab]{2,5}(-[0-9]{1,3})?"
TEXTS = ["yes", "no", 'say "maybe"\n']
CASES: list[tuple[Constraint, Callable[[str], bool]]] = [
    (Constraint.schema(SCHEMA), fits),
    (Constraint("regex", PATTERN), lambda text: re.fullmatch(PATTERN, text) is not None),
    (Constraint.choice(TEXTS), lambda text: text in TEXTS),
    (
        Constraint("grammar", 'start: "(" start ")" | "x"{1,3}'),
        lambda text: re.fullmatch(r"\(*x{1,3}\)*", text) is not None and text.count("(") == text.count(")"),
    ),
]


def asked(policy: Policy, **sampling: Any) -> list[Request]:
    """Requests of `requests`, each with a constraint in turn, but for every fifth."""
    found = []
    for i, r in enumerate(requests(5)):
        constraint = None if i % 5 == 4 else CASES[i % len(CASES)][0]
        settings = SamplingParams(
            0.8, 96, stop_tokens=(policy.tokenizer.eos_token_id,), constraint=constraint, **sampling
        )
        found.append(Request(r.id, r.prompt_tokens, settings, r.seed, r.share, keeps=True))
    return found


def matching(policy: Policy, asked: list[Request], done: list[Completion]) -> int:
    """The number of answers that were not cut; each of them matches."""
    ended = 0
    for request, answer in zip(asked, done, strict=True):
        constraint = request.sampling.constraint
        if constraint is None or answer.finish == "length":
            continue
        own = answer.tokens[:-1] if answer.tokens[-1] in request.sampling.stop_tokens else answer.tokens
        text = policy.tokenizer.decode(own)
        assert dict(CASES)[constraint](text), f"{constraint} was not met by {text!r}"
        ended += 1
    return ended


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8, "top_k": 50}, {"frequency_penalty": 0.0, "min_p": 0.02}])
@pytest.mark.parametrize(("exact", "lora"), [(True, 0), (False, 4)])
def test_answers_match_and_the_trainer_knows_the_masks(
    exact: bool, lora: int, settings: dict[str, Any], tiny_policy: TinyPolicy
) -> None:
    policy = tiny_policy("llama", exact=exact, lora_rank=lora)
    wanted = asked(policy, **settings)
    done, _ = generate(policy, wanted)
    assert matching(policy, wanted, done) >= 8
    for r, c in zip(wanted, done, strict=True):
        assert (c.kept is not None) == (r.sampling.constraint is not None or bool(settings))
        for token, words in zip(c.tokens, c.kept or (), strict=False):
            assert words is None or token in ids_of(words, policy.vocabulary)
    assert gap(policy, to_samples(wanted, done)) <= (0.0 if exact else 1e-4)


def test_drafts_and_batches_change_no_answer(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama", exact=True)
    wanted = asked(policy)

    def answers(which: list[Request], **settings: Any) -> dict[str, Completion]:
        return {c.id: c for c in generate(policy, which, **settings)[0]}

    together = answers(wanted)
    assert answers(wanted, speculation=False) == together
    assert answers(wanted, max_batch=2) == together
    assert answers(wanted[:1]) == {wanted[0].id: together[wanted[0].id]}, "alone, with the most drafts"


def use(policy: Policy, request: Request) -> Completion:
    async def run() -> Completion:
        engine = NativeEngine(policy, EngineConfig(memory_gb=0.01))
        try:
            return await engine.generate(request)
        finally:
            await engine.close()

    return asyncio.run(run())


def request(constraint: Constraint, **sampling: Any) -> Request:
    return Request("a", (5, 6), SamplingParams(1.0, 40, constraint=constraint, **sampling), 1)


def test_without_stop_tokens_it_ends_where_nothing_can_follow(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama")
    done = use(policy, request(Constraint.choice(["yes", "no"])))
    assert done.finish == "stop" and policy.tokenizer.decode(done.tokens) in ("yes", "no")
    greedy = Request("a", (5, 6), SamplingParams(0.0, 40, constraint=Constraint.choice(["yes", "no"])), 1)
    assert policy.tokenizer.decode(use(policy, greedy).tokens) in ("yes", "no")


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json_schema", '{"type": "nothing"}'),
        Constraint("regex", "(a"),
        Constraint("grammar", "start: other"),
    ],
)
def test_a_constraint_that_means_nothing_is_refused(constraint: Constraint, tiny_policy: TinyPolicy) -> None:
    with pytest.raises(RequestError, match=f"constraint {constraint.kind}: "):
        use(tiny_policy("llama"), request(constraint))


def test_without_the_library_it_is_refused(tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'kitae\[constraints\]'"):
        use(tiny_policy("llama"), request(Constraint.choice(["yes"])))
