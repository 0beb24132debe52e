"""TRL's offline trainers on rows that Kitae trains on too: losses of each step, final weights, seconds and memory.

    /path/to/peer-env/bin/python benchmarks/peers/trl_stages.py --work FOLDER --kind dpo

Runs in an environment of its own (see README.md beside this file) and imports nothing of Kitae. `benchmarks/offline.py`
makes the folder: `model` (and `teacher`), and `rows.json`, which has every row as text and as the tokens that Kitae
trains on. Texts go through TRL's own preparation; the script fails where its tokens differ from those of the file.

kinds: sft, dpo (with --loss sigmoid, hinge, ipo, robust), kto, reward, jsd. A reward model's head starts at zero, as
Kitae's does. jsd is SFTTrainer with GKDTrainer's loss on the rows as they are (TRL's own trainer samples).

Set: fp32, rows in the order of the file, a constant learning rate, AdamW with the betas of Kitae. The loss of a step is
what TRL's `compute_loss` returned, unrounded. Loading is not timed. Prints one line of JSON.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import trl
from datasets import Dataset
from peak import peak_gb
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.experimental.gkd import GKDTrainer

Rows = list[dict[str, Any]]
PADDING = "<|endoftext|>"  # in no row


class StepTimer(TrainerCallback):
    """Wall and processor time of each optimizer step, its passes included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self._start = self._cpu_start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self.cpu_seconds.append(time.process_time() - self._cpu_start)
        print(f"step {len(self.seconds)}: {self.seconds[-1]:.2f} s", file=sys.stderr, flush=True)


class Distillation(SFTTrainer):
    """GKD on rows that are given: the loss is TRL's, at the temperature of 1 that its own trainer uses."""

    teacher: Any
    beta: float

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        with torch.no_grad():
            teacher = self.teacher(**inputs).logits[:, :-1]
        student = model(**inputs).logits[:, :-1]
        return GKDTrainer.generalized_jsd_loss(
            student, teacher, labels[:, 1:], beta=self.beta, num_items_in_batch=num_items_in_batch
        )


def losses_of(trainer: Any) -> list[float]:
    """A list that `compute_loss` adds to."""
    found: list[float] = []
    compute = trainer.compute_loss

    def noted(*args: Any, **kwargs: Any) -> Any:
        loss = compute(*args, **kwargs)
        found.append(float(loss.detach()))
        return loss

    trainer.compute_loss = noted
    return found


def sft(rows: Rows, common: dict[str, Any], args: argparse.Namespace) -> Any:
    labels = [[t if m else -100 for t, m in zip(r["ids"], r["mask"], strict=True)] for r in rows]
    dataset = Dataset.from_list([{"input_ids": r["ids"], "labels": x} for r, x in zip(rows, labels, strict=True)])
    settings = SFTConfig(**common, max_length=None, packing=False)
    if args.kind == "sft":
        return SFTTrainer(policy(args), settings, train_dataset=dataset, processing_class=tokenizer(args))
    trainer = Distillation(policy(args), settings, train_dataset=dataset, processing_class=tokenizer(args))
    trainer.teacher = AutoModelForCausalLM.from_pretrained(Path(args.work) / "teacher", dtype=torch.float32).eval()
    trainer.beta = args.beta
    return trainer


def dpo(rows: Rows, common: dict[str, Any], args: argparse.Namespace) -> Any:
    texts = [{key: r[key] for key in ("prompt", "chosen", "rejected")} for r in rows]
    settings = DPOConfig(
        **common, loss_type=[args.loss], beta=args.beta, max_length=None, label_smoothing=args.label_smoothing,
        precompute_ref_log_probs=args.precompute,
    )  # fmt: skip
    return DPOTrainer(
        policy(args), args=settings, train_dataset=Dataset.from_list(texts), processing_class=tokenizer(args)
    )


def kto(rows: Rows, common: dict[str, Any], args: argparse.Namespace) -> Any:
    texts = [{key: r[key] for key in ("prompt", "completion", "label")} for r in rows]
    settings = KTOConfig(
        **common, beta=args.beta, max_length=None, undesirable_weight=args.undesirable,
        precompute_ref_log_probs=args.precompute,
    )  # fmt: skip
    return KTOTrainer(
        policy(args), args=settings, train_dataset=Dataset.from_list(texts), processing_class=tokenizer(args)
    )


