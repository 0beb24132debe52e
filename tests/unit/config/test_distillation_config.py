"""Settings of distillation: what is filled in, and what is refused before anything loads."""

from typing import Any

import pytest

from kitae.config.recipe import override_config, parse_config
from kitae.config.root import DistilConfig, RLConfig
from kitae.errors import ConfigError
from kitae.offline.config import JSD


def resolve(method: dict[str, Any], **sections: Any) -> DistilConfig:
    values = {"method": {"kind": "distil", **method}, "data": {"task": "sort"}, **sections}
    found = parse_config(values)
    assert isinstance(found, DistilConfig)
    return found


HERE = {"teacher": "tiny"}
URL = {"url": "http://localhost:8000/v1", "model": "large"}
SERVED = {"teacher": URL}


def test_the_loss_has_its_preset() -> None:
    plain, whole = resolve(HERE), resolve({**HERE, "loss": "jsd"})
    assert isinstance(plain, RLConfig), "it runs where reinforcement learning does"
    assert (plain.algorithm.preset, plain.algorithm.advantage.name, plain.method.divergence) == (
        "distil",
        "reverse-kl",
        None,
    )
    assert (whole.algorithm.preset, whole.algorithm.gate.name) == ("gkd", "divergence")
    assert whole.method.divergence == JSD(0.5, 1.0)
    assert resolve({**HERE, "loss": "jsd", "beta": 0, "temperature": 2}).method.divergence == JSD(0.0, 2.0)
    assert override_config(plain, ["training.lr=1e-4"]).algorithm == plain.algorithm


def test_data_know_their_verifier_and_others_need_none() -> None:
    assert resolve(HERE).verifier.name != "none"
    assert resolve(HERE, data={"path": "x.jsonl"}).verifier.name == "none"
    assert resolve(HERE, data={"path": "x.jsonl"}, verifier={"name": "math"}).verifier.name == "math"


@pytest.mark.parametrize(
    ("method", "sections", "message"),
    [
        ({}, {}, "method.kind = 'distil' needs exactly one of method.teacher.path and method.teacher.url, got none"),
        ({"teacher": {"path": "tiny", **URL}}, {}, "one of method.teacher.path and method.teacher.url, got both"),
        ({"teacher": {"url": "http://x/v1"}}, {}, "method.teacher.url needs method.teacher.model"),
        ({**SERVED, "loss": "jsd"}, {}, "method.loss = 'jsd' needs method.teacher.path, which gives all logits"),
        ({**HERE, "beta": 0.5}, {}, "method.beta belongs to method.loss = 'jsd', got 0.5 with 'reverse-kl'"),
        ({**HERE, "temperature": 2}, {}, "method.temperature belongs to method.loss = 'jsd', got 2 with 'reverse-kl'"),
        ({"teacher": {"path": "tiny", "cache": "x"}}, {}, "cache belongs to method.teacher.url, which is not set"),
        ({"teacher": {"path": "tiny", "place": "process"}, "loss": "jsd"}, {},
         "method.loss = 'jsd' needs method.teacher.place = 'trainer', which gives all logits, got 'process'"),
        ({"teacher": {**URL, "place": "process"}}, {}, "place = 'process' is for method.teacher.path, got"),
        ({"teacher": {"path": "tiny", "device": "cpu"}}, {}, "device belongs to method.teacher.place = 'process'"),
        ({"teacher": {"path": "tiny", "threads": 2}}, {}, "threads belongs to method.teacher.place = 'process'"),
        (SERVED, {"sampling": {"temperature": 0.7}}, "method.teacher.url needs sampling.temperature = 1, got 0.7"),
        (HERE, {"algorithm": {"preset": "grpo"}},
         "method.loss = 'reverse-kl' needs a stage that reads log-probs of the teacher, got none in preset 'grpo'"),
        ({**HERE, "loss": "jsd"}, {"algorithm": {"preset": "distil"}},
         "method.loss = 'jsd' needs a stage that reads the divergence from the teacher, got none in preset 'distil'"),
        (HERE, {"algorithm": {"preset": "gkd"}}, "algorithm.gate 'divergence' needs method.loss = 'jsd'"),
        (HERE, {"algorithm": {"advantage": {"reward_coef": 1.0}}, "verifier": {"name": "none"}},
         "algorithm.advantage.reward_coef is 1, but verifier.name = 'none' gives every response 0"),
        ({"kind": "rl"}, {"algorithm": {"preset": "distil"}},
         "algorithm.advantage 'reverse-kl' reads log-probs of a teacher: it needs method.kind = 'distil', got 'rl'"),
        ({"kind": "rl"}, {"algorithm": {"preset": "gkd"}},
         "algorithm.gate 'divergence' reads the divergence from a teacher: it needs method.kind = 'distil', got 'rl'"),
        ({"kind": "rl", "teacher": "tiny"}, {}, "unknown key method.teacher; it belongs to method.kind = distil"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(method: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(method, **sections)
    assert message in str(caught.value)
