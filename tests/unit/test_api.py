"""The Python API: what is promised, that the documentation's examples run, and where it may be called."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import kitae
from kitae import api
from kitae.errors import ConfigError, Interrupted, ModelError, StoreError
from kitae.observe.observer import Silent

pytestmark = pytest.mark.usefixtures("warm_verifiers")

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
PROMISED = {
    *("train", "start", "resume", "evaluate", "sample", "sample_to_file", "load"),
    *("batched", "Engine", "Environment", "Observation", "ScoreFunction", "Trainer", "Method", "Observer"),
    *("Prompt", "Message", "Rollout", "Group", "Score", "Result", "Step", "Evaluation", "Selection", "KitaeError"),
    "Constraint",
}

RECIPE: dict[str, Any] = {
    "model": {"path": "tiny", "device": "cpu", "dtype": "float32"},
    "data": {"task": "arithmetic"},
    "verifier": {"workers": 1, "check_gold": False},
    "sampling": {"max_tokens": 4},
    "engine": {"memory_gb": 0.05},
    "training": {"steps": 2, "prompts_per_step": 2, "group_size": 2},
    "eval": {"prompts": 0},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_promised() -> None:
    assert set(kitae.__all__) - {"__version__"} == PROMISED
    for name in PROMISED:
        assert getattr(kitae, name) is not None
        assert name in dir(kitae)
        assert re.search(rf"\b{name}\b", PAGE.read_text()), f"docs/api.md does not name {name}"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = kitae.trian


def test_importing_kitae_loads_nothing() -> None:
    code = "import sys, kitae; print([m for m in sys.modules if m.startswith('kitae.') or m in ('torch', 'pydantic')])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_examples_of_the_documentation_run(folder: Path) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, "docs/api.md", "exec"), names)
    assert names["result"].folder == Path("runs/quickstart-001")
    assert (names["result"].model / "config.json").is_file()
    assert len(names["groups"]) == 2 and len(names["own"][0].rollouts) == 2
    assert names["tally"].rows + names["tally"].empty == 6 == len(names["answers"]) * 3
    assert Path("answers.jsonl").is_file()
    assert names["untrained"].prompts == 4


def test_where_an_event_loop_is_running(folder: Path) -> None:
    threads: list[str] = []

    class Heard(Silent):
        def step(self, report: Any) -> None:
            threads.append(threading.current_thread().name)

    async def cell() -> kitae.Result:
        with pytest.raises(ModelError):  # errors come through as they are
            kitae.train(RECIPE, model={"path": "./nowhere"})
        return kitae.train(RECIPE, observer=Heard())

    result = asyncio.run(cell())
    assert result.step == 2
    assert threads == ["kitae-run"] * 2


def test_ctrl_c_stops_a_run_in_another_thread_and_it_can_go_on(folder: Path) -> None:
    class Impatient(Silent):
        def step(self, report: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    async def cell() -> None:
        kitae.train(RECIPE, training={"steps": 50}, observer=Impatient())

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=r"stopped after step \d+; everything is saved"):
        asyncio.run(cell())
    assert signal.getsignal(signal.SIGINT) is before
    done = int(kitae.Result(Path("runs/run-001"), None, 0, None, None).metrics[-1]["step"])
    assert done < 50
    assert kitae.resume("run-001", overrides=[f"training.steps={done + 1}"]).step == done + 1
    notes: list[str] = []

    class Heard(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    assert kitae.resume("runs/run-001", observer=Heard()).step == done + 1
    assert "is finished" in notes[0]


def test_ctrl_c_while_nothing_can_be_saved_raises_at_once() -> None:
    async def cell() -> None:
        api.outside_a_loop(lambda: (os.kill(os.getpid(), signal.SIGINT), threading.Event().wait(60)))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())


def test_settings_of_every_form_say_the_same(folder: Path) -> None:
    (folder / "own.toml").write_text('[data]\ntask = "sort"\n[training]\nsteps = 3\n')
    by_text = api.as_config("own.toml", ["training.lr=1e-4", "data.task=reverse"])
    by_section = api.as_config(Path("own.toml"), (), {"training": {"lr": 1e-4}, "data": {"task": "reverse"}})
    assert by_text == by_section == api.as_config(by_text)
    assert by_text.training.steps == 3
    values = {"data": {"task": "sort"}}
    assert api.as_config(values, (), {"data": {"task": "reverse"}}).flat()["data.task"] == "reverse"
    assert values == {"data": {"task": "sort"}}  # nobody's dict is changed


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: kitae.train("quickstrat"), ConfigError, "did you mean 'quickstart'"),
        (lambda: kitae.train(RECIPE, trainig={"steps": 1}), ConfigError, "unknown section 'trainig'"),
        (lambda: kitae.train(RECIPE, training=3), ConfigError, "'training' is a section"),
        (lambda: kitae.evaluate(RECIPE), ConfigError, "eval.prompts must be at least 1"),
        (lambda: kitae.sample(RECIPE, n=0), ConfigError, "n must be at least 1, got 0"),
        (lambda: kitae.sample({"method": {"kind": "sft"}, "data": {"path": "x"}}), ConfigError, "sample is for"),
        (lambda: kitae.sample_to_file(RECIPE, "x.jsonl"), ConfigError, "prompts must be given for data.task"),
        (lambda: kitae.sample_to_file(RECIPE, "x.jsonl", keep="worst"), ConfigError, "keep must be one of"),
        (lambda: kitae.sample_to_file(RECIPE, "no/x.jsonl", prompts=1), StoreError, "there is no folder no"),
        (lambda: kitae.load("tinny"), ModelError, "neither a folder, nor a hub id"),
        (lambda: kitae.load("tiny", divice="cpu"), ConfigError, "unknown key model.divice"),
        (lambda: kitae.resume("nowhere"), StoreError, "not a run folder"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_made(folder: Path, call: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
    assert list(folder.iterdir()) == []


def test_a_text_is_no_list_of_prompts() -> None:
    with pytest.raises(ConfigError, match="prompts must be a number or a list of prompts, got the text 'Reverse 1, 2'"):
        api.sample("quickstart", prompts="Reverse 1, 2", model="tiny")


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ({1: {}}, {}, "the name of a section must be text, got 1"),
        ({"training": {2: 3}}, {}, "the name of a key in section 'training' must be text, got 2"),
        (RECIPE, {"overrides": [5]}, "an override has the form section.key=value, as text, got 5"),
        (RECIPE, {"overrides": [None]}, "an override has the form section.key=value, as text, got None"),
        (5, {}, "a recipe is a name, a path, nested dicts or settings, got 5"),
    ],
)
def test_what_is_no_setting_is_refused_by_name(
    recipe: Any, options: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        kitae.train(recipe, **options)
    assert str(caught.value) == message
    assert not list(folder.iterdir())


def test_impossible_sampling_is_refused() -> None:
    with kitae.load("tiny", device="cpu", dtype="float32", engine={"memory_gb": 0.05}) as model:
        for wrong, message in (
            ({"temperature": -1}, "temperature must be at least 0, and finite, got -1"),
            ({"temperature": float("nan")}, "temperature must be at least 0, and finite, got nan"),
            ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
            ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
            ({"top_k": -1}, "top_k must be at least 0, got -1"),
            ({"min_p": 1}, "min_p must be at least 0 and below 1, got 1"),
            ({"stop": [""]}, "stop must be texts that are not empty, got ('',)"),
            ({"n": 0}, "n must be at least 1, got 0"),
        ):
            with pytest.raises(ConfigError) as caught:
                model.generate("Hi", **{"max_tokens": 2, **wrong})
            assert str(caught.value) == message
        assert len(model.generate("Hi", max_tokens=2, temperature=0, n=2)) == 2


@pytest.mark.thorough
def test_suites_and_models_alone_are_evaluated(folder: Path) -> None:
    few = {"eval": {"prompts": 3}, "engine": {"memory_gb": 0.05}}
    small = {"path": "tiny", "device": "cpu", "dtype": "float32"}
    found = kitae.evaluate("tiny", suites=["sort", "reverse"], model=None, **few)
    assert list(found) == ["sort", "reverse"] and all(e.prompts == 3 for e in found.values())
    own = kitae.evaluate(RECIPE, suites="own,sort", **{**few, "eval": {"prompts": 2, "max_tokens": 4}})
    assert len(own) == 2 and all(e.prompts == 2 for e in own.values())
    assert isinstance(kitae.evaluate(RECIPE, **few), kitae.Evaluation)
    rows = [{"question": "1 + 1", "answer": "2"}]
    Path("mine.jsonl").write_text(json.dumps(rows[0]))
    mine = kitae.evaluate("tiny", suites=["mine.jsonl"], model=small["path"], verifier={"name": "number"})
    assert [e.prompts for e in mine.values()] == [1], "all of it, where nothing says how many"
    with pytest.raises(ConfigError, match=r"a model alone has no task: name suites with suites=\[…\]"):
        kitae.evaluate("tiny")
    with pytest.raises(ConfigError, match="suite 'own' is the task of a run or recipe"):
        kitae.evaluate("tiny", suites=["own", "sort"])
    with pytest.raises(ConfigError, match="settings are those of eval, model, engine, run, got 'training'"):
        kitae.evaluate("tiny", suites=["sort"], training={"lr": 1.0})
