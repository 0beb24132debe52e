"""What drafts save: the same answers sampled with and without `engine.speculation`, by a real model.

    python benchmarks/speculation.py [--model smollm2-135m] [--data gsm8k.jsonl] [--sequences 1,2,4] [--tokens 128]

Answers of `--sequences` at a time to questions of the file (`question`, or the messages of `prompt`), each to its end
or its limit of tokens, temperature 1, log-probs. Both engines share the model and take turns, each after a first round
that builds kernels and graphs. Prints tokens per second, tokens a sequence gets in a step, and how many answers are the
same ones: all in float32; in bfloat16 a close call may fall otherwise, because a product of more rows rounds otherwise.
`--ragged`: all at once, 8 samples a question, as a step of RL: drafts come when few are left.
"""

import argparse
import asyncio
import gc
import json
import time
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy

ASK = "Please reason step by step, and put your final answer within \\boxed{}."


def questions(file: Path | None, policy: Policy, count: int) -> list[tuple[int, ...]]:
    text = (file or resources.files("kitae") / "data/shipped/word_problems.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()[:count]]
    tokenizer: Any = policy.tokenizer
    found = []
    for row in rows:
        asked = row.get("question") or row["prompt"]
        said = (
            [{"role": "system", "content": ASK}, {"role": "user", "content": asked}]
            if isinstance(asked, str)
            else asked
        )
        ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
        found.append(tuple(ids))
    return found


class Side:
    """An engine, and what it has done."""

    def __init__(self, policy: Policy, draft_tokens: int, args: argparse.Namespace) -> None:
        config = EngineConfig(memory_gb=args.memory_gb, max_batch=512, prefill_tokens=8192)
        self.engine = NativeEngine(policy, config, draft_tokens=draft_tokens)
        self.sampling = SamplingParams(
            args.temperature,
            args.tokens,
            stop_tokens=tuple(t for t in [policy.tokenizer.eos_token_id] if t is not None),
        )
        self.steps = self.tokens = 0
        self.seconds = 0.0
        self.answers: dict[str, tuple[int, ...]] = {}

    async def ask(self, prompts: list[tuple[int, ...]], name: str, samples: int, counts: bool = True) -> None:
        decode, steps = self.engine.runner.decode, 0

        def counted(running: list[Any], width: int = 1) -> Any:
            nonlocal steps
            steps += len(running)
            return decode(running, width)

        self.engine.runner.decode = counted  # type: ignore[method-assign]
        requests = [
            Request(f"{name}/{i}/{j}", prompt, self.sampling, 100 * i + j, share=f"{name}/{i}")
            for i, prompt in enumerate(prompts)
            for j in range(samples)
        ]
        began = time.perf_counter()
        done: list[Completion] = await asyncio.gather(*(self.engine.generate(r) for r in requests))
        seconds = time.perf_counter() - began
        del self.engine.runner.decode
        if counts:
            self.seconds += seconds
            self.tokens += sum(len(c.tokens) for c in done)
            self.steps += steps + len(done)  # the first token comes with the prompt
            self.answers |= {c.id: c.tokens for c in done}


async def compare(policy: Policy, prompts: list[tuple[int, ...]], together: int, args: argparse.Namespace) -> None:
    samples = 8 if args.ragged else 1
    sides = [Side(policy, count, args) for count in (0, args.draft_tokens)]
    batches = [prompts[i : i + together] for i in range(0, len(prompts), together)]
    for side in sides:
        await side.ask(batches[0], "first", samples, counts=False)
    for number, batch in enumerate(batches):
        for side in sides:
            await side.ask(batch, f"{number}", samples)
    plain, drafted = sides
    same = sum(plain.answers[key] == drafted.answers[key] for key in plain.answers)
    before, now = (side.tokens / side.seconds for side in sides)
    print(
        f"{together * samples:9} {plain.tokens:7} {before:8,.0f} {now:9,.0f} {now / before:6.2f} "
        f"{drafted.tokens / drafted.steps:12.2f} {same:5} of {len(plain.answers)}",
        flush=True,
    )
    for side in sides:
        await side.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--data", type=Path, help="questions; without it those that come with Kitae")
    parser.add_argument("--sequences", default="1,2,4")
    parser.add_argument("--questions", type=int, default=8, help="asked of each number of sequences at least")
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="most in an answer")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--memory-gb", type=float, default=1.0)
    parser.add_argument("--ragged", action="store_true", help="8 samples of each question")
    args = parser.parse_args()
    policy = load_policy(ModelConfig(path=args.model, dtype=args.dtype))
    print(f"{args.model}, {str(policy.dtype)[6:]}, {policy.device}; torch {torch.__version__}")
    print("sequences  tokens    tok/s  drafting  times  tokens/step  the same answers")
    for together in map(int, args.sequences.split(",")):
        count = -(-max(args.questions, together) // together) * together
        asyncio.run(compare(policy, questions(args.data, policy, count), together, args))
        gc.collect()  # engines refer to themselves, and the next ones need their memory


if __name__ == "__main__":
    main()
