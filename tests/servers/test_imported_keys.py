"""Every key that TRL and verl know is known to the importer too: none of them is called unknown."""

from collections.abc import Callable
from typing import Any

from kitae.importers import trl_keys, verl_keys


def test_keys_of_trl(run_client: Callable[..., Any]) -> None:
    for trainer, keys in run_client("trl", "peer_keys.py", "trl").items():
        assert [key for key in keys if key not in trl_keys.RULES[trainer]] == [], trainer


def test_keys_of_verl(run_client: Callable[..., Any]) -> None:
    (keys,) = run_client("verl", "peer_keys.py", "verl").values()
    known = [key for key in keys if key in verl_keys.RULES or verl_keys.is_idle(key) or key.endswith("_target_")]
    assert [key for key in keys if key not in known] == []
