"""What a caller from Python asks for, as settings of a run, with rows that are to be written and functions to be held.

order = make_order(recipe, model=…, data=rows, reward=f, keywords={"lr": 1e-5})
order.config                       the settings, checked; rows are named by where they will lie
order.placed(folder)               the same, when the rows are written there
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitae.config.recipe import make_config, parse_config
from kitae.config.root import ROOTS, RLConfig, Root
from kitae.data.config import DataConfig
from kitae.data.tasks import TASKS
from kitae.errors import ConfigError
from kitae.scripting.given_rewards import Reward, read_rewards
from kitae.scripting.given_rows import GivenRows, read_given
from kitae.scripting.keywords import by_section
from kitae.verifiers.given_functions import GivenFunction

Rewards = Reward | Sequence[Reward]
"""A function, the name of a verifier, or a list of these, each alone or with a weight: `[f, ("math", 0.5)]`."""

FOLDER = "given"
"""Where rows lie in a run folder."""

_FILES = {"path": "train.jsonl", "eval_path": "eval.jsonl"}
_ENDINGS = (".jsonl", ".json", ".parquet", ".csv")


@dataclass(frozen=True, slots=True)
class RunOrder:
    """Settings, rows by the setting that names their file, and functions."""

    config: Root
    rows: Mapping[str, GivenRows]
    functions: tuple[GivenFunction, ...] = ()

    def placed(self, folder: Path) -> Root:
        """The settings with the rows in files of the folder, which are written."""
        if not self.rows:
            return self.config
        values = self.config.given()
        for setting, rows in self.rows.items():
            path = folder.resolve() / FOLDER / _FILES[setting]
            rows.write(path)
            values["data"][setting] = str(path)
        return parse_config(values)


def make_order(
    values: Mapping[str, Any],
    *,
    model: Any = None,
    data: Any = None,
    eval_data: Any = None,
    reward: Rewards | None = None,
    method: Any = None,
    overrides: Sequence[str] = (),
    keywords: Mapping[str, Any],
) -> RunOrder:
    """From the values of a recipe, or of none, and what a call gives beside them."""
    keywords = dict(keywords)
    if method is not None:
        keywords["method"] = {"kind": method} if isinstance(method, str) else method
    root = _root_of(values, keywords)
    settings = by_section(root, keywords)
    if model is not None:
        settings["model"] = {**_model(model), **settings.get("model", {})}
    section, rows = _data(data, eval_data)
    settings["data"] = {**section, **settings.get("data", {})}
    functions: tuple[GivenFunction, ...] = ()
    if issubclass(root, RLConfig):
        rewards = None if reward is None else read_rewards(reward)
        if rows and "format" not in settings["data"]:
            named = rows.get("path") or rows["eval_path"]
            if rewards is not None and rewards.in_trl and "columns" not in settings["data"]:
                settings["data"]["format"] = "trl"  # in which functions get all columns
            else:
                settings["data"]["columns"] = named.named_columns(settings["data"].get("columns", {}))
        if rewards is not None:
            functions = rewards.functions
            settings["verifier"] = {**rewards.verifier, **settings.get("verifier", {})}
        elif rows and _judge(values, settings) is None and root is RLConfig:
            raise ConfigError(
                'reward must be given with data: a function, the name of a verifier such as "math", or a list of these'
            )
    elif reward is not None:
        raise ConfigError(f"reward is for reinforcement learning, got it with method {_kind(values, keywords)!r}")
    if not settings["data"]:
        del settings["data"]
    return RunOrder(make_config(dict(values), overrides, settings), rows, functions)


def _model(model: Any) -> dict[str, Any]:
    folder = getattr(model, "folder", model)  # a `Result`
    if isinstance(folder, Mapping):
        return dict(folder)
    if not isinstance(folder, str | Path):
        raise ConfigError(f"model must be a folder, a hub id, a short name, a run or a result, got {model!r}")
    return {"path": str(folder)}


def _data(data: Any, eval_data: Any) -> tuple[dict[str, Any], dict[str, GivenRows]]:
    """The section, and the rows with the setting that is to name their file."""
    section, rows = dict[str, Any](), dict[str, GivenRows]()
    if isinstance(data, Mapping) and data.keys() <= DataConfig.model_fields.keys() | {"mix", "train_on", "max_tokens"}:
        section.update(data)
    elif isinstance(data, str | Path):
        section.update(_source(str(data)))
    elif data is not None:
        rows["path"] = read_given("data", data)
        section["path"] = f"{FOLDER}/{_FILES['path']}"
    if isinstance(eval_data, str | Path):
        section["eval_path"] = str(eval_data)
    elif eval_data is not None:
        rows["eval_path"] = read_given("eval_data", eval_data)
        section["eval_path"] = f"{FOLDER}/{_FILES['eval_path']}"
    return section, rows


def _source(text: str) -> dict[str, Any]:
    """A file or folder, a generated task, or a data set on the hub."""
    if text in TASKS:
        return {"task": text}
    path = Path(text).expanduser()
    is_file = path.exists() or path.suffix in _ENDINGS or text.startswith("shipped:")
    return {"path": text} if is_file or "/" not in text else {"hub": text}


def _judge(values: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    """Who judges the answers, if somebody says so."""
    given = [section.get("verifier", {}).get("name") for section in (values, settings)]
    known = settings["data"].get("format") or settings["data"].get("task") or settings["data"].get("gym")
    return next((name for name in (*given, known) if name), None)


def _kind(values: Mapping[str, Any], keywords: Mapping[str, Any]) -> str:
    method = keywords.get("method", values.get("method", {}))
    return str(method.get("kind", "rl")) if isinstance(method, Mapping) else "rl"


def _root_of(values: Mapping[str, Any], keywords: Mapping[str, Any]) -> type[Root]:
    return ROOTS.get(_kind(values, keywords), RLConfig)  # an unknown kind is refused with the settings
