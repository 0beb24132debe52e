"""A tiny run starts its verifier twice, to check the gold answers and to train: here with the imports done."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _warm_verifiers(warm_verifiers: None) -> None:
    pass
