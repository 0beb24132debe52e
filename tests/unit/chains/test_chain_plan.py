"""Chain files into stages: where models and data come from, and what is refused before anything runs."""

import json
from pathlib import Path

import pytest

from kitae.chains.chain_file import ChainPlan, check_chain, read_chain
from kitae.config.locate import find_chain, shipped_chains
from kitae.config.root import RLConfig, StageConfig
from kitae.errors import ConfigError
from kitae.models.load import find_model

RAFT = """
rounds = 2
[evaluate]
data.task = "arithmetic"
[[stage]]
name = "answers"
model.path = "tiny"
data.task = "arithmetic"
sample = { keep = "correct", prompts = 8, n = 4 }
[[stage]]
name = "learn"
method.kind = "sft"
training = { lr = 1e-3, batch = 4 }
eval.examples = 0
"""

STEP = """
[[stage]]
name = "practise"
data.task = "arithmetic"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    return tmp_path


def chain_of(folder: Path, text: str, rounds: int | None = None) -> ChainPlan:
    (folder / "mine.toml").write_text(text)
    return read_chain(folder / "mine.toml", rounds=rounds)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        check_chain(chain_of(folder, text))
    return str(refused.value)


def test_each_stage_takes_the_model_before_it_and_the_answers_before_it(folder: Path) -> None:
    chain = chain_of(folder, RAFT)
    check_chain(chain)
    assert chain.folder == Path("runs/mine")
    assert [stage.label for stage in chain.stages] == ["01-answers", "02-learn", "03-answers", "04-learn"]
    configs = [chain.config(stage) for stage in chain.stages]
    first, second = "runs/mine/02-learn-001", "runs/mine/04-learn-001"
    assert [config.model.path for config in configs] == ["tiny", "tiny", first, first]
    learn = configs[3]
    assert isinstance(learn, StageConfig) and learn.data.path == "runs/mine/03-answers.jsonl"
    assert f"{learn.run.dir}/{learn.run.name}-001" == second
    orders = [stage.order for stage in chain.stages if stage.order]
    assert [(order.first, order.prompts) for order in orders] == [(0, 8), (8, 8)]  # no prompt is asked twice
    assert len(chain_of(folder, RAFT, rounds=3).stages) == 6


def test_a_stage_may_be_a_recipe_with_other_settings(folder: Path) -> None:
    chain = chain_of(folder, '[[stage]]\nrecipe = "quickstart"\nmodel.path = "tiny"\ndata.task = "sort"\n')
    config = chain.config(chain.stages[0])
    assert isinstance(config, RLConfig)
    assert (config.data.task, config.training.steps, config.model.path) == ("sort", 15, "tiny")
    check_chain(chain)


def test_a_stage_with_data_of_its_own_keeps_it(folder: Path) -> None:
    text = RAFT.replace("eval.examples = 0", 'eval.examples = 0\ndata.path = "rows.jsonl"')
    learn = chain_of(folder, text)
    config = learn.config(learn.stages[1])
    assert isinstance(config, StageConfig) and config.data.path == "rows.jsonl"


def test_a_stage_may_sample_from_another_model(folder: Path) -> None:
    other = find_model("tiny")
    assert other is not None
    chain = chain_of(folder, RAFT.replace("n = 4", f'n = 4, model = "{other}"'))
    check_chain(chain)
    learnt = "runs/mine/02-learn-001"
    paths = [str(other), "tiny", str(other), learnt]  # who trains goes on with the chain's own model
    assert [chain.config(stage).model.path for stage in chain.stages] == paths
    assert chain.first_model == "tiny"
    given = [stage.given() for stage in chain_of(folder, RAFT).stages]
    assert chain.stages[0].given() == {**given[0], "sample.model": str(other)}  # another model is another stage


def test_a_reward_model_is_not_what_the_next_stage_trains(folder: Path) -> None:
    pairs = RAFT.replace('"correct"', '"pairs"').replace("rounds = 2", "")
    chain = chain_of(folder, f"{pairs}[[stage]]\nname = 'judge'\nmethod.kind = 'reward'\neval.examples = 0\n{STEP}")
    check_chain(chain)
    assert [chain.config(stage).model.path for stage in chain.stages] == [
        *("tiny", "tiny", "runs/mine/02-learn-001", "runs/mine/02-learn-001")
    ]


@pytest.mark.parametrize("keep", ["best", "correct", "all"])
def test_preferences_need_pairs(folder: Path, keep: str) -> None:
    text = RAFT.replace('"sft"', '"dpo"').replace('"correct"', f'"{keep}"')
    assert (
        f"trains on a preference in each row, which the answers of 01-answers with keep = '{keep}' are not"
        in refusal(folder, text)
    )
    check_chain(chain_of(folder, text.replace(f'"{keep}"', '"pairs"')))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rounds = 2", "round = 2", "unknown key 'round'; valid are name, dir, rounds,"),
        ("rounds = 2", "rounds = 0", "rounds must be at least 1, got 0"),
        ("rounds = 2", 'rounds = "2"', "rounds must be a whole number, got '2'"),
        ("rounds = 2", 'name = "a/b"', "name must be letters, digits"),
        ('"answers"', '"an answer"', "stage 1: name must be letters, digits"),
        ('data.task = "arithmetic"\nsample', 'recipe = "quickstrat"\nsample', "did you mean 'quickstart'?"),
        ('method.kind = "sft"', 'method.kind = "sfd"', "stage 2: method.kind must be one of rl, sft"),
        ("lr = 1e-3", "lrr = 1e-3", "stage 02-learn: unknown key training.lrr"),
        ("keep =", "keeep =", "unknown key sample.keeep; valid are keep,"),
        ("prompts = 8, ", "", "stage 1: sample needs keep, prompts and n, got no prompts"),
        ("n = 4", "n = 0", "stage 1: n must be at least 1, got 0"),
        ("n = 4", 'n = "4"', "sample.n must be a whole number, got '4'"),
        ('model.path = "tiny"', 'model.path = "./nowhere"', "stage 01-answers: model.path './nowhere'"),
        ("n = 4", 'n = 4, model = "./nowhere"', "stage 01-answers: model.path './nowhere'"),
        ("n = 4", 'n = 4, model = ""', "sample.model must be a folder, a run, a hub id or a short name, got ''"),
        ("n = 4", "n = 4, model = 3", "sample.model must be a folder, a run, a hub id or a short name, got 3"),
        ("lr = 1e-3", "lr = 1e-3, minutes = -1", "stage 02-learn: training.minutes: "),
        ('method.kind = "sft"', 'method.kind = "sft"\nmodel.path = "tiny"', "only the first one names it, got 'tiny'"),
        ("eval.examples = 0", 'data.path = "gone.jsonl"\neval.examples = 0', "stage 02-learn: "),
        ('[evaluate]\ndata.task = "arithmetic"', '[evaluate]\ndata.task = "arithmetik"', "[evaluate]: "),
        ('[evaluate]\ndata.task = "arithmetic"', "[evaluate]\neval.prompts = 0\ndata.task = 'sort'", "at least 1"),
        ('method.kind = "sft"\ntraining = { lr = 1e-3, batch = 4 }\neval.examples = 0', "", "needs data of its own"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_stage(folder: Path, old: str, new: str, message: str) -> None:
    assert old in RAFT
    assert message in refusal(folder, RAFT.replace(old, new))
    assert not (folder / "runs").exists()


def test_all_complaints_at_once(folder: Path) -> None:
    text = RAFT.replace('"tiny"', '"./nowhere"').replace("lr = 1e-3", "lrr = 1e-3")
    assert [line.partition(":")[0] for line in refusal(folder, text).splitlines()] == [
        "stage 01-answers",
        "stage 02-learn",
    ]


@pytest.mark.parametrize("content", ["", "stage = 3", "[[stage", "name = 'x'"])
def test_files_that_are_no_chains(folder: Path, content: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        chain_of(folder, content)


def test_finding_chains() -> None:
    assert find_chain("raft").name == "raft.toml"
    with pytest.raises(ConfigError, match=r"no chain file 'raff'.*did you mean 'raft'\?"):
        find_chain("raff")


@pytest.mark.parametrize("path", shipped_chains(), ids=lambda path: path.stem)
def test_shipped_chains_are_valid(path: Path) -> None:
    chain = read_chain(path)
    for stage in chain.stages:
        chain.config(stage)
    assert chain.evaluation("tiny").eval.prompts > 0
