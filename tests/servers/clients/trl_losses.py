"""Losses and gradients of TRL's GRPOTrainer and RLOOTrainer on a batch that is given: `trl_losses.py CASES.json`.

The trainer is a real one, made with the settings of the case. What it would compute with models is put in its place:
the answers, their log-probs under π_θ, π_old, the engine and the reference, and entropies. The rest is TRL's code.
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, logging
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

logging.set_verbosity_error()
TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def rows(batch: dict[str, Any], name: str, length: int) -> torch.Tensor:
    return torch.tensor([row + [0.0] * (length - len(row)) for row in batch[name]])


def rewards_of(batch: dict[str, Any], names: list[str]) -> list[Any]:
    def make(name: str) -> Any:
        def reward(completions: Any, **_: Any) -> list[float | None]:
            return list(batch["rewards"][name])

        reward.__name__ = name
        return reward

    return [make(name) for name in names]


def trainer_of(case: dict[str, Any], batch: dict[str, Any], model: Path, folder: str) -> Any:
    kind, config = TRAINERS[case["trainer"]]
    count, settings = len(batch["logp"]), dict(case["settings"])
    served = settings.pop("use_vllm", False)
    args = config(
        output_dir=folder, use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False,
        per_device_train_batch_size=count, num_generations=batch["group"], num_iterations=2, disable_tqdm=True,
        max_completion_length=batch["limit"], **settings,
    )  # fmt: skip
    trainer = kind(
        model=str(model), reward_funcs=rewards_of(batch, case["rewards"]), args=args,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * count),
        processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    trainer.use_vllm = served
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def run(case: dict[str, Any], batch: dict[str, Any], model: Path, folder: str) -> dict[str, Any]:
    trainer = trainer_of(case, batch, model, folder)
    end = trainer.processing_class.eos_token_id
    lengths = [len(row) for row in batch["logp"]]
    longest = max(lengths)
    ids = [[5] * (n - 1) + [5 if cut else end] for n, cut in zip(lengths, batch["truncated"], strict=True)]
    logp = rows(batch, "logp", longest).requires_grad_()
    entropy = rows(batch, "entropy", longest).requires_grad_()

    def answers(prompts: list[Any]) -> Any:
        texts = ["y"] * len(ids)
        sampled = [list(row) for row in batch["mu"]]
        if case["trainer"] == "grpo":
            return [[1]] * len(ids), ids, None, texts, sampled, {}, None, []
        return [[1]] * len(ids), ids, texts

    def logps(policy: Any, *_: Any, **asked: Any) -> Any:
        if asked.get("compute_entropy"):
            return logp, entropy, None
        reference = policy is getattr(trainer, "ref_model", None)
        return rows(batch, "ref" if reference else "old", longest), None, None

    trainer._generate = answers
    trainer._get_per_token_logps_and_entropies = logps
    inputs = trainer._generate_and_score_completions([{"prompt": "x"}] * len(ids))
    loss = trainer._compute_loss(trainer.model, inputs)
    by_logp, by_entropy = torch.autograd.grad(loss, (logp, entropy), allow_unused=True)

    def cut(grad: torch.Tensor | None) -> list[list[float]]:
        return [[0.0] * n if grad is None else grad[i, :n].tolist() for i, n in enumerate(lengths)]

    return {"loss": loss.item(), "grad": cut(by_logp), "entropy_grad": cut(by_entropy)}


def main() -> None:
    warnings.filterwarnings("ignore")
    given = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shape = LlamaConfig(
            vocab_size=512, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
        LlamaForCausalLM(shape).save_pretrained(model)
        AutoTokenizer.from_pretrained(given["tokenizer"]).save_pretrained(model)
        found = {}
        for name, case in given["cases"].items():
            try:
                found[name] = run(case, given["batches"][case["batch"]], model, folder)
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
