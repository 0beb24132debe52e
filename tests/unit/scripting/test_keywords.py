"""Keywords of Python as settings: one rule, and what breaks it is named."""

from typing import Any

import pytest

from kitae.config.root import RLConfig, SFTConfig
from kitae.errors import ConfigError
from kitae.scripting.keywords import FLAT, by_section


def test_keys_find_their_sections() -> None:
    assert by_section(RLConfig, {"lr": 1e-5, "max_tokens": 64, "lora_rank": 8, "seed": 7, "eval": {"prompts": 16}}) == {
        "training": {"lr": 1e-5},
        "sampling": {"max_tokens": 64},
        "model": {"lora_rank": 8},
        "run": {"seed": 7},
        "eval": {"prompts": 16},
    }
    assert by_section(SFTConfig, {"batch": 4, "training": {"lr": 1.0}}) == {"training": {"batch": 4, "lr": 1.0}}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"eval": 3}, "'eval' is a section, and takes its keys and values, got 3"),
        ({"num_generations": 8}, "unknown setting 'num_generations'; Kitae calls it training.group_size"),
        ({"learning_rate": 1}, "unknown setting 'learning_rate'; Kitae calls it training.lr"),
        ({"path": "x"}, r"'path' is a setting of model and data: give it as model=\{'path': …\}"),
        ({"max_staleness": 1}, "unknown setting 'max_staleness'; did you mean pipeline.max_staleness"),
    ],
)
def test_what_is_no_setting_is_named(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        by_section(RLConfig, keywords)


def test_few_keys_are_in_two_of_the_sections() -> None:
    """Or the rule would be no help."""
    tables = RLConfig.tables()
    keys = [key for name in FLAT for key in tables[name].model_fields]
    assert {key for key in keys if keys.count(key) > 1} == {"path"}
