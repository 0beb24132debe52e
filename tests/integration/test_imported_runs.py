"""Settings of other trainers, imported by the command and trained for some steps, with rewards that came with them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kitae import train

FILES = Path(__file__).parents[1] / "data" / "imports"
RUN = "from kitae.cli.main import run; run()"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of those who come over, and data in their layouts."""
    for file in FILES.iterdir():
        shutil.copy(file, tmp_path)
    sums = [{"problem": f"{i} + 1 = ?", "solution": str(i + 1)} for i in range(8)]
    lines: dict[str, list[dict[str, Any]]] = {
        "prompts.jsonl": [{"prompt": [{"role": "user", "content": s["problem"]}]} for s in sums],
        "problems.jsonl": sums,
        "answers.jsonl": [{"prompt": s["problem"], "completion": s["solution"]} for s in sums],
    }
    for name, rows in lines.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    import pyarrow
    import pyarrow.parquet

    table = [
        {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": s["problem"]}], "ability": "math",
         "reward_model": {"style": "rule", "ground_truth": s["solution"]}, "extra_info": {"index": i}}
        for i, s in enumerate(sums)
    ]  # fmt: skip
    for name in ("verl.parquet", "held_out.parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.sentinel(keep=2)
@pytest.mark.parametrize(
    ("peer", "source", "steps"),
    [
        ("trl", "grpo_letters.py", 3),
        ("trl", "grpo_numbers.py", 2),
        ("trl", "sft_main.py", 1),
        ("verl", "verl_grpo.sh", 2),
        ("verl", "verl_ppo.yaml", 2),
        ("openrlhf", "openrlhf.sh", 2),
    ],
)
def test_what_is_imported_trains(peer: str, source: str, steps: int, folder: Path) -> None:
    command = [sys.executable, "-c", RUN, "import", peer, source, "-o", "mine.toml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mapped" in done.stdout and "train with: kitae train mine.toml" in done.stdout
    result = train("mine.toml")
    trained = [metrics for metrics in result.metrics if metrics["kind"] == "step"]
    assert len(trained) == steps
    assert all(metrics.get("errors", 0) == 0 for metrics in trained)
    again = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert again.returncode == 1 and "is there already" in again.stderr


SCRIPTS = {  # of the kind that TRL's documentation begins with: nothing but a model and a data set of the hub
    "grpo": (
        "from trl import GRPOTrainer\nfrom trl.rewards import accuracy_reward\nfrom datasets import load_dataset\n"
        "rows = load_dataset('lab/sums', split='train')\n"
        "GRPOTrainer(model='lab/model', reward_funcs=accuracy_reward, train_dataset=rows).train()\n",
        {"prompt": [{"role": "user", "content": "1 + 1?"}], "solution": "$2$"},
        {"sampling.max_tokens": 12},
    ),
    "sft": (
        "from trl import SFTTrainer\nfrom datasets import load_dataset\n"
        "SFTTrainer(model='lab/model', train_dataset=load_dataset('lab/sums', split='train')).train()\n",
        {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}], "num_turns": 1},
        {},
    ),
    "dpo": (
        "from trl import DPOTrainer\nfrom datasets import load_dataset\n"
        "DPOTrainer(model='lab/model', train_dataset=load_dataset('lab/sums', split='train')).train()\n",
        {side: [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": answer}]
         for side, answer in (("chosen", "2"), ("rejected", "3"))},
        {},
    ),
}  # fmt: skip


@pytest.mark.sentinel(keep=1)
@pytest.mark.parametrize("kind", SCRIPTS)
def test_scripts_with_data_of_the_hub_train_on_a_folder_of_its_layout(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow
    import pyarrow.parquet

    from kitae.models.tiny import make_tiny

    monkeypatch.chdir(tmp_path)
    script, row, settings = SCRIPTS[kind]
    make_tiny(tmp_path / "lab/model", "qwen2")
    (tmp_path / "lab/sums/data").mkdir(parents=True)
    table = pyarrow.Table.from_pylist([row] * 16)
    pyarrow.parquet.write_table(table, tmp_path / "lab/sums/data/train-00000-of-00001.parquet")
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-c", RUN, "import", "trl", "script.py", "-o", "mine.toml"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    given = {"training.steps": 2, **settings}
    result = train("mine.toml", overrides=[f"{key}={value}" for key, value in given.items()])
    assert len([metrics for metrics in result.metrics if metrics["kind"] == "step"]) == 2
