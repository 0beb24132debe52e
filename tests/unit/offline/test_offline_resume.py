"""What goes on with a run of a stage, and what is said to those who ask for more."""

from pathlib import Path

import pytest
from test_loop import demonstrations, run_stage, stage_config, write_rows

from kitae.cli.runs import clean
from kitae.config.recipe import make_config
from kitae.config.root import StageConfig
from kitae.errors import ConfigError
from kitae.observe.observer import Bystander, Silent
from kitae.run.train_run import resume


@pytest.fixture
def sft(tmp_path: Path) -> StageConfig:
    demonstrations(tmp_path)
    write_rows(tmp_path / "held_out.jsonl", [{"prompt": "say 99", "completion": "yes yes "}])
    return stage_config(tmp_path, epochs=2)


def test_there_is_nothing_to_forget_and_nothing_to_replay(sft: StageConfig, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_stage(sft).folder
    with pytest.raises(ConfigError, match=r"--forget gives up answers .* method.kind = 'sft' samples none"):
        resume(folder, Bystander(Silent()), forget=True)
    assert resume(folder, Bystander(Silent())).step == 6, "the folder is not locked"
    clean([folder], weights_only=False, yes=False)
    said = capsys.readouterr().out
    assert "then it goes on from step-000006 only" in said and "replay" not in said


def test_a_mix_takes_the_place_of_a_recipes_file_and_leaves_what_is_held_out(sft: StageConfig, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    for values in (sft.given(), {"method": {"kind": "sft"}, "data": {"path": "a.jsonl", "eval_path": "b.jsonl"}}):
        config = make_config(values, [f'data.mix=[{{path = "{other}", weight = 2}}]'])
        assert isinstance(config, StageConfig)
        assert (config.data.path, config.data.mix[0].path) == (None, str(other))
        assert config.data.eval_path == values["data"]["eval_path"]
        back = make_config(config.given(), ["data.path=c.jsonl"])
        assert isinstance(back, StageConfig) and (back.data.path, back.data.mix) == ("c.jsonl", ())
    with pytest.raises(ConfigError, match=r"data\.mix is a list of files"):
        make_config(sft.given(), ["data.mix.path=a.jsonl"])
