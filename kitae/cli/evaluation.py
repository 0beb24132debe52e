"""`kitae eval`."""

import json
from pathlib import Path

from kitae.cli.locate import find_recipe
from kitae.cli.training import check
from kitae.config import Config, load_config, override_config
from kitae.errors import ConfigError, StoreError


def evaluate(target: str, overrides: list[str], model: str | None) -> None:
    config = _config(target, overrides, model)
    if config.eval.prompts == 0:
        raise ConfigError("eval.prompts must be at least 1 for an evaluation, got 0")
    check(config)
    from rich.console import Console

    from kitae.pipeline.session import evaluate_model

    console = Console()
    with console.status(f"evaluating {config.model.path}"):
        found = evaluate_model(config)
    k = found.samples
    print(f"model        {config.model.path}")
    print(f"prompts      {found.prompts} held out, {k} sample{'s' if k > 1 else ''} each, "
          f"temperature {config.eval.temperature:g}")  # fmt: skip
    print(f"avg@{k:<8} {found.avg}   (mean [95 % interval over prompts])")
    for n, estimate in found.passed.items():
        if n > 1:
            print(f"pass@{n:<7} {estimate}")
    print(f"length       {found.length:.1f} tokens, {found.truncated:.1%} truncated")
    if found.errors:
        print(f"errors       {found.errors} answers could not be judged and are left out")
    print(json.dumps({"model": config.model.path, **found.row()}))


def _config(target: str, overrides: list[str], model: str | None) -> Config:
    folder = Path(target)
    if (folder / "config.json").is_file() and (folder / "journal.sqlite").is_file():
        from kitae.store.run import read_config

        trained = folder / "model"
        if model is None and not trained.is_dir():
            raise StoreError(f"{folder} has no trained model yet; finish it with: kitae resume {folder}")
        path = ["model.lora_rank=0"] if model is None else []
        return override_config(read_config(folder), [f"model.path={model or trained}", *path, *overrides])
    return load_config(find_recipe(target), [*([f"model.path={model}"] if model else []), *overrides])
