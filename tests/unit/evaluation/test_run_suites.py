"""Whole evaluations of tiny models: kept, gone on with, compared; and their tables."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kitae.cli.eval import as_markdown, notes, results
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.errors import ConfigError, ModelError
from kitae.evaluation import run_suites
from kitae.evaluation.measure import Evaluation
from kitae.evaluation.run_suites import (
    Entrant,
    EvaluationReport,
    EvaluationSettings,
    EvaluationWatcher,
    evaluate_models,
)
from kitae.evaluation.suites import Scoring, Suite, find_suites
from kitae.models.config import ModelConfig
from kitae.rl.config import EvalConfig

pytestmark = pytest.mark.usefixtures("warm_verifiers")

SAMPLED = EvaluationSettings(EvalConfig(samples=2, temperature=1.0))


class Heard(EvaluationWatcher):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.asks: list[tuple[str, str, int, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def asked(self, model: str, suite: str, done: int, total: int) -> None:
        self.asks.append((model, suite, done, total))


@pytest.fixture(scope="module")
def entrants(tiny_folder: Callable[[str], Path]) -> list[Entrant]:
    kinds = ("llama", "qwen3")
    return [Entrant(kind, ModelConfig(path=str(tiny_folder(kind)), dtype="float32", device="cpu")) for kind in kinds]


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> list[Suite]:
    """A suite with two scorings, judged by a function that any model satisfies now and then, and a generated one."""
    folder = tmp_path_factory.mktemp("suites")
    path = folder / "judge.py"
    path.write_text(
        "def score(response, reference, context, *, most=0):\n    return float(len(response) % 3 > most) / (most + 1)\n"
    )
    rows = [{"question": f"How many is {i}?", "answer": str(i)} for i in range(5)]
    (folder / "gsm8k.jsonl").write_text(
        "".join(json.dumps({**r, "answer": f"#### {r['answer']}"}) + "\n" for r in rows)
    )
    (known,) = find_suites(["gsm8k"], str(folder), None)
    scorings = (Scoring("first", f"{path}:score"), Scoring("half", f"{path}:score", {"most": 1}))
    (reverse,) = find_suites(["reverse"], None, None)
    return [replace(known, scorings=scorings, max_tokens=6), replace(reverse, max_tokens=4, count=3)]


def numbers(report: EvaluationReport) -> list[dict[str, Any]]:
    return list(report.as_json()["results"])


def test_several_models_on_several_suites(entrants: list[Entrant], suites: list[Suite], tmp_path: Path) -> None:
    heard = Heard()
    report = evaluate_models(entrants, suites, SAMPLED, tmp_path / "out", heard)
    assert (report.models, report.suites) == (("llama", "qwen3"), ("gsm8k", "reverse"))
    found = report.evaluations["qwen3", "gsm8k"]
    assert (found.prompts, found.samples, found.errors, found.judged) == (5, 2, 0, 5)
    assert [marks.label for marks in found.marks] == ["first", "half"]
    assert 0 < found.avg.mean < 1, "the judge gives some"
    assert report.evaluations["llama", "reverse"].avg.mean == 0
    assert [(c.suite, c.scoring, c.first, c.second) for c in report.comparisons] == [
        ("gsm8k", "first", "llama", "qwen3"),
        ("gsm8k", "half", "llama", "qwen3"),
        ("reverse", "score", "llama", "qwen3"),
    ]
    other = report.evaluations["llama", "gsm8k"]
    assert report.comparisons[0].difference.interval.mean == pytest.approx(found.avg.mean - other.avg.mean, abs=1e-6)
    assert len([note for note in heard.notes if note.startswith("loading")]) == 2, "each model once"
    assert heard.asks[-1][2] == heard.asks[-1][3]
    assert len(list((tmp_path / "out").glob("*/*/answers.sqlite"))) == 4
    assert json.loads(json.dumps(report.as_json(), allow_nan=False))["comparisons"][0]["first"] == "llama"


def test_what_is_kept_is_not_asked_again(
    entrants: list[Entrant], suites: list[Suite], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = evaluate_models(entrants[:1], suites, SAMPLED, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(run_suites, "load_policy", lambda *_: pytest.fail("it was loaded again"))
        assert numbers(evaluate_models(entrants[:1], suites, SAMPLED, tmp_path)) == numbers(first)
    greedy = Heard()
    evaluate_models(entrants[:1], suites[1:], EvaluationSettings(), tmp_path, greedy)
    assert greedy.notes, "other settings are asked anew"


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("settings", [{"weights_dtype": "float8"}, {"cache_dtype": "int8"}])
def test_an_engine_that_rounds_has_answers_of_its_own(
    settings: dict[str, Any], entrants: list[Entrant], suites: list[Suite], tmp_path: Path
) -> None:
    def answers(engine: EngineConfig, folder: str) -> list[Any]:
        found = evaluate_models(entrants[:1], suites[1:], replace(SAMPLED, engine=engine), tmp_path / folder)
        return numbers(found)

    rounded = EngineConfig.model_validate(settings)
    first, then = answers(EngineConfig(), "one"), answers(rounded, "one")
    assert (first, then) == (answers(EngineConfig(), "two"), answers(rounded, "three"))
    folders = [len(list((tmp_path / name).rglob("*.sqlite"))) for name in ("one", "two", "three")]
    assert folders[0] == folders[1] + folders[2]


def test_an_evaluation_that_was_cut_off_goes_on(
    entrants: list[Entrant], suites: list[Suite], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same numbers as one that was not, and asking only what is missing."""
    whole = evaluate_models(entrants[:1], suites, SAMPLED, tmp_path / "whole")
    generate, asked = NativeEngine.generate, list[str]()

    async def fails_at_the_fifth(self: NativeEngine, request: Any) -> Any:
        asked.append(request.id)
        if len(asked) >= 5:
            raise RuntimeError("pulled the plug")
        return await generate(self, request)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="plug"):
        patch.setattr(NativeEngine, "generate", fails_at_the_fifth)
        patch.setattr(run_suites.NativeEngine, "generate", fails_at_the_fifth)
        evaluate_models(entrants[:1], suites, SAMPLED, tmp_path / "cut")

    async def counted(self: NativeEngine, request: Any) -> Any:
        asked.append(request.id)
        return await generate(self, request)

    asked.clear()
    monkeypatch.setattr(NativeEngine, "generate", counted)
    assert numbers(evaluate_models(entrants[:1], suites, SAMPLED, tmp_path / "cut")) == numbers(whole)
    assert len(asked) <= 16


