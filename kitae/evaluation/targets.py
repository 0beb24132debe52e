"""What to evaluate on what: from names to settings and suites, for `kitae eval` and `kitae.evaluate` alike."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kitae.config.locate import shipped_recipes
from kitae.config.recipe import make_config
from kitae.config.root import RLConfig, reinforcement
from kitae.data.tasks import TASKS
from kitae.errors import ConfigError
from kitae.evaluation.suites import KNOWN, OWN, PUZZLES, Suite, find_suites
from kitae.rl.config import EvalConfig

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ASKING = ("eval", "model", "engine", "run")
"""Sections of settings on how models are queried, independent of the task."""

_NONE: Mapping[str, Any] = MappingProxyType({})


def is_model(target: str) -> bool:
    """Whether it names a model rather than a recipe: a folder with weights, a hub id, or a short name."""
    from kitae.models.load import SMOLLM2

    path = Path(target).expanduser()
    if target in (SMOLLM2, "tiny") or (path / "config.json").is_file():
        return True
    return bool(_HUB_ID.fullmatch(target)) and path.suffix != ".toml" and not path.parent.exists()


def suite_names(text: str | None) -> list[str]:
    """The names in a comma-separated list. The name of a shipped recipe that is no suite becomes the recipe's file."""
    recipes = {path.stem: str(path) for path in shipped_recipes() if path.stem not in KNOWN and path.stem not in TASKS}
    return [recipes.get(name, name) for part in (text or "").split(",") if (name := part.strip())]


def without_recipe(
    model: str,
    names: Sequence[str],
    data: str | None,
    overrides: Iterable[str] = (),
    settings: Mapping[str, Any] = _NONE,
    *,
    how: str,
) -> RLConfig:
    """Settings for a model without a recipe: the data is that of the first suite, and only settings on how to query
    models can be given. how: how suites are named, for error messages: `"--suites"`."""
    if not names:
        raise ConfigError(f"a model alone has no task: name suites with {how} (kitae suites lists them), got {model!r}")
    _refuse_own(names)
    files = [name for name in names if Path(name).suffix in (".jsonl", ".json", ".parquet")]
    given = [*overrides]
    other = [o for o in (*given, *settings) if str(o).partition(".")[0] not in _ASKING]
    if not files and other:
        raise ConfigError(
            f"without a recipe and a file of your own, settings are those of {', '.join(_ASKING)}, got {other[0]!r}"
        )
    if files:
        found: dict[str, Any] = {"path": files[0]}
    else:
        found = find_suites(names[:1], data, None)[0].data.model_dump(exclude_unset=True)
    values = {"data": found, "model": {"path": model}, "eval": {"prompts": EvalConfig().prompts}}
    return reinforcement(make_config(values, given, settings), "an evaluation")


def asked_suites(names: Sequence[str], data: str | None, base: RLConfig, *, own: bool, limited: bool) -> list[Suite]:
    """The suites with their numbers of problems. own: whether there is a task of a run or recipe. limited: whether all
    suites, not only that task, have `eval.prompts` problems."""
    if not own:
        _refuse_own(names)
    found = find_suites(names, data or base.eval.data, base)
    expanded = [each for name in names for each in (PUZZLES if name == "puzzles" else (name,))]
    return [
        replace(suite, count=base.eval.prompts if limited or name == OWN else None)
        for name, suite in zip(expanded, found, strict=True)
    ]


def _refuse_own(names: Sequence[str]) -> None:
    if OWN in names:
        raise ConfigError(f"suite {OWN!r} is the task of a run or recipe, got models alone")
