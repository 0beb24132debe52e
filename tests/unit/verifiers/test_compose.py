from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.errors import VerifierError
from kitae.types import Score
from kitae.verifiers.base import Verifier
from kitae.verifiers.compose import Composition
from kitae.verifiers.response_shape import tags
from kitae.verifiers.verifier_registry import VERIFIERS, resolve

compose = Composition(resolve)
GOOD = "<think>2 + 2</think><answer>4</answer>"
FORMAT_FIRST: list[dict[str, Any]] = [
    {"name": "tags", "weight": 0.2, "gate": 1.0, "params": {"names": "think answer", "partial": True}},
    {"name": "exact", "weight": 0.8, "inside": "answer"},
]

USER_FILE = """
from kitae.types import Score

def half(response, reference, context, *, scale=1.0):
    return 0.5 * scale

def raises(response, reference, context):
    raise KeyError("no such thing")

def refuses(response, reference, context):
    return Score.error("the judge does not answer")

async def waits(response, reference, context):
    return Score(0.25)

def huge(response, reference, context):
    return Score(7.0, {"size": 7.0})
"""


@pytest.fixture(autouse=True)
def known_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    example = ("<think>a</think><answer>b</answer>", None)
    monkeypatch.setitem(VERIFIERS, "tags", Verifier("tags", tags, on_timeout="wrong", example=example))
    monkeypatch.setitem(VERIFIERS, "compose", Verifier("compose", compose, on_timeout="error"))


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(USER_FILE)
    return str(tmp_path / "mine.py")


def test_weighted_sum_with_components() -> None:
    score = compose(GOOD, "4", {}, parts=FORMAT_FIRST)
    assert score.value == pytest.approx(1.0)
    assert score.components == {
        "tags": 1.0,
        "tags/once": 1.0,
        "tags/order": 1.0,
        "tags/filled": 1.0,
        "tags/alone": 1.0,
        "exact": 1.0,
    }


@pytest.mark.parametrize(
    ("response", "value", "closed"),
    [
        (GOOD, 1.0, False),
        ("<think>2 + 2</think><answer>5</answer>", 0.2, False),
        ("<answer>4</answer>", 0.2 * 0.5, True),
        ("4", 0.0, True),
        ("", 0.0, True),
    ],
)
def test_gate(response: str, value: float, closed: bool) -> None:
    score = compose(response, "4", {}, parts=FORMAT_FIRST)
    assert score.value == pytest.approx(value) and score.valid
    assert ("gate 'tags' is closed" in score.detail) is closed
    assert score.components["exact"] == (0.0 if closed else float("4<" in response))


def test_a_closed_gate_does_not_run_what_follows(mine: str) -> None:
    parts = [{"name": "tags", "gate": 1}, {"name": f"{mine}:raises"}]
    assert compose("no tags", None, {}, parts=parts).value == 0
    assert not compose(GOOD, None, {}, parts=parts).valid


def test_a_gate_is_compared_after_clipping(mine: str) -> None:
    parts = [{"name": f"{mine}:huge", "clip": [0, 1], "gate": 2}, {"name": "exact"}]
    assert compose("4", "4", {}, parts=parts).components == {"huge": 1.0, "huge/size": 7.0, "exact": 0.0}


def test_negative_and_zero_weights(mine: str) -> None:
    parts = [{"name": "exact"}, {"name": f"{mine}:half", "weight": -1}, {"name": "number", "weight": 0}]
    score = compose("4", "4", {}, parts=parts)
    assert score.value == 0.5 and score.components == {"exact": 1.0, "half": 0.5, "number": 1.0}


@pytest.mark.parametrize(
    ("clip", "value"), [(None, 8.0), ([0, 1], 1.0), ([0, 7.5], 7.5), ([9, 10], 9.0), ([2, 2], 2.0)]
)
def test_clip(mine: str, clip: Any, value: float) -> None:
    assert compose("4", "4", {}, parts=[{"name": "exact"}, {"name": f"{mine}:huge"}], clip=clip).value == value


def test_weight_is_1_by_default_and_params_reach_the_part(mine: str) -> None:
    parts = [{"name": f"{mine}:half", "params": {"scale": 3}}, {"name": "exact", "params": {"ignore_case": True}}]
    assert compose("YES", "yes", {}, parts=parts).value == 2.5


@pytest.mark.parametrize(
    ("function", "message"),
    [("raises", "part 'raises': KeyError: 'no such thing' (mine.py:"), ("refuses", "the judge")],
)
def test_an_error_of_a_part_is_an_error_of_the_whole(mine: str, function: str, message: str) -> None:
    score = compose("4", "4", {}, parts=[{"name": "exact"}, {"name": f"{mine}:{function}"}])
    assert not score.valid and message in score.detail


def test_a_part_may_wait_for_a_server(mine: str) -> None:
    assert compose("4", "4", {}, parts=[{"name": "exact"}, {"name": f"{mine}:waits"}]).value == 1.25


