"""mini-swe-agent on a task in a folder of its own, with its own prompts."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["MSWEA_SILENT_STARTUP"] = "1"
os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"  # a model that has no price

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model


def main() -> None:
    config = yaml.safe_load(Path(builtin_config_dir / "mini.yaml").read_text())
    config["agent"].pop("mode", None)
    config["model"] = {**config["model"], "model_name": "openai/policy"}
    with tempfile.TemporaryDirectory() as folder:
        model = get_model(config=config["model"])
        agent = DefaultAgent(model, LocalEnvironment(**{**config["environment"], "cwd": folder}), **config["agent"])
        agent.run(json.load(sys.stdin)["question"])


main()
