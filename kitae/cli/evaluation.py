"""`kitae eval`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kitae.config.load import load_config, override_config
from kitae.config.locate import find_recipe
from kitae.config.root import RLConfig, reinforcement
from kitae.errors import ConfigError

if TYPE_CHECKING:
    from kitae.pipeline.evaluate import Evaluation


def evaluate(target: str, overrides: list[str], model: str | None, as_json: bool) -> None:
    config = _config(target, overrides, model)
    if config.eval.prompts == 0:
        raise ConfigError("eval.prompts must be at least 1 for an evaluation, got 0")
    from rich.console import Console

    from kitae.models.load import check_model
    from kitae.pipeline.session import evaluate_model
    from kitae.stages.start import check

    check(config)
    check_model(config.model)
    with Console(stderr=True).status(f"evaluating {config.model.path}"):
        found = evaluate_model(config)
    if as_json:
        print(json.dumps({"model": config.model.path, **found.row()}))
    else:
        _print(config, found)


def _print(config: RLConfig, found: "Evaluation") -> None:
    k = found.samples
    print(f"model        {config.model.path}")
    print(f"prompts      {found.prompts} held out, {k} sample{'s' if k > 1 else ''} each, "
          f"temperature {config.eval.temperature:g}")  # fmt: skip
    print(f"avg@{k:<8} {found.avg}   (mean score [95 % interval over prompts])")
    for n, estimate in found.passed.items():
        if n > 1:
            print(f"pass@{n:<7} {estimate}   (at least one of {n} scores 1)")
    print(f"length       {found.length:.1f} tokens, {found.truncated:.1%} truncated")
    if found.errors:
        print(f"errors       {found.errors} answers could not be judged and are left out")


def _config(target: str, overrides: list[str], model: str | None) -> RLConfig:
    from kitae.models.load import trained_model
    from kitae.store.run import is_run, read_config

    folder = Path(target)
    if is_run(folder):
        chosen = [f"model.path={model}"] if model else [f"model.path={trained_model(folder)}", "model.lora_rank=0"]
        config = reinforcement(read_config(folder), "kitae eval")
        return override_config(config, [*chosen, *overrides])
    given = load_config(find_recipe(target), [*([f"model.path={model}"] if model else []), *overrides])
    return reinforcement(given, "kitae eval")
