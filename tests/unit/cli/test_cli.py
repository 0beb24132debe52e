"""The command line: what it prints, where, and with which exit status."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
from written_runs import WrittenRun

import kitae
from kitae.algorithms.preferences import PREFERENCE_LOSSES
from kitae.algorithms.presets import PRESETS
from kitae.algorithms.stages import STAGES
from kitae.cli import main, recipes
from kitae.cli.choices import differences
from kitae.config.recipe import parse_config
from kitae.run.recompute_step import Replay
from kitae.store.checkpoints import Frontier
from kitae.store.journal import Journal
from kitae.store.run_folder import Metrics, RunStore
from kitae.types import Message, Prompt, Rollout, Score, Segment, ToolCall

COMMANDS = (
    *("train", "resume", "scale", "sample", "chain", "export", "runs", "compare", "clean", "eval", "suites", "show"),
    *(
        "diagnose",
        "replay",
        "plot",
        "simulate",
        "import",
        "recipes",
        "algorithms",
        "validate",
        "tasks",
        "data",
        "verifiers",
    ),
    *("verify", "environments", "ui", "serve", "tinker", "sandbox-host", "report", "doctor"),
)


class Result(NamedTuple):
    status: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """`cli("train", "quickstart")` runs the installed entry point in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["kitae", *map(str, arguments)])
        capsys.readouterr()  # what fixtures printed
        with pytest.raises(SystemExit) as stopped:
            main.run()
        code = stopped.value.code
        captured = capsys.readouterr()
        return Result(code if isinstance(code, int) else int(code is not None), captured.out, captured.err)

    return call


def failure(result: Result) -> str:
    """The message of a clean failure: status 1, one error on stderr, nothing on stdout, no traceback."""
    assert result.status == 1, result
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err
    return result.err.removeprefix("error: ").rstrip("\n")


# Help.


def test_help_lists_every_command(cli: Cli) -> None:
    result = cli("--help")
    assert result.status == 0
    listed = [line.split()[0] for line in result.out.partition("Commands:")[2].splitlines() if line.strip()]
    assert listed == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(cli: Cli, command: str) -> None:
    result = cli(command, "--help")
    assert result.status == 0
    assert result.out.partition("Usage: ")[2].splitlines()[0].split(" [")[0].endswith(command)


def test_the_list_of_commands_says_what_each_says_of_itself() -> None:
    for where, summary in main.COMMANDS.values():
        module, function = where.split(".")
        command = getattr(import_module(f"kitae.cli.{module}"), function)
        assert (command.__doc__ or "").splitlines()[0] == summary


def test_environments_are_listed_with_their_params(cli: Cli) -> None:
    result = cli("environments")
    assert result.status == 0
    for line in ("tools ", "    search.path          needed", "    game                 needed", "    shared ", "mcp "):
        assert line in result.out


def test_no_arguments_show_the_help(cli: Cli) -> None:
    result = cli()
    assert "Commands:" in result.out + result.err


def test_train_without_a_recipe_names_those_there_are(cli: Cli) -> None:
    assert "RECIPE: it must be a file, or one of arithmetic," in " ".join(cli("train").err.split())


def test_the_version(cli: Cli) -> None:
    result = cli("--version")
    assert (result.status, result.out) == (0, f"kitae {kitae.__version__}\n")


