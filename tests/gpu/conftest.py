"""Tiny models on the GPU: tests that other files share with this folder run there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy


@pytest.fixture
def tiny_policy(tiny_folder: Callable[[str], Path]) -> Callable[..., Policy]:
    def get(architecture: str = "llama", **settings: object) -> Policy:
        values = {"dtype": "float32", "device": "cuda", "path": str(tiny_folder(architecture)), **settings}
        return load_policy(ModelConfig.model_validate(values))

    return get
