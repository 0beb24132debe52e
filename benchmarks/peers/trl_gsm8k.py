"""TRL's GRPOTrainer on GSM8K for a given time: the peer of the recipe `gsm8k`.

    PYTHONPATH=. python benchmarks/peers/trl_gsm8k.py --model FOLDER --data train.jsonl --output trl --seconds 300

Prompt, reward (Kitae's `math` verifier, the only thing of Kitae that is imported), samples, clipping, momenta and
warm-up are those of the recipe; the learning rate stays where it is after the warm-up. Weights are float32 under bf16
autocast, as Kitae keeps them. Groups without signal stay in the batch, and so in the number of tokens that the loss is
divided by: Kitae leaves them out.

Of what TRL offers without another engine, the fastest is set: no recomputed activations, large passes, a fused
optimizer. Sampling is transformers' `generate`. `--sampling continuous` takes its continuous batching instead; TRL then
turns the weights themselves into bf16, where steps of 2e-6 are mostly rounded away, so it is there to be timed.

The clock runs within steps: loading and saving are not counted. Every `--save-seconds`, and at the end, weights go to
OUTPUT/step-000016, a model folder in bf16. OUTPUT/steps.jsonl gets a line a step, e.g.
{"step": 16, "seconds": 289.4, "step_seconds": 18.1, "reward": 0.24, "length": 288.0, "saved": true}
"""

import argparse
import copy
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from kitae.verifiers.math import math

INSTRUCTION = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."


class Clock(TrainerCallback):
    """Adds up the time within steps, keeps weights now and then, and ends the run when the time is over."""

    def __init__(self, args: argparse.Namespace, tokenizer: Any) -> None:
        self._args, self._tokenizer = args, tokenizer
        self._seconds = self._start = 0.0
        self._saves = 0
        self._line: dict[str, Any] = {}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, _: Any, state: Any, control: Any, model: Any = None, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took = time.perf_counter() - self._start
        self._seconds += took
        over = self._seconds >= self._args.seconds or state.global_step >= self._args.steps
        due = over or self._seconds >= (self._saves + 1) * self._args.save_seconds
        self._line = {"step": state.global_step, "seconds": round(self._seconds, 2), "step_seconds": round(took, 2)}
        self._line["saved"] = due
        if due:
            self._saves = int(self._seconds // self._args.save_seconds)
            save(model, self._tokenizer, self._args.output / f"step-{state.global_step:06d}")
        control.should_training_stop = control.should_training_stop or over

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        """Comes after the end of each step, with its numbers."""
        if logs and "reward" in logs:
            line = json.dumps(self._line | {"reward": logs["reward"], "length": logs["completions/mean_length"]})
            print(line, flush=True)
            with (self._args.output / "steps.jsonl").open("a") as file:
                file.write(line + "\n")


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def right(completions: list[Any], reference: list[str], **_: Any) -> list[float]:
    return [math(c[0]["content"], wanted, {}).value for c, wanted in zip(completions, reference, strict=True)]


def read(path: Path) -> Dataset:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": INSTRUCTION.replace("{question}", row["question"])}],
                "reference": row["answer"].rpartition("####")[2].strip(),
            }
            for row in rows
        ]
    )


def settings(args: argparse.Namespace) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(args.output),
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        gradient_checkpointing=False,
        use_transformers_continuous_batching=args.sampling == "continuous",
        num_generations=args.group,
        max_completion_length=args.tokens,
        # One generation batch, cut into passes that accumulate, makes one optimizer step.
        per_device_train_batch_size=args.rows_per_pass,
        gradient_accumulation_steps=args.prompts * args.group // args.rows_per_pass,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        adam_beta2=0.99,
        optim="adamw_torch_fused",
        epsilon_high=0.28,
        loss_type="dapo",
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=args.seed,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with TRL's GRPOTrainer on GSM8K for a given time.")
    parser.add_argument("--model", type=Path, required=True, help="folder with a Hugging Face chat model")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with question and answer, as GSM8K has them")
    parser.add_argument("--output", type=Path, required=True, help="folder for weights and steps.jsonl")
    parser.add_argument("--seconds", type=float, default=300.0, help="time within steps after which it ends")
    parser.add_argument("--save-seconds", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=100_000, help="end after so many steps at the latest")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-6)
    parser.add_argument("--rows-per-pass", type=int, default=16, help="sequences in a forward and backward pass")
    parser.add_argument("--sampling", choices=("generate", "continuous"), default="generate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = args.prompts * args.group
    if rows % args.rows_per_pass:
        parser.error(f"--rows-per-pass must divide prompts x group = {rows}, got {args.rows_per_pass}")
    return args


def main() -> None:
    args = parse_arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        args=settings(args),
        reward_funcs=right,
        train_dataset=read(args.data),
        processing_class=tokenizer,
        callbacks=[Clock(args, tokenizer)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main()