def reward(rows: Rows, common: dict[str, Any], args: argparse.Namespace) -> Any:
    texts = [{key: r[key] for key in ("prompt", "chosen", "rejected")} | margin(r) for r in rows]
    model = AutoModelForSequenceClassification.from_pretrained(
        Path(args.work) / "model", num_labels=1, dtype=torch.float32
    )
    torch.nn.init.zeros_(model.score.weight)
    # The class reads the score at the last token that is not padding. With the end of turn as padding, which is what
    # SmolLM2's tokenizer says, that is the token before the end of turn.
    words = tokenizer(args)
    words.pad_token = PADDING
    model.config.pad_token_id = words.pad_token_id
    settings = RewardConfig(**common, max_length=None, center_rewards_coefficient=args.centring)
    return RewardTrainer(model, settings, train_dataset=Dataset.from_list(texts), processing_class=words)


def margin(row: dict[str, Any]) -> dict[str, float]:
    return {"margin": row["margin"]} if "margin" in row else {}


def policy(args: argparse.Namespace) -> Any:
    return AutoModelForCausalLM.from_pretrained(Path(args.work) / "model", dtype=torch.float32)


def tokenizer(args: argparse.Namespace) -> Any:
    return AutoTokenizer.from_pretrained(Path(args.work) / "model")


def check_tokens(trainer: Any, rows: Rows, kind: str) -> None:
    """Both sides must train on the same tokens."""
    for i, (row, prepared) in enumerate(zip(rows, trainer.train_dataset, strict=True)):
        for key in ("prompt_ids", "chosen_ids", "rejected_ids", "completion_ids"):
            if key in prepared and kind != "reward" and prepared[key] != row[key]:
                raise SystemExit(f"row {i}: {key} must be {row[key]}, got {prepared[key]}")
            if key in ("chosen_ids", "rejected_ids") and kind == "reward":
                whole = row["prompt_ids"] + row[key]
                if prepared[key] != whole:
                    raise SystemExit(f"row {i}: {key} must be {whole}, got {prepared[key]}")


KINDS = {"sft": sft, "jsd": sft, "dpo": dpo, "kto": kto, "reward": reward}
ROWS = {"sft": "sft", "jsd": "sft", "dpo": "pairs", "kto": "rated", "reward": "pairs"}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with TRL on rows that are given.")
    parser.add_argument("--work", required=True, help="folder that benchmarks/offline.py made")
    parser.add_argument("--kind", required=True, choices=KINDS)
    parser.add_argument("--rows", help="the list in rows.json; else that of the kind")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="rows of a step")
    parser.add_argument("--rows-per-pass", type=int, default=0, help="rows of a pass; 0: all of a step")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--loss", default="sigmoid", help="of dpo")
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--undesirable", type=float, default=1.0, help="weight of bad responses in kto")
    parser.add_argument("--centring", type=float, default=None, help="of reward")
    parser.add_argument("--precompute", action="store_true", help="log-probs of the reference before the first step")
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--save", help="folder for the trained model")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    rows: Rows = json.loads((Path(args.work) / "rows.json").read_text())[args.rows or ROWS[args.kind]]
    passes = args.rows_per_pass or args.batch
    common = {
        "output_dir": str(Path(args.work) / "trl"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": args.gradient_checkpointing,
        "per_device_train_batch_size": passes,
        "gradient_accumulation_steps": args.batch // passes,
        "max_steps": args.steps,
        "learning_rate": args.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    trainer = KINDS[args.kind](rows, common, args)
    check_tokens(trainer, rows, args.kind)
    timer, losses = StepTimer(), losses_of(trainer)
    trainer.add_callback(timer)
    trainer.remove_callback(transformers.PrinterCallback)
    began = time.perf_counter()
    trainer.train()
    if args.save:
        trainer.save_model(args.save)
    result = {
        "kind": args.kind,
        "losses": losses,
        "seconds_per_step": [round(s, 3) for s in timer.seconds],
        "cpu_seconds_per_step": [round(s, 3) for s in timer.cpu_seconds],
        "seconds": round(time.perf_counter() - began, 2),
        "peak_rss_gb": round(peak_gb(), 2),
        "rows_per_pass": passes,
        "gradient_checkpointing": args.gradient_checkpointing,
        "threads": torch.get_num_threads(),
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
