"""Seconds a step of TRL's GRPOTrainer takes on a CPU: the peer of Kitae's own step benchmark.

    /path/to/peer-env/bin/python benchmarks/peers/trl_step.py --model FOLDER

Runs in an environment of its own (see README.md beside this file) and imports nothing of Kitae. The work is fixed by
the arguments: every step samples `prompts` x `group` completions of exactly `tokens` tokens and makes one optimizer
step on them. The end token is forbidden until the last position, so no completion is short, and the reward is a hash of
the text, so every group has signal and nothing can be skipped.

What is TRL's default and stays so unless a flag says otherwise: gradient checkpointing on, 8 sequences in a forward
and backward pass, transformers' `generate` for sampling, no KL term and no reference model. What is set: fp32 (TRL
asks for bf16), no logging service, no checkpoints. Loading the model is not timed.

Prints one line of JSON on standard output, e.g.
{"seconds_per_step": [84.91, ...], "peak_rss_gb": 4.37, "prompt_tokens": 393, "trl": "1.16.0", ...}
"""

import argparse
import json
import os
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import trl
from datasets import Dataset
from peak import peak_gb
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS = Path(__file__).with_name("prompts.json")


class StepTimer(TrainerCallback):
    """Time from the start of a step, which samples its completions, to the end of its optimizer step.

    Processor time is kept beside wall time: where wall time is well above processor time / threads, the machine
    was busy with something else and the figure does not count.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self._start = self._cpu_start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self.cpu_seconds.append(time.process_time() - self._cpu_start)
        print(f"step {len(self.seconds)}: {self.seconds[-1]:.1f} s", file=sys.stderr, flush=True)


class CallTimer:
    """Wall time of each call of a method, so that a step can be split into sampling and the rest."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds: list[float] = []
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds.append(time.perf_counter() - start)

        setattr(owner, name, timed)


def hash_reward(completions: list[Any], **_: Any) -> list[float]:
    """A reward in [0, 1] that looks random, depends on the text alone and so differs within every group."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [zlib.crc32(text.encode()) % 1001 / 1000 for text in texts]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time GRPO steps of TRL on a CPU.")
    parser.add_argument("--model", required=True, help="folder with a Hugging Face chat model and its tokenizer")
    parser.add_argument("--prompts", type=int, default=8, help="prompts in a step; at most those in prompts.json")
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens in each completion")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rows-per-pass", type=int, default=8, help="sequences in a forward and backward pass")
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast over fp32 weights instead of fp32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = args.prompts * args.group
    if rows % args.rows_per_pass:
        parser.error(f"--rows-per-pass must divide prompts x group = {rows}, got {args.rows_per_pass}")
    return args


def main() -> None:
    args = parse_arguments()
    conversations = json.loads(PROMPTS.read_text())
    if args.prompts > len(conversations):
        raise SystemExit(f"--prompts must be at most {len(conversations)}, the number in {PROMPTS.name}")
    conversations = conversations[: args.prompts]

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations]
    prompt_tokens = [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=args.bf16,
            gradient_checkpointing=args.gradient_checkpointing,
            num_generations=args.group,
            max_completion_length=args.tokens,
            generation_kwargs={"min_new_tokens": args.tokens},
            # One generation batch, cut into passes that accumulate, makes one optimizer step.
            per_device_train_batch_size=args.rows_per_pass,
            gradient_accumulation_steps=args.prompts * args.group // args.rows_per_pass,
            max_steps=args.steps,
            learning_rate=1e-5,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=args.seed,
        )
        timer = StepTimer()
        trainer = GRPOTrainer(
            model=model,
            args=config,
            reward_funcs=hash_reward,
            train_dataset=Dataset.from_list([{"prompt": conversation} for conversation in conversations]),
            processing_class=tokenizer,
            callbacks=[timer],
        )
        # The step is quiet on standard output: the logs of the trainer are read below, not printed.
        trainer.remove_callback(transformers.PrinterCallback)
        sampling = CallTimer(trainer.model, "generate")
        trainer.train()

    logs = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    lengths = {(entry["completions/min_length"], entry["completions/max_length"]) for entry in logs}
    if len(logs) != args.steps or lengths != {(args.tokens, args.tokens)}:
        raise SystemExit(f"every completion must have {args.tokens} tokens, got (min, max) lengths {sorted(lengths)}")
    result = {
        "seconds_per_step": [round(s, 2) for s in timer.seconds],
        "cpu_seconds_per_step": [round(s, 2) for s in timer.cpu_seconds],
        "sampling_seconds_per_step": [round(s, 2) for s in sampling.seconds],
        "peak_rss_gb": round(peak_gb(), 2),
        "prompt_tokens": sum(prompt_tokens),
        "prompts": args.prompts,
        "group": args.group,
        "completion_tokens": args.tokens,
        "share_of_groups_without_signal": max(entry["frac_reward_zero_std"] for entry in logs),
        "rows_per_pass": args.rows_per_pass,
        "gradient_checkpointing": args.gradient_checkpointing,
        "precision": "bf16 autocast" if args.bf16 else "fp32",
        "threads": torch.get_num_threads(),
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
