"""`kitae simulate`: its table, its JSON, its picture, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kitae.cli.main import app
from kitae.cli.simulation import parse_lengths, parse_pairs, parse_times, whole_numbers
from kitae.errors import ConfigError
from kitae.study.simulate import LogNormal, Times, scaled

SMALL = ("simulate", "quickstart", "sampling.max_tokens=256", "--devices", "4", "--steps", "2", "--trainers", "2")


def kitae(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*SMALL, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    output = kitae("--staleness", "0,2", "--timeline", str(tmp_path / "t.png"))
    lines = output.splitlines()
    assert lines[0] == "a step     8 prompts × 8 responses on the first number of devices"
    assert lines[1] == "lengths    median 32, at most 256; prompts 128"
    assert lines[4].split()[:3] == ["devices", "engines+trainers", "staleness"]
    assert lines[5].split()[:5] == ["4", "4", "in", "turns", "0"] and lines[6].split()[:3] == ["4", "2+2", "2"]
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_json() -> None:
    one, two = json.loads(kitae("--staleness", "0,1", "--json", "--lengths", "constant:64", "--times", "verify=0.5"))
    assert (one["devices"], one["max_staleness"], one["trainers"], one["speedup"]) == (4, 0, 0, 1.0)
    assert (two["engines"], two["trainers"], two["staleness_max"]) == (2, 2, 1)
    assert two["speedup"] == pytest.approx(two["tokens_per_second"] / one["tokens_per_second"])
    assert one["tokens_per_second"] / one["samples_per_second"] == pytest.approx(64)


def test_what_the_options_mean() -> None:
    assert whole_numbers("--devices", "8, 16,32", least=1) == [8, 16, 32]
    assert parse_lengths("lognormal:median=512,max=8x", 64) == LogNormal(512, 4096)
    assert parse_lengths("lognormal:median=512,max=2000,sigma=1", 64) == LogNormal(512, 2000, 1.0)
    assert parse_lengths("lognormal:median=30", 64) == LogNormal(30, 64)
    assert parse_lengths("constant:512", 64) == LogNormal(512, 512, 0.0)
    assert parse_times("") == Times()
    assert parse_times("train=25000, sync=2") == Times(train=25000, sync=2)
    assert parse_times("life=inf") == Times()
    assert parse_times("train=7", 3e9) == replace(scaled(Times(), 3e9), train=7)
    assert parse_pairs("--links", "", ["nic"]) == {}
    assert parse_pairs("--links", "nic=12.5e9, gpus=4", ["nic", "gpus"]) == {"nic": 12.5e9, "gpus": 4}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--devices", "8,x", r"--devices must be whole numbers of at least 1, separated by commas, got '8,x'"),
        ("--devices", "0", r"--devices must be whole numbers of at least 1, .*got '0'"),
        ("--devices", "", r"--devices must be whole numbers .*got ''"),
        ("--staleness", "-1", r"--staleness must be whole numbers of at least 0, .*got '-1'"),
        ("--staleness", "65", r"max_staleness: input should be less than or equal to 64, got 65"),
        ("--lengths", "uniform:3", r"--lengths must begin with 'lognormal:' or 'constant:', got 'uniform:3'"),
        ("--lengths", "lognormal:", r"--lengths takes key=value, separated by commas, got ''"),
        ("--lengths", "lognormal:max=3", r"--lengths lognormal needs a median, got 'lognormal:max=3'"),
        ("--lengths", "lognormal:mean=3", r"--lengths knows median, max, sigma, got 'mean'"),
        ("--lengths", "lognormal:median=x", r"--lengths median must be a number, got 'x'"),
        ("--lengths", "lognormal:median=300", r"median must be from 1 to the longest, 256, got 300"),
        ("--lengths", "lognormal:median=5,sigma=-1", r"--lengths sigma must be at least 0, got -1"),
        ("--lengths", "lognormal:median=5,max=inf", r"--lengths max must be a number, got 'inf'"),
        ("--lengths", "constant:0", r"--lengths constant must be a whole number of at least 1, got '0'"),
        ("--lengths", "constant:inf", r"--lengths constant must be .*, got 'inf'"),
        ("--times", "step", r"--times takes key=value, separated by commas, got 'step'"),
        ("--times", "trian=3", r"--times knows step, .*got 'trian'; did you mean 'train'\?"),
        ("--times", "train=0", r"--times train must be above 0, got 0"),
        ("--times", "sync=-1", r"--times sync must be at least 0, got -1"),
        ("--times", "sync=inf", r"--times sync must be a number, got 'inf'"),
        ("--times", "step=0,sequence=0", r"step and sequence must not both be 0"),
        ("--parameters", "0", r"--parameters must be a number of at least 1, got 0"),
        ("--trainers", "1.5", r"--trainers must be a whole number of at least 1 or a share below 1, got 1.5"),
        ("--trainers", "0", r"--trainers must be a whole number of at least 1 or a share below 1, got 0"),
        ("--trainers", "4", r"needs at least 5 devices, 4 to train and others to generate, got 4"),
    ],
)
def test_bad_options_name_the_rule_and_the_value(option: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kitae(option, value)


def test_engines_is_another_name_for_devices() -> None:
    (only,) = json.loads(kitae("--engines", "3", "--staleness", "0", "--json"))
    assert only["devices"] == 3
