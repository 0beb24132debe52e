"""Projected scale against numbers worked out by hand."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from benchmark_scripts import load_script

from kitae.config.recipe import parse_config
from kitae.errors import ConfigError
from kitae.study.simulate import Hardware, LogNormal, Schedule, Steady, Times, Work, scaled

script = load_script("scale")
Links, deliveries, project = script.Links, script.deliveries, script.project

MIB = 2**20
EVEN = Links(
    gpus=8, cores=10, nic=100 * MIB, fabric=1600 * MIB, nvlink=2000 * MIB, copy=400 * MIB, storage=100 * MIB,
    pack=200 * MIB, compare=100 * MIB, load=800 * MIB, check=1600 * MIB, serve=50 * MIB,
    rollout=0.31, journal=0.1, answer=4800, row=5000, record=1600, changed=0.01, verify=0.5,
)  # fmt: skip
SIZE = 400 * MIB  # parameters; 800 MiB of weights


def schedule(hardware: Hardware, **sections: dict[str, Any]) -> Schedule:
    given = {"training": {"prompts_per_step": 25, "group_size": 4, "token_budget": 1000}, **sections}
    config = parse_config({"data": {"task": "reverse"}, **given})
    return Schedule(config, hardware, Times(sync=0.5), Work(LogNormal(100, 100, 0.0), prompt=40), steps=2)


def steady(hardware: Hardware, bound: int) -> Steady:
    """100 samples and 10,000 tokens in 10 s; engines are busy for 8 s, trainers for 6 s."""
    return Steady(
        devices=hardware.devices, engines=hardware.engines, trainers=hardware.trainers, max_staleness=bound,
        step_seconds=10.0, tokens_per_second=1000.0, samples_per_second=10.0, engine_idle=0.2, trainer_idle=0.4,
        staleness=0.0, staleness_max=bound, dropped=0.0, overdue=0.0, refilled=0.0, restarts=0,
    )  # fmt: skip


def ways(hardware: Hardware, mode: str, **sections: dict[str, Any]) -> dict[str, Any]:
    found = deliveries(schedule(hardware, **sections), EVEN, SIZE)
    return {way.transport: way for way in found if way.mode == mode}


def test_weights_in_full() -> None:
    """16 engines on 2 machines; 4 trainers in one machine gather over its links."""
    found = ways(Hardware(16, 4), "full")
    publish = 800 / 2000 + 800 / 400 + 800 / 200
    assert all(way.publish == pytest.approx(publish) for way in found.values())
    assert found.keys() == {"http", "broadcast", "files"}
    sent = {name: way.sent / MIB for name, way in found.items()}
    assert sent == {"http": 16 * 800, "broadcast": 800, "files": 800}
    seconds = {name: way.seconds for name, way in found.items()}
    assert seconds == pytest.approx(
        {
            "http": 16 * 800 / 50,  # a process serves less than its card could carry
            "broadcast": (800 + 32) / 200,  # an eighth of the fabric, and a bucket more to pass the other machine
            "files": 3 * 800 / 100,  # written once, read by 2 machines
        }
    )


def test_weights_as_a_delta() -> None:
    """Of 1 % of the values, positions and values: 0.06 bytes for each. All are compared, and all are checked."""
    found = ways(Hardware(16, 4), "delta")
    delta = 400 * 0.06
    publish = 800 / 2000 + 800 / 400 + 800 / 100
    assert found["http"].sent / MIB == pytest.approx(16 * delta)
    assert found["http"].publish == pytest.approx(publish)
    assert found["http"].seconds == pytest.approx(16 * delta / 50 + 800 / 1600)
    assert found["broadcast"].seconds == pytest.approx(2 * delta / 200 + 800 / 1600), "it is less than a bucket"


def test_a_delta_is_never_larger_than_what_it_stands_for() -> None:
    def bytes_of(changed: float) -> float:
        found = deliveries(schedule(Hardware(16, 4)), replace(EVEN, changed=changed), 100)
        return next(way.sent for way in found if way.transport == "broadcast" and way.mode == "delta")

    assert bytes_of(0.01) == pytest.approx(100 * 0.06)
    assert bytes_of(0.1) == pytest.approx(100 * (1 / 8 + 0.2))
    assert bytes_of(1.0) == pytest.approx(200)


def test_memory_is_for_one_machine() -> None:
    found = ways(Hardware(7, 1), "full")
    assert found["memory"].seconds == pytest.approx(800 / 800) and found["memory"].sent == 0
    assert found["memory"].publish == pytest.approx(800 / 400 + 800 / 200), "one trainer gathers nothing"
    assert "memory" not in ways(Hardware(7, 2), "full")


def test_fp32_weights_are_twice_as_large() -> None:
    found = ways(Hardware(16, 4), "full", model={"dtype": "float32"})
    assert found["broadcast"].sent / MIB == 1600


def test_a_step() -> None:
    hardware = Hardware(12, 4)
    found = project(schedule(hardware), steady(hardware, bound=2), EVEN, SIZE)
    assert (found.devices, found.machines, found.tokens) == (16, 2, 10_000)
    gathering = found.burden("gathering")
    # 10,000 tokens and 25 prompts of 40 in rows of 1,000: 11 rows, 3 for the busiest of 4 ranks; 2 + 2 + 4 bytes each
    assert gathering.bytes / MIB == pytest.approx(3 * 400 * 8 * 3 / 4)
    assert gathering.seconds == pytest.approx(7200 / 2000) and gathering.exposed == 0, "training takes 6 s"
    controller = found.burden("controller")
    assert controller.bytes == pytest.approx(100 * (8 * 40 + 400 + 4800 + 5000))
    assert controller.seconds == pytest.approx(31) and controller.exposed == pytest.approx(21)
    assert found.controller_ceiling == pytest.approx(16 * 10 / 31)
    assert (found.journal.bytes, found.journal.seconds) == (160_000, 10)
    assert found.cores == pytest.approx(10 * 0.5)
    assert found.burden("verifiers").exposed == 0
    weights = found.burden("weights")
    assert found.weights.transport == "broadcast" and found.weights.mode == "full"
    assert weights.exposed == pytest.approx((6.4 - 6) + (832 / 200 - 0.5)), "publishing beside training"
    assert found.step_seconds == pytest.approx(10 + 21 + weights.exposed)
    assert found.bottleneck == "controller"


def test_where_devices_take_turns_weights_are_waited_for_and_the_controller_has_the_time_of_generation() -> None:
    hardware = Hardware(16, 0)
    found = project(schedule(hardware), steady(hardware, bound=0), EVEN, SIZE)
    assert found.burden("weights").exposed == pytest.approx(800 / 1600 + 800 / 400 + 800 / 200 + 832 / 200 - 0.5)
    assert found.burden("controller").exposed == pytest.approx(31 - 8)
    assert found.burden("gathering").seconds == pytest.approx(400 * 8 * 15 / 16 / 1600), "between machines"


def test_the_delta_is_taken_if_the_recipe_says_so() -> None:
    hardware = Hardware(12, 4)
    found = project(schedule(hardware, engine={"sync": "delta"}), steady(hardware, bound=2), EVEN, SIZE)
    assert found.weights.mode == "delta"


def test_without_anything_to_wait_for_the_busiest_devices_are_the_bottleneck() -> None:
    hardware = Hardware(12, 4)
    rates = ("pack", "load", "copy", "fabric", "nvlink")
    fast = Links(**dict.fromkeys(rates, 1e15), rollout=1e-9, verify=1e-9)
    found = project(schedule(hardware), steady(hardware, bound=2), fast, 1e6)
    assert found.bottleneck == "generation" and found.step_seconds == 10
    busy = replace(steady(hardware, bound=2), trainer_idle=0.1)
    assert project(schedule(hardware), busy, fast, 1e6).bottleneck == "training"


def test_times_follow_the_size_of_the_model() -> None:
    assert scaled(Times(), 1.5e9) == Times()
    larger = scaled(Times(), 3e9)
    assert larger.train == 25_000 and larger.prefill == 75_000 and larger.sequence == pytest.approx(12.8e-6)
    assert larger.step == pytest.approx(0.0016 * 1.46)
    assert (larger.fixed, larger.sync, larger.life) == (Times().fixed, Times().sync, math.inf)


def program(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    small = ("quickstart", "--devices", "4", "--steps", "2", "--trainers", "2", "--staleness", "1")
    script.main([*small, "--lengths", "lognormal:median=32,max=256", *arguments])
    return capsys.readouterr().out


def test_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    lines = program(capsys, "--parameters", "1.5e9", "--links", "gpus=2").splitlines()
    assert lines[0] == "model      1.5e+09 parameters"
    assert lines[1].startswith("links      gpus 2, cores 96, nic 5e+10")
    full = next(line.split() for line in lines if line.split()[:3] == ["4", "1", "full"])
    assert full[3] == "3", "GB of weights"
    assert lines[-1].split()[:2] == ["4", "1"] and lines[-1].split()[-1] in ("weights", "generation", "gathering")


def test_without_a_size_it_is_that_of_the_model_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = json.loads(program(capsys, "--json", "--times", "train=50000"))
    (broadcast,) = (w for w in found["deliveries"] if (w["transport"], w["mode"]) == ("broadcast", "full"))
    assert broadcast["sent"] == 2 * 134_515_008
    assert {b["part"] for b in found["burdens"]} == {"gathering", "weights", "controller", "verifiers"}
    assert found["step_seconds"] >= found["simulated_seconds"]


def test_a_model_whose_size_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="--parameters is needed: the model 'nobody/absent' is not here"):
        program(capsys, "model.path=nobody/absent")


def test_links() -> None:
    assert script.parse_links("") == Links()
    assert script.parse_links("nic=12.5e9, gpus=4") == Links(nic=12.5e9, gpus=4)
    with pytest.raises(ConfigError, match=r"--links knows gpus, .*got 'nick'; did you mean 'nic'"):
        script.parse_links("nick=3")
    with pytest.raises(ConfigError, match="--links nic must be above 0, got 0"):
        script.parse_links("nic=0")
