"""Models trained by the recipe `gsm8k`, or by a peer, asked with its prompt: GSM8K, and two sets they did not train on.

    python benchmarks/headline_scores.py MODEL runs/gsm8k-001 runs/gsm8k-002 --data DIR --json greedy.json
    python benchmarks/headline_scores.py MODEL runs/gsm8k-001 --data DIR --suites gsm8k --samples 8 --json avg8.json
    python benchmarks/headline_scores.py MODEL trl/step-* --suites valid.jsonl --json trl/scores.json

DIR has gsm8k/test.jsonl, svamp/test.jsonl and math500/test.jsonl. One sample is greedy, several have temperature 1.
Public sets are judged strictly (what stands in a box) and by the last number; a file is judged as the recipe judges.
Others are compared with the first model. `kitae eval` does the same with the prompts that suites have of their own.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kitae.config.locate import find_recipe
from kitae.config.recipe import load_config, override_config
from kitae.config.root import RLConfig, reinforcement
from kitae.evaluation.run_suites import Entrant, EvaluationSettings, evaluate_models
from kitae.evaluation.suites import KNOWN, Suite, find_suites
from kitae.models.load import trained_model
from kitae.store.run_folder import is_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders of models or runs")
    parser.add_argument("--suites", default="gsm8k,svamp,math500", help="names, or files as the recipe reads them")
    parser.add_argument("--data", help="folder with the public sets; default: the hub")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--prompts", type=int, help="ask so many of each suite; default: all")
    parser.add_argument("--set", nargs="*", default=[], help="settings: engine.memory_gb=8 eval.max_tokens=256 …")
    parser.add_argument("--output", type=Path, default=Path("evaluations"), help="keeps answers; none is asked twice")
    parser.add_argument("--json", type=Path, required=True, help="file for the numbers")
    arguments = parser.parse_args()
    sampling = [f"eval.samples={arguments.samples}", f"eval.temperature={int(arguments.samples > 1)}"]
    recipe = reinforcement(load_config(find_recipe("gsm8k")), "this benchmark")
    config = override_config(recipe, [*sampling, *arguments.set])
    asked = suites(config, arguments.suites.split(","), arguments.data)
    report = evaluate_models(
        [entrant(config, name) for name in arguments.models],
        [replace(suite, count=arguments.prompts) for suite in asked],
        EvaluationSettings(config.eval, config.engine, config.run.seed),
        arguments.output,
    )
    found = report.as_json()
    arguments.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    for row in found["results"]:
        last = f", {row['last/avg']:.4f} by the last number" if "last/avg" in row else ""
        print(f"{row['model']} {row['suite']}: {row['avg']:.4f} [{row['avg_low']:.4f}, {row['avg_high']:.4f}]{last}")


def entrant(config: RLConfig, name: str) -> Entrant:
    folder = Path(name)
    path = trained_model(folder) if is_run(folder) else folder
    return Entrant(name, config.model.model_copy(update={"path": str(path)}))


def suites(config: RLConfig, names: Sequence[str], folder: str | None) -> list[Suite]:
    """The suites, all with the instruction of the recipe: it says what a model was trained to answer."""
    found = find_suites(names, folder, config)
    instruction = {"instruction": config.data.instruction}
    return [replace(s, data=s.data.model_copy(update=instruction)) if s.name in KNOWN else s for s in found]


if __name__ == "__main__":
    main()