def test_verdicts_that_failed_are_asked_for_again(entrants: list[Entrant], tmp_path: Path) -> None:
    path = tmp_path / "judge.py"
    path.write_text("from pathlib import Path\ndef score(response, reference, context):\n"
                    f"    return float(Path({str(tmp_path / 'works')!r}).read_text())\n")  # fmt: skip
    (reverse,) = find_suites(["reverse"], None, None)
    suite = replace(reverse, scorings=(Scoring("score", f"{path}:score"),), max_tokens=4, count=3)
    broken = evaluate_models(entrants[:1], [suite], EvaluationSettings(), tmp_path / "out")
    found = broken.evaluations["llama", "reverse"]
    assert (found.errors, found.judged) == (3, 0) and math.isnan(found.avg.mean)
    assert numbers(broken)[0]["avg"] is None
    (tmp_path / "works").write_text("1")
    mended = evaluate_models(entrants[:1], [suite], EvaluationSettings(), tmp_path / "out")
    assert mended.evaluations["llama", "reverse"].avg.mean == 1


def test_nothing_is_kept_without_a_folder(entrants: list[Entrant], suites: list[Suite], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    report = evaluate_models(entrants[:1], suites[1:], EvaluationSettings())
    assert report.evaluations["llama", "reverse"].prompts == 3
    assert [path for path in sorted(tmp_path.rglob("*")) if "pycache" not in str(path)] == before


def test_what_is_refused_before_a_model_loads(
    entrants: list[Entrant], suites: list[Suite], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_suites, "load_policy", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match="each model is asked once, got 'llama' twice"):
        evaluate_models([entrants[0], entrants[0]], suites, SAMPLED)
    with pytest.raises(ConfigError, match="at least one model and one suite, got 0 and 2"):
        evaluate_models([], suites, SAMPLED)
    nowhere = Entrant("b", ModelConfig(path="/no/where"))
    with pytest.raises(ModelError, match="/no/where"):
        evaluate_models([entrants[0], nowhere], suites, SAMPLED)


# Tables.


@pytest.fixture(scope="module")
def report(entrants: list[Entrant], suites: list[Suite]) -> EvaluationReport:
    return evaluate_models(entrants, suites, SAMPLED)


def test_the_table_has_a_line_for_each_suite_scoring_and_model(report: EvaluationReport) -> None:
    titles, *lines = results(report)
    assert titles[:5] == ["suite", "score", "model", "problems", "avg@2"]
    assert titles[5:7] == ["pass@2", "maj@2"] and {"difference", "p", "length", "cut off"} <= {*titles}
    assert "errors" not in titles, "there were none"
    assert [line[:3] for line in lines] == [
        ["gsm8k", "first", "llama"],
        ["gsm8k", "first", "qwen3"],
        ["gsm8k", "half", "llama"],
        ["gsm8k", "half", "qwen3"],
        ["reverse", "score", "llama"],
        ["reverse", "score", "qwen3"],
    ]
    assert all(len(line) == len(titles) for line in lines)
    differences = [line[titles.index("difference")] for line in lines]
    assert [bool(text) for text in differences] == [False, True] * 3
    assert lines[0][titles.index("maj@2")] == "–", "a function of one's own does not vote"
    assert any("neither 0 nor 1" in note for note in notes(report)), "half is partial credit"


def test_markdown_has_the_same_cells(report: EvaluationReport) -> None:
    table, _, below = as_markdown(report).partition("\n\n")
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    cells = [[cell.strip() for cell in line] for line in results(report)]
    assert [[c.strip("| ") for c in line] for line in [lines[0], *lines[2:]]] == cells
    assert set(lines[1]) == {"---", "---:"}
    assert below.startswith("- 2 samples of each problem, temperature 1, seed 0")


def test_one_model_has_no_difference(report: EvaluationReport) -> None:
    alone = replace(report, models=("llama",), comparisons=())
    titles, *lines = results(alone)
    assert "difference" not in titles and "p" not in titles and len(lines) == 3


def test_problems_that_nobody_judged_are_seen(report: EvaluationReport) -> None:
    found = report.evaluations["llama", "reverse"]
    nothing = replace(found.marks[0], values={}, avg=replace(found.avg, mean=math.nan, low=math.nan, high=math.nan))
    broken: Evaluation = replace(found, marks=(nothing,), errors=6)
    titles, *lines = results(replace(report, evaluations={**report.evaluations, ("llama", "reverse"): broken}))
    cells = dict(zip(titles, lines[4], strict=True))
    assert (cells["problems"], cells["avg@2"], cells["errors"]) == ("0 of 3", "–", "6")