def test_the_same_verifier_twice_needs_labels() -> None:
    parts = [{"name": "exact", "label": "strict"}, {"name": "exact", "params": {"ignore_case": True}, "weight": 0.5}]
    assert compose("Yes", "yes", {}, parts=parts) == Score(0.5, {"strict": 0.0, "exact": 1.0})


def test_nested() -> None:
    inner = {"parts": [{"name": "exact"}, {"name": "number"}], "clip": [0, 1]}
    score = compose("4", "4", {}, parts=[{"name": "compose", "label": "any", "params": inner}])
    assert score == Score(1.0, {"any": 1.0, "any/exact": 1.0, "any/number": 1.0})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (None, "must be a list of tables with a name, got None"),
        ([], "must be a list of tables with a name, got []"),
        ({"name": "exact"}, "must be a list of tables"),
        (["exact"], "part 1 of 'compose' must be a table with a name, got 'exact'"),
        ([{"weight": 1}], "part 1 of 'compose' must be a table with a name"),
        ([{"name": "exact"}, {"name": "exakt"}], "part 2 (exakt) of 'compose': a verifier is one of"),
        ([{"name": "exakt"}], "did you mean 'exact'?"),
        (
            [{"name": "exact", "wieght": 1}],
            "has no key 'wieght'; it takes name, label, weight, gate, clip, inside, params",
        ),
        ([{"name": "exact", "wieght": 1}], "did you mean 'weight'?"),
        ([{"name": "exact", "weight": "1"}], "weight of part 1 (exact) of 'compose' must be a number, got '1'"),
        ([{"name": "exact", "weight": True}], "must be a number, got True"),
        ([{"name": "exact", "weight": float("nan")}], "must be a number, got nan"),
        ([{"name": "exact", "weight": 0}], "must have a weight that is not 0, got none"),
        ([{"name": "exact", "gate": "high"}], "gate of part 1 (exact) of 'compose' must be a number, got 'high'"),
        (
            [{"name": "exact", "params": {"ignorecase": True}}],
            "part 1 (exact) of 'compose': params of verifier 'exact'",
        ),
        ([{"name": "exact", "params": []}], "must be a table, got []"),
        ([{"name": "exact", "clip": [1, 0]}], "clip of part 1 (exact) of 'compose' must begin with the lower value"),
        ([{"name": "exact", "clip": [1]}], "must be a list of the lowest and the highest value, got [1]"),
        ([{"name": "exact", "label": "a/b"}], "must be a text without '/', got 'a/b'"),
        ([{"name": "exact", "label": ""}], "must be a text without '/', got ''"),
        ([{"name": "exact", "inside": 3}], "must be the name of a tag, got 3"),
        ([{"name": "exact"}, {"name": "exact"}], "must differ, got 'exact' twice; set label"),
        ([{"name": "nowhere.py:f"}], "must exist, got 'nowhere.py'"),
        (
            [{"name": "compose", "params": {"parts": [{"name": "exakt"}]}}],
            "part 1 (compose) of 'compose': part 1 (exakt)",
        ),
        ([{"name": "compose"}], "missing a required"),
        (object(), "must be plain values"),
    ],
)
def test_bad_parts(parts: Any, message: str) -> None:
    with pytest.raises(VerifierError) as caught:
        compose.plan(parts)
    assert message in str(caught.value)
    with pytest.raises(VerifierError):
        compose.prepare({"parts": parts})
    score = compose("4", "4", {}, parts=parts)
    assert not score.valid and message in score.detail


@pytest.mark.parametrize("clip", [[1, 0], 1, [1, 2, 3], ["a", "b"], [0, float("inf")]])
def test_bad_clip(clip: Any) -> None:
    with pytest.raises(VerifierError, match="clip of 'compose'"):
        compose.plan([{"name": "exact"}], clip)


def test_prepare_proves_the_params_of_the_parts() -> None:
    with pytest.raises(VerifierError, match=r"part 'tags' of 'compose' must score its example, got names must be"):
        compose.prepare({"parts": [{"name": "tags", "params": {"names": "1 2"}}]})
    prepared = compose.prepare({"parts": FORMAT_FIRST})
    assert prepared.score(GOOD, "4", {}) == compose(GOOD, "4", {}, parts=FORMAT_FIRST)


def test_what_a_timeout_means(mine: str) -> None:
    assert compose.prepare({"parts": FORMAT_FIRST}).on_timeout == "wrong"
    assert compose.prepare({"parts": [*FORMAT_FIRST, {"name": f"{mine}:half"}]}).on_timeout == "error"


@settings(max_examples=100, deadline=None)
@given(response=st.text() | st.text("<>/thinkanswer 4"), reference=st.text())
def test_never_raises(response: str, reference: str) -> None:
    score = compose(response, reference, {}, parts=FORMAT_FIRST)
    assert score.valid and 0 <= score.value <= 1