HEAVY = ("torch", "transformers", "numpy", "matplotlib", "sympy")


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], ["pydantic", "rich", *HEAVY]),
        (["train", "--help"], [m for m in HEAVY if m != "numpy"]),
        (["--version"], ["pydantic", "rich", *HEAVY]),
        (["recipes"], HEAVY),
        (["runs", "/tmp"], [m for m in HEAVY if m != "numpy"]),
        (["replay", "/nowhere"], [m for m in HEAVY if m != "numpy"]),
        (["algorithms", "ppo"], [m for m in HEAVY if m != "numpy"]),
        (["show", "/nowhere"], [m for m in HEAVY if m != "numpy"]),
        (["train", "quickstart", "training.stepz=1"], [m for m in HEAVY if m != "numpy"]),
    ],
)
def test_what_needs_no_model_imports_none(arguments: list[str], heavy: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["kitae", *{arguments}]
from kitae.cli.main import run
try:
    run()
except SystemExit:
    pass
print("HEAVY", sorted({{*{heavy}}} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize("arguments", [["--nonsense"], ["trian"], ["train"], ["show", "x", "--limit", "0"]])
def test_wrong_usage_is_status_2_on_stderr(cli: Cli, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.status == 2
    assert result.out == ""
    assert "Usage:" in result.err


def test_ctrl_c_is_status_130_without_a_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recipes, "recipes", interrupted)
    result = cli("recipes")
    assert result.status == 130
    assert result.err.strip() == "interrupted"


# Recipes and settings.


def test_recipes_lists_what_ships(cli: Cli) -> None:
    result = cli("recipes")
    assert result.status == 0
    (line,) = [line for line in result.out.splitlines() if line.startswith("quickstart ")]
    assert "SmolLM2-135M learns to reverse three numbers" in line
    assert "kitae train NAME" in result.out


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_recipe_that_is_not_there(cli: Cli, command: str) -> None:
    message = failure(cli(command, "quickstrat"))
    assert message.startswith("no recipe file 'quickstrat', and no shipped recipe of that name (")
    assert message.endswith("; did you mean 'quickstart'?")
    assert "did you mean" not in failure(cli(command, "xyzzy"))
    assert failure(cli(command, "my/own.toml")) == f"no recipe file 'my/own.toml' in {Path.cwd()}"


def test_a_recipe_that_is_no_toml(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[data\n")
    assert "bad.toml is not valid TOML" in failure(cli("train", "bad.toml"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.stepz=1", "unknown key training.stepz; did you mean training.steps?"),
        ("steps=1", "an override has the form section.key=value, got 'steps=1'; did you mean training.steps?"),
        ("training.group_size=1", "training.group_size must be at least 2"),
        ("data.task=revers", "reverse"),
        ("data.params.cuont=3", "cuont"),
        ("verifier.name=exakt", "did you mean 'exact'?"),
        ("verifier.params.ignorecase=true", "did you mean 'ignore_case'?"),
        ("verifier.name=nowhere.py:score", "got 'nowhere.py:score': no such file"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_made(
    cli: Cli, tmp_path: Path, override: str, message: str
) -> None:
    assert message in failure(cli("train", "quickstart", override))
    assert list(tmp_path.iterdir()) == []


def test_dry_run_says_what_would_happen_and_makes_nothing(
    cli: Cli, tmp_path: Path, tiny_folder: Callable[[str], Path]
) -> None:
    model = tiny_folder("llama")
    arguments = ("train", "quickstart", f"model.path={model}", "model.device=cpu", "training.steps=3", "--dry-run")
    result = cli(*arguments)
    assert (result.status, result.err) == (0, "")
    head, _, settings = result.out.partition("\n\nsettings that differ from the defaults")
    lines = {line[:10].strip(): line[11:] for line in head.splitlines() if line[:10].strip()}
    assert lines["data"] == "reverse, judged by exact"
    assert lines["steps"] == "3, each of 8 prompts × 8 samples of up to 16 tokens"
    assert lines["device"].startswith("cpu") and lines["model"].endswith("M parameters")
    assert " of sampling and " in lines["a step"] and lines["the run"]
    assert re.search(r"^  training\.steps +3$", settings, re.MULTILINE)
    assert "training.group_size" not in settings and "algorithm.gate.clip_low" not in settings
    assert list(tmp_path.iterdir()) == []
    assert cli(*arguments, "training.lr=5").out.startswith("warning: training.lr = 5 is far above")
    whole = cli(*arguments, "--full").out.partition("all settings:\n")[2]
    config = parse_config(json.JSONDecoder().raw_decode(whole)[0])
    assert (config.training.steps, config.model.path, config.run.name) == (3, str(model), "quickstart")


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["train", "dry-run"])
@pytest.mark.parametrize("setting", ["algorithm.experts.routing = 'engine'", "algorithm.experts.z_coef = 0.1"])
def test_settings_for_experts_are_refused_with_a_model_that_has_none(
    setting: str, more: tuple[str, ...], cli: Cli, tmp_path: Path, tiny_folder: Callable[[str], Path]
) -> None:
    """Before its weights are loaded, and before there is a run folder."""
    given = setting.replace(" ", "").replace("'", "")
    dense, mixture = tiny_folder("llama"), tiny_folder("mixtral")
    result = cli("train", "quickstart", given, f"model.path={dense}", *more)
    assert failure(result) == f"{setting} needs a mixture of experts, got '{dense}' (LlamaForCausalLM)"
    assert list(tmp_path.iterdir()) == []
    assert cli("train", "quickstart", given, f"model.path={mixture}", "--dry-run").status == 0


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["train", "dry-run"])
@pytest.mark.parametrize(
    ("architecture", "override", "message"),
    [
        ("qwen3_moe", "engine.speculation=false", "needs a model without experts, got '{model}' (Qwen3MoeForCausalLM)"),
        ("llama", "engine.cache_dtype=int8", "needs engine.cache_dtype = 'model' on a CPU, got 'int8'"),
        ("llama", "training.steps=2", "needs compiled kernels for torch.float32 on a CPU, got none"),
    ],
)
def test_weights_in_8_bits_that_nothing_can_sample_with_are_refused(
    architecture: str, override: str, message: str, more: tuple[str, ...], cli: Cli, tmp_path: Path,
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Before the model is loaded, and before there is a run folder."""
    model = tiny_folder(architecture)
    settings = f"model.path={model}", "model.device=cpu", "model.dtype=float32", "engine.weights_dtype=float8", override
    monkeypatch.setattr("kitae.kernels.cpu.packed.available", lambda dtype: "compiled" not in message)
    found = failure(cli("train", "quickstart", *settings, *more))
    assert found.startswith("engine.weights_dtype = 'float8' " + message.format(model=model))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["train", "dry-run"])
@pytest.mark.parametrize("recipe", ["lora", "sft"])
@pytest.mark.parametrize(
    ("targets", "wrong"), [("q_proj,lm_head", "leave the head out, got 'q_proj,lm_head'"), ("q_prj", "got 'q_prj'")]
)
def test_adapters_that_a_model_has_no_place_for_are_refused(
    targets: str, wrong: str, recipe: str, more: tuple[str, ...], cli: Cli, tmp_path: Path,
    tiny_folder: Callable[[str], Path],
) -> None:  # fmt: skip
    """Before its weights are loaded, and before there is a run folder."""
    settings = f"model.lora_targets={targets}", "model.lora_rank=4", f"model.path={tiny_folder('llama')}"
    message = failure(cli("train", recipe, *settings, *more))
    assert message.startswith("model.lora_targets must ") and message.endswith(wrong)
    assert list(tmp_path.iterdir()) == []


def test_dry_run_of_a_model_that_is_not_here(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITAE_CACHE", str(tmp_path / "cache"))
    result = cli("train", "quickstart", "model.path=tiny", "--dry-run")
    assert result.status == 0
    assert "tiny is not here yet" in result.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.device=cuda:77"], "model.device is 'cuda:77', but this machine has "),
        (["model.device=tpu"], "model.device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (["model.path=./missing"], "model.path './missing' is neither a folder, nor a hub id"),
        (["model.path=nobody/nothing"], "cannot get 'nobody/nothing' from the hub"),
        (["model.path=broken"], "cannot load 'broken' from broken"),
        (["model.path=run"], "run is a run without a trained model yet; finish it with: kitae resume run"),
        (["data.path=empty.jsonl", "eval.prompts=0"], "empty.jsonl: no rows"),
        (["data.path=line.jsonl", "eval.prompts=0"], "line.jsonl:2: not valid JSON"),
        (["data.path=none.jsonl"], "data.path must name a file, got none.jsonl, but nothing is there"),
        (["data.path=good.jsonl"], "no held-out prompts for good.jsonl: set data.eval_path, or eval.prompts to 0"),
    ],
)
def test_what_cannot_work_is_found_before_the_run_folder_is_made(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("kitae.study.memory_estimate.free_memory", lambda: None)  # a busy machine is another message
    for folder in ("broken", "run"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "run" / "journal.sqlite").touch()
    good = '{"question": "1 + 1", "answer": "2"}\n'
    for name, text in (("empty", ""), ("line", good + "{oops\n"), ("good", good)):
        (tmp_path / f"{name}.jsonl").write_text(text)
    found = failure(cli("train", "quickstart", "verifier.check_gold=false", *overrides))
    assert message in found
    assert "resume" not in found or "without a trained model" in found
    assert not (tmp_path / "runs").exists()


def test_an_evaluation_needs_prompts(cli: Cli) -> None:
    assert "eval.prompts must be at least 1" in failure(cli("eval", "quickstart", "eval.prompts=0"))


def test_suites_are_listed(cli: Cli) -> None:
    output = cli("suites").out
    for name in ("gsm8k", "svamp", "math500", "mbpp", "humaneval", "ifeval", "ifbench", "puzzles", "countdown", "gym:"):
        assert f"\n{name}" in f"\n{output}" or name in output.partition("generated")[2], name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny"], "a model alone has no task: name suites with --suites (kitae suites lists them), got 'tiny'"),
        (["tiny", "--suites", "gsm8"], "did you mean 'gsm8k'?"),
        (["tiny", "--suites", "own"], "suite 'own' is the task of a run or recipe, got models alone"),
        (
            ["tiny", "--suites", "reverse", "training.lr=1"],
            "settings are those of eval, model, engine, run, got 'training",
        ),
        (["tiny", "--suites", "gsm8k", "--data", "."], "no data for suite 'gsm8k' in .: looked for gsm8k/test.jsonl"),
        (["tiny", "--suites", "none.jsonl"], "must name a file, but nothing is there"),
        (["tiny", "--suites", "reverse", "--markdown", "no/t.md"], "cannot write no/t.md: there is no folder no"),
        (["tiny", "tiny", "--suites", "reverse"], "each model is asked once, got 'tiny' twice"),
        (["tiny", "quickstart", "--model", "tiny"], "replace the model of one target, got 2 targets"),
        (["quickstart", 'eval.suites=["gsm8"]'], "did you mean 'gsm8k'?"),
        (["eval.prompts=3"], "an evaluation needs at least one target"),
    ],
)
def test_evaluations_that_are_refused_early(cli: Cli, arguments: list[str], message: str) -> None:
    assert message in failure(cli("eval", *arguments))
    assert not Path("evaluations").exists()


# Runs.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show"], "is not a run folder: it has no journal.sqlite"),
        (["plot"], "has no finished step to draw"),
        (["resume"], "is not a run folder: it has no config.json"),
        (["eval"], "is a folder, neither a recipe file nor a run"),
        (["replay"], "is not a run folder: it has no config.json and journal.sqlite"),
        (["clean"], "is not a run folder: it has no config.json and journal.sqlite"),
        (["compare", "x"], "x is not a run folder: there is no such folder"),
    ],
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_is_no_run(cli: Cli, tmp_path: Path, arguments: list[str], message: str, exists: bool) -> None:
    folder = tmp_path / "empty"
    if exists:
        folder.mkdir()
    found = failure(cli(*arguments, folder))
    missing = ("no recipe file", "has no config.json", "there is no such folder")
    assert message in found if exists else any(text in found for text in missing)
    assert not exists or list(folder.iterdir()) == []


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run with three trained groups over two steps, a failed check, and a group still open."""
    values = {"run": {"dir": str(tmp_path / "runs"), "name": "r"}, "data": {"task": "reverse"}}
    store = RunStore.create(parse_config(values))
    asyncio.run(_fill(store.journal))
    store.close()
    return store.folder


async def _fill(journal: Journal) -> None:
    rewards = {0: [0.0, 1.0], 1: [0.5, None], 2: [0.25, 0.75], 3: [1.0]}
    for group, values in rewards.items():
        prompt = Prompt(f"ids[/red]/{group}", (Message("user", f"question {group} [bold]"),), f"gold {group}")
        await journal.add_prompt(group, prompt, 0, group)
        for index, value in enumerate(values):
            segment = Segment("model", (5,), (-1.0,), (0,))
            score = Score.error("worker died") if value is None else Score(value, detail="because" if value < 1 else "")
            rollout = Rollout.of(group, index, (1,), (segment,), "stop", "", score)
            await journal.add_rollout(replace(rollout, text=f"answer {group}/{index} [/]"))
    await journal.add_fates(1, trained=[0], dropped=[])
    await journal.add_fates(2, trained=[2], dropped=[(1, "errors")])


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Path]:
    """`trained("a", 3, "finished", lr=1e-5)`: the folder of a run of 3 steps whose last event is that."""

    def make(name: str, steps: int, event: str | None, **training: float) -> Path:
        values = {
            "run": {"dir": str(tmp_path / "runs"), "name": name},
            "data": {"task": "reverse"},
            "training": {"steps": 3, **training},
        }
        store = RunStore.create(parse_config(values))
        asyncio.run(store.journal.add_event("start", "step 0"))
        if event:
            asyncio.run(store.journal.add_event(event, ""))
        evaluation = {"kind": "eval", "avg_low": 0.1, "avg_high": 0.9, "prompts": 8}
        store.metrics.append({**evaluation, "step": 0, "avg": 0.25})
        for step in range(1, steps + 1):
            speed = {"generate_tokens_per_second": 100.0, "train_tokens_per_second": 50.0, "step_seconds": 2.0}
            store.metrics.append({"kind": "step", "step": step, "reward": step / 4, "length": 5.0, **speed})
        for step in range(steps + 1):
            asyncio.run(store.checkpoints.save(Frontier(step, 0), weights))
        if event == "finished":
            store.metrics.append({**evaluation, "step": steps, "avg": 0.75})
            void(store.folder / "model" / "config.json", 10)
        store.close()
        return store.folder

    async def weights(folder: Path) -> None:
        void(folder / "weights", 1000)

    def void(path: Path, size: int) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"{" + b" " * size + b"}")

    return make


def test_runs_lists_what_is_there(cli: Cli, trained: Callable[..., Path], tmp_path: Path) -> None:
    assert failure(cli("runs")) == "there is no folder runs; kitae runs DIR looks into another one"
    (tmp_path / "runs" / "no-run").mkdir(parents=True)
    assert cli("runs").out == "no runs in runs; start one with: kitae train quickstart\n"
    for number, (name, event) in enumerate((("a", "finished"), ("b", "stopped"), ("c", None), ("d", None))):
        folder = trained(name, 3 if event == "finished" else 2, event)
        for path in folder.iterdir():
            os.utime(path, (number, number))
    (folder / "config.json").write_text('{"data": {"tusk": 1}}')  # of another version
    running = RunStore.create(parse_config({"run": {"dir": "runs", "name": "e"}, "data": {"task": "reverse"}}))
    result = cli("runs")
    header, *rows = (line.split() for line in result.out.splitlines())
    running.close()
    assert result.status == 0 and header == ["run", "status", "step", "reward", "held", "out", "age", "size"]
    assert [row[:2] for row in rows] == [
        ["a-001", "finished"],
        ["b-001", "stopped"],
        ["c-001", "crashed"],
        ["d-001", "unreadable"],
        ["e-001", "running"],
    ]
    assert rows[0][2:7] == ["3/3", "0.750", "0.250", "→", "0.750"] and rows[1][2:5] == ["2/3", "0.500", "0.250"]
    assert cli("runs", "runs/a-001").out.splitlines()[1].startswith("a-001")


def test_compare_shows_what_differs_and_what_came_of_it(cli: Cli, trained: Callable[..., Path]) -> None:
    one, two = trained("a", 3, "finished"), trained("b", 2, "stopped", lr=3e-4)
    _, *lines, reason = cli("compare", one, two).out.splitlines()
    assert reason == "not paired with a-001: a-001 kept no results of single prompts"
    rows = {line.partition("  ")[0]: line.split("  ", 1)[1].split("  ") for line in lines}
    cells = {name: [c.strip() for c in found if c.strip()] for name, found in rows.items()}
    assert cells["training.lr"] == ["1e-05", "0.0003"]
    assert cells["held out after"] == ["0.750 [0.100, 0.900]", "–"]
    assert cells["reward, last 5 steps"] == ["0.500", "0.375"]
    assert cells["gen tok/s"] == ["100", "100"] and "run.name" not in cells and "training.steps" not in cells
    assert not any(name.startswith("svamp") for name in cells)
    for run, suite, avg in ((one, "svamp", 0.3), (one, "svamp", 0.2), (two, "mbpp", 0.1)):
        row = {"kind": "eval", "suite": suite, "step": 0, "avg": avg, "avg_low": 0.0, "avg_high": 1.0}
        Metrics(run / "metrics.jsonl").append(row)
    lines = cli("compare", one, two).out.splitlines()
    (before,) = [line.split() for line in lines if line.startswith("svamp before")]
    (after,) = [line.split() for line in lines if line.startswith("svamp after")]
    assert (before[2], after[2], before[-1]) == ("0.300", "0.200", "–")
    assert any(line.startswith("mbpp before") for line in lines)
    assert "0.250 → 0.750" in cli("runs").out, "held out is the run's own task"
    assert failure(cli("compare", one)) == "kitae compare takes two runs or more, got 1"
    assert "the same" in cli("compare", one, one).out


def test_clean_says_what_would_go_and_removes_it_when_told(cli: Cli, trained: Callable[..., Path]) -> None:
    run = trained("a", 3, "finished")
    leftover = run / "checkpoints" / ".partial-step-000009"
    leftover.mkdir()
    (leftover / "weights").write_bytes(b"x" * 5000)
    (run / ".model.partial").mkdir()
    before = sorted(run.rglob("*"))
    result = cli("clean", run)
    assert (
        "checkpoints/step-000002" in result.out
        and "goes on from step-000003 only" in result.out
        and "5 KB" in result.out
    )
    assert result.out.endswith(f"nothing was removed yet; do it with: kitae clean {run} --yes\n")
    assert sorted(run.rglob("*")) == before
    assert "freed" in cli("clean", run, "--yes").out
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-000003"]
    assert (run / "model").is_dir() and not (run / ".model.partial").exists()
    assert "nothing to remove" in cli("clean", run).out


def test_clean_removes_answers_that_nothing_refers_to(cli: Cli, tmp_path: Path) -> None:
    run = WrittenRun(tmp_path).step([[0.0, 1.0]], in_files=True).step([[1.0]]).finish()
    used = sorted((run / "columns").iterdir())
    idle = run / "columns" / "engine-7-0badcafe"
    idle.write_bytes(b"of a process that was killed" * 100)
    assert "columns/engine-7-0badcafe  3 KB" in cli("clean", run).out and idle.exists()
    cli("clean", run, "--yes")
    assert sorted((run / "columns").iterdir()) == used and len(used) == 2
    assert "nothing to remove" in cli("clean", run).out


def test_clean_down_to_the_weights(cli: Cli, trained: Callable[..., Path]) -> None:
    run = trained("a", 3, "finished")
    assert "but not resumed" in cli("clean", run, "--weights-only", "--yes").out
    assert list((run / "checkpoints").iterdir()) == [] and (run / "model").is_dir()
    assert "is finished" in cli("resume", run).out
    assert "cannot go on: its checkpoints were removed" in failure(cli("resume", run, "training.steps=9"))
    assert "checkpoints are all there is" in failure(cli("clean", trained("b", 2, "stopped"), "--weights-only"))


def test_clean_touches_no_run_that_is_running_or_has_no_sound_checkpoint(
    cli: Cli, trained: Callable[..., Path]
) -> None:
    one, two = trained("a", 3, "stopped"), trained("b", 3, "stopped")
    store = RunStore.open(two)
    result = cli("clean", one, two, "--yes")
    store.close()
    assert "b-001 is running" in failure(result)
    assert len(list((one / "checkpoints").iterdir())) == 2
    (one / "checkpoints" / "step-000003" / "weights").write_bytes(b"damaged")
    assert "is damaged" in cli("clean", one, "--yes").err
    assert len(list((one / "checkpoints").iterdir())) == 2


def test_replay_says_same_or_differs(cli: Cli, trained: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained("a", 3, "finished")
    asked: list[int] = []

    def fake(folder: Path, step: int, note: object) -> Replay:
        asked.append(step)
        return Replay(step, step - 1, {"loss": (0.5, 0.5 if step == 3 else 0.75)})

    monkeypatch.setattr("kitae.run.recompute_step.replay", fake)
    result = cli("replay", run)
    assert result.status == 0 and result.out.splitlines()[-1].startswith("same: step 3, from the checkpoint of step 2")
    result = cli("replay", run, "--step", 2)
    assert result.status == 1 and result.out.splitlines()[-1].startswith("differs: step 2") and asked == [3, 2]
    assert "has no finished step to replay" in failure(cli("replay", trained("b", 0, None)))


def shown(result: Result) -> list[str]:
    assert result.status == 0, result
    return [line.partition("answer: ")[2].split()[1] for line in result.out.splitlines() if "answer: " in line]


def test_show_the_last_step(cli: Cli, run_folder: Path) -> None:
    result = cli("show", run_folder)
    assert shown(result) == ["1/0", "1/1", "2/0", "2/1"]
    for text in (
        "not judged",
        "worker died",
        "question 2 [bold]",
        "answer 2/0 [/]",
        "gold 2",
        "because",
        "ids[/red]/2",
        "reward 0.25",
    ):
        assert text in result.out


def test_show_a_conversation(cli: Cli, run_folder: Path) -> None:
    """Who said what, turn by turn; of an episode that failed, why."""
    said = (
        Segment("model", (5, 6), (-1.0,) * 2, (0,) * 2),
        Segment.observed((7,)),
        Segment("model", (8,), (-1.0,), (0,)),
    )
    transcript = (
        Message("user", "question 4"),
        Message("assistant", "let me see", calls=(ToolCall("add", {"a": 2, "b": "[red]"}),)),
        Message("tool", "four"),
        Message("assistant", "it is 4"),
    )
    rollout = Rollout.of(4, 0, (1,), said, "stop", "let me see\n\nit is 4", Score(1.0))
    failed = replace(rollout, index=1, status="failed", score=Score.error("environment: step raised ValueError: boom"))

    async def write() -> None:
        store = RunStore.open(run_folder)
        await store.journal.add_prompt(4, Prompt("p4", (Message("user", "question 4"),), "4"), 0, 4)
        for r in (rollout, failed):
            await store.journal.add_rollout(replace(r, transcript=transcript))
        await store.journal.add_fates(3, trained=[4], dropped=[])
        store.close()

    asyncio.run(write())
    good, bad = cli("show", run_folder).out.split("sample 1")
    lines = [line.strip("│ ") for line in good.splitlines()]
    assert lines[1:5] == [
        "user: question 4",
        "assistant: let me see add(a=2, b='[red]')",
        "tool: four",
        "assistant: it is 4",
    ]
    assert "reward 1 · " in good and "2 turns · 3 tokens · stop" in good and "answer:" not in good
    assert "failed: environment: step raised ValueError: boom" in bad and "failed · 2 turns · 3 tokens" in bad
    assert "verifier:" not in bad


def test_show_by_step_and_rank(cli: Cli, run_folder: Path) -> None:
    assert shown(cli("show", run_folder, "--step", 1)) == ["0/0", "0/1"]
    assert shown(cli("show", run_folder, "--best", "--limit", 2)) == ["0/1", "2/1"]
    assert shown(cli("show", run_folder, "--worst")) == ["0/0", "2/0", "1/0", "2/1", "0/1"]
    assert shown(cli("show", run_folder, "--best", "--step", 2)) == ["2/1", "1/0", "2/0"]
    assert "step 9 has no samples; the last step with samples is 2" in failure(cli("show", run_folder, "--step", 9))


def test_show_one_sample_of_each_prompt(cli: Cli, run_folder: Path) -> None:
    assert shown(cli("show", run_folder, "--one-per-prompt")) == ["1/0", "2/0"]
    assert shown(cli("show", run_folder, "--one-per-prompt", "--best")) == ["0/1", "2/1", "1/0"]
    assert "1 of 2 samples" in cli("show", run_folder, "--one-per-prompt", "--limit", 1).out


def test_show_what_a_sample_was_worth(cli: Cli, run_folder: Path) -> None:
    """As the trainer had it: the group of step 1 has rewards 0 and 1; a dropped group has no advantages."""
    lines = [line for line in cli("show", run_folder, "--step", 1).out.splitlines() if "tokens" in line]
    assert [re.findall(r"advantage (\S+) · 1 tokens · stop", line) for line in lines] == [["-0.71"], ["+0.71"]]
    dropped, _ = cli("show", run_folder, "--step", 2, "--limit", 2).out.split("sample 1")
    assert "advantage" not in dropped


def test_show_what_could_not_be_judged(cli: Cli, run_folder: Path) -> None:
    assert shown(cli("show", run_folder, "--errors")) == ["1/1"]
    result = cli("show", run_folder, "--errors", "--step", 1)
    assert (result.status, result.out.strip()) == (0, "every answer could be judged")


def test_show_before_the_first_step(cli: Cli, tmp_path: Path) -> None:
    Journal(tmp_path / "journal.sqlite").close()
    assert "has no finished step yet" in failure(cli("show", tmp_path))


def test_show_of_a_run_that_samples_nothing(cli: Cli, tmp_path: Path) -> None:
    Journal(tmp_path / "journal.sqlite").close()
    settings = {"method": {"kind": "sft"}, "data": {"path": "chats.jsonl"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert failure(cli("show", tmp_path)).endswith("is for method.kind = 'rl' or 'distil', got a recipe of kind 'sft'")


def test_a_file_is_no_run(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "sft.toml").write_text("")
    assert "sft.toml is not a run folder" in failure(cli("resume", "sft.toml"))


def test_a_kind_that_is_no_name(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text('method.kind = ["sft"]')
    assert "method.kind must be one of rl, sft" in failure(cli("train", "odd.toml"))


def test_show_of_a_damaged_journal(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"garbage" * 1000)
    assert "not a database" in failure(cli("show", tmp_path))


def test_eval_of_a_run_without_a_model(cli: Cli, run_folder: Path) -> None:
    message = f"is a run without a trained model yet; finish it with: kitae resume {run_folder}"
    assert message in failure(cli("eval", run_folder))


def test_resume_with_changed_settings(cli: Cli, run_folder: Path) -> None:
    store = RunStore.open(run_folder)
    asyncio.run(store.journal.begin(store.config.to_json(), []))
    store.close()
    path = run_folder / "config.json"
    path.write_text(path.read_text().replace('"group_size": 8', '"group_size": 4'))
    assert "training.group_size: was 8, is 4" in failure(cli("resume", run_folder))


def test_plot_prints_where_the_picture_is(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    row = {"kind": "step", "step": 1, "reward": 0.5, "length": 3.0}
    (run_folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    result = cli("plot", run_folder)
    assert result.out.strip() == str(run_folder / "plot.png")
    result = cli("plot", run_folder, "-o", tmp_path / "other.png")
    assert (tmp_path / "other.png").read_bytes().startswith(b"\x89PNG")
    for bad in (tmp_path / "no" / "folder" / "x.png", tmp_path / "x.nonsense"):
        assert str(bad) in failure(cli("plot", run_folder, "-o", bad))


def test_algorithms_lists_every_method_with_its_stages(cli: Cli) -> None:
    result = cli("algorithms")
    header, *lines = result.out.splitlines()
    assert result.status == 0 and header.split()[:3] == ["method", "S1", "reward"]
    assert [line.split()[0] for line in lines[: len(PRESETS)]] == list(PRESETS)
    (dapo,) = (line for line in lines if line.startswith("dapo "))
    assert all(part in dapo for part in ("zero-variance", "group-zscore", "clip (0.2, 0.28)", "token-mean"))


@pytest.mark.parametrize("name", PRESETS)
def test_algorithms_explains_one(name: str, cli: Cli) -> None:
    out = cli("algorithms", name).out
    for part in (PRESETS[name].title, PRESETS[name].formula, PRESETS[name].source, PRESETS[name].trap):
        assert part in out
    for key, value in differences(name).items():
        assert re.search(rf"^  \* {re.escape(key)} +{re.escape(str(value))}$", out, re.MULTILINE), (key, value)


@pytest.mark.parametrize("stage", STAGES)
def test_algorithms_lists_the_choices_of_a_stage(stage: str, cli: Cli) -> None:
    out = cli("algorithms", stage).out
    assert all(f"  {name} " in out for name in STAGES[stage].choices)


def test_algorithms_lists_the_losses_on_preferences(cli: Cli) -> None:
    out = cli("algorithms", "dpo").out
    for name, loss in PREFERENCE_LOSSES.items():
        assert re.search(rf"^  {name} +{re.escape(loss.formula)}$", out, re.MULTILINE)
        assert loss.source in out


def test_algorithms_names_the_nearest(cli: Cli) -> None:
    result = cli("algorithms", "rlo")
    assert result.status == 1 and "did you mean 'rloo'" in result.err


def test_a_bad_algorithm_is_refused_by_a_dry_run(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def gate(ratio_N): return ratio_N\n")
    for setting, message in {
        "algorithm.kl.coef=0.1": "a KL term needs a reference",
        "algorithm.gate=own.py:gate": "must take (ratio_N, tokens)",
        "algorithm.gate=missing.py:gate": "must exist",
        "algorithm.clip_lo=0.1": "did you mean algorithm.gate.clip_low?",
    }.items():
        result = cli("train", "quickstart", "--dry-run", setting)
        assert result.status == 1 and message in result.err, result
