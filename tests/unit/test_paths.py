"""Where things are kept."""

from pathlib import Path

import pytest

from kitae.paths import cache_dir


def test_the_cache_is_where_the_environment_says_or_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv("KITAE_CACHE", "/elsewhere")
    assert cache_dir() == Path("/elsewhere")
    monkeypatch.setenv("KITAE_CACHE", "")
    assert cache_dir() == Path("/somebody/.cache/kitae")
