"""Train language models by reinforcement learning with verifiable rewards, and what comes before it.

What this module names is Kitae's Python API (docs/api.md). It is looked up when it is asked for, so that `import kitae`
loads nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kitae.api import evaluate as evaluate
    from kitae.api import load as load
    from kitae.api import resume as resume
    from kitae.api import sample as sample
    from kitae.api import sample_to_file as sample_to_file
    from kitae.api import start as start
    from kitae.api import train as train
    from kitae.engines.base import Engine as Engine
    from kitae.engines.constraint import Constraint as Constraint
    from kitae.envs.base import Environment as Environment
    from kitae.envs.base import Observation as Observation
    from kitae.errors import KitaeError as KitaeError
    from kitae.evaluation.measure import Evaluation as Evaluation
    from kitae.observe.observer import Observer as Observer
    from kitae.offline.answer_selection import Selection as Selection
    from kitae.offline.base import Method as Method
    from kitae.scripting.live_run import Step as Step
    from kitae.store.run_folder import Result as Result
    from kitae.trainer.base import Trainer as Trainer
    from kitae.types import Group as Group
    from kitae.types import Message as Message
    from kitae.types import Prompt as Prompt
    from kitae.types import Rollout as Rollout
    from kitae.types import Score as Score
    from kitae.verifiers.base import ScoreFunction as ScoreFunction
    from kitae.verifiers.base import batched as batched

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("train", "start", "resume", "evaluate", "sample", "sample_to_file", "load"), "kitae.api"),
    **dict.fromkeys(("Prompt", "Message", "Rollout", "Group", "Score"), "kitae.types"),
    **dict.fromkeys(("Environment", "Observation"), "kitae.envs.base"),
    "Result": "kitae.store.run_folder",
    "Step": "kitae.scripting.live_run",
    "Evaluation": "kitae.evaluation.measure",
    "Selection": "kitae.offline.answer_selection",
    "KitaeError": "kitae.errors",
    "Engine": "kitae.engines.base",
    "Constraint": "kitae.engines.constraint",
    "ScoreFunction": "kitae.verifiers.base",
    "batched": "kitae.verifiers.base",
    "Trainer": "kitae.trainer.base",
    "Method": "kitae.offline.base",
    "Observer": "kitae.observe.observer",
}
"""What is promised, and where it lives."""

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kitae' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
