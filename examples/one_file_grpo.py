"""Reinforcement learning with verifiable rewards, whole, in one file: plain torch and transformers.

    python examples/one_file_grpo.py --model tiny            a random 0.1 M-parameter Llama, in memory, under a minute
    python examples/one_file_grpo.py --model path/to/model   a chat model saved as a Hugging Face folder

The idea takes five lines, and the file follows them in this order:

    1. take questions whose answers a program can check;              `TinyReversal`, `ChatReversal`
    2. let the model answer each one several times (a group);         `sample`
    3. score every answer with that program;                          `score`
    4. within a group, better than average is good, worse is bad;     `advantages`
    5. make the tokens of good answers likelier, of bad ones rarer.   `update`

There is no reward model, no value network and no dataset of answers. Nobody shows the model how to reverse a list:
it tries, and the checker says how well that went.

Both models learn the same skill. The chat model reverses three two-digit numbers and scores 1 or 0; two solved
examples in its prompt make it succeed now and then, for what never succeeds cannot be reinforced. The tiny model
starts from noise, where the exact answer is too rare: it reverses three digits, and each one in its place earns credit.

What is left out, and what the framework adds:

    rollout engine   here all wait for the longest answer, and finished rows still cost compute; there none does
    verifiers        here a Python function that we trust; there workers that are killed when they hang
    algorithms       here GRPO alone; there every stage of the algorithm can be exchanged in the recipe
    memory           here full logits, padding and fp32; there chunked log-probs, packing, bf16, LoRA
    prompts          here each answer computes its prompt again; there a group computes it once, also in training
    durability       here a crash loses the run; there a journal, checkpoints and exact resume

Shapes:  P prompts · G answers to each · B = P * G rows · L prompt length · R response length · V vocabulary.
Prompts are padded on the left and responses on the right, so that all responses start in the same column.
"""

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

HELD_OUT = 64  # questions kept for measuring, never trained on
UPDATES_PER_BATCH = 1  # optimizer steps on the same answers; from the second on, the ratio and its clip matter
CLIP = 0.2  # how far a token's probability may move from where it was sampled before its gradient stops
MAX_GRAD_NORM = 1.0
WARMUP_STEPS = 3


# ---- 1. Questions that a program can check --------------------------------------------------------------------------


class TinyReversal:
    """Reverse three digits, one token each: `731=` asks for `137`. The tokens are 0-9, then `=`, then the end."""

    steps, prompts, group, lr = 160, 128, 8, 2e-3
    max_new_tokens = 5
    rows_per_pass = 1024  # answers in one forward and backward pass: bounds the memory, does not change the gradient
    eos = 11

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        return tuple(rng.randint(0, 9) for _ in range(3))

    def encode(self, digits: tuple[int, ...]) -> list[int]:
        return [*digits, 10]

    def decode(self, tokens: list[int]) -> str:
        return "".join("0123456789="[token] for token in tokens)

    def answer(self, digits: tuple[int, ...]) -> str:
        return "".join(map(str, reversed(digits)))

    def verify(self, response: str, answer: str) -> float:
        """The share of digits in the right place; a response too long or too short loses places."""
        return sum(a == b for a, b in zip(response, answer, strict=False)) / max(len(response), len(answer))


class ChatReversal:
    """Reverse three two-digit numbers, asked in the model's own chat format after two solved examples."""

    steps, prompts, group, lr = 15, 8, 8, 1e-5
    max_new_tokens = 16
    rows_per_pass = 16

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos: int = tokenizer.eos_token_id

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        return tuple(rng.randint(10, 99) for _ in range(3))

    def encode(self, numbers: tuple[int, ...]) -> list[int]:
        messages = [{"role": "system", "content": "Answer only."}]
        for example in ((12, 34, 56), (71, 25, 48)):
            messages.append({"role": "user", "content": "Reverse " + ", ".join(map(str, example))})
            messages.append({"role": "assistant", "content": self.answer(example)})
        messages.append({"role": "user", "content": "Reverse " + ", ".join(map(str, numbers))})
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))

    def answer(self, numbers: tuple[int, ...]) -> str:
        return ", ".join(map(str, reversed(numbers)))

    def verify(self, response: str, answer: str) -> float:
        """1 for the right answer, 0 for any other."""
        return float(response.strip() == answer)


Task = TinyReversal | ChatReversal


def load(name: str) -> tuple[Any, Task]:
    """The policy and its task: a random Llama for `tiny`, otherwise the weights and tokenizer in the folder `name`."""
    if name == "tiny":
        torch.set_num_threads(1)  # matrices this small gain nothing from threads, and lose much on a busy machine
        size = {"hidden_size": 64, "intermediate_size": 168, "num_hidden_layers": 2, "num_attention_heads": 4}
        return LlamaForCausalLM(LlamaConfig(vocab_size=12, max_position_embeddings=32, **size)), TinyReversal()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model, ChatReversal(AutoTokenizer.from_pretrained(name))


# ---- 2. Sampling ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollouts:
    """Answers as the sampler produced them: its tokens and log-probs are used as they are, never re-derived."""

    prompt_BL: Tensor  # tokens, padded on the left
    prompt_mask_BL: Tensor  # 1 on prompt tokens, 0 on padding
    response_BR: Tensor  # tokens, padded on the right
    mask_BR: Tensor  # 1 on sampled tokens, the one that ends the response included
    logprobs_BR: Tensor  # log-probability of each sampled token at the moment it was sampled

    def __getitem__(self, rows: Tensor | slice) -> "Rollouts":
        return Rollouts(*(column[rows] for column in vars(self).values()))


@torch.no_grad()
def sample(model: Any, task: Task, prompts: Sequence[list[int]], group: int, greedy: bool = False) -> Rollouts:
    """Answer every prompt `group` times; rows of one group are adjacent. Temperature 1, or the likeliest token."""
    width = max(map(len, prompts))
    prompt_PL = torch.tensor([[task.eos] * (width - len(p)) + p for p in prompts], device=model.device)
    mask_PL = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    position_PL = (mask_PL.cumsum(1) - 1).clamp(min=0)

    # The prompt runs through the model once; its keys and values are then copied to all answers of the group.
    out = model(prompt_PL, attention_mask=mask_PL, position_ids=position_PL, use_cache=True, logits_to_keep=1)
    cache = out.past_key_values
    cache.batch_repeat_interleave(group)
    logits_BV = out.logits[:, -1].repeat_interleave(group, 0)
    prompt_mask_BL = attention = mask_PL.repeat_interleave(group, 0)

    alive_B = torch.ones_like(attention[:, 0])  # 0 once a row has ended: it is decoded on, but masked
    tokens, mask, logprobs = [], [], []
    for _ in range(task.max_new_tokens):
        logprobs_BV = log_softmax(logits_BV.float(), -1)
        token_B1 = logprobs_BV.argmax(-1, keepdim=True) if greedy else torch.multinomial(logprobs_BV.exp(), 1)
        tokens.append(token_B1)
        mask.append(alive_B[:, None])
        logprobs.append(logprobs_BV.gather(1, token_B1))
        alive_B = alive_B * (token_B1[:, 0] != task.eos)
        if not alive_B.any():
            break
        position_B1 = attention.sum(1, keepdim=True)
        attention = torch.cat([attention, mask[-1]], 1)
        out = model(token_B1, attention_mask=attention, position_ids=position_B1, past_key_values=cache)
        logits_BV = out.logits[:, -1]
    columns = (torch.cat(column, 1) for column in (tokens, mask, logprobs))
    return Rollouts(prompt_PL.repeat_interleave(group, 0), prompt_mask_BL, *columns)


# ---- 3. Scoring -----------------------------------------------------------------------------------------------------


def score(task: Task, rollouts: Rollouts, answers: Sequence[str]) -> Tensor:
    """The reward of each row. A response that was cut off before it ended is worth nothing."""
    rewards = []
    for tokens, mask, answer in zip(rollouts.response_BR.tolist(), rollouts.mask_BR.tolist(), answers, strict=True):
        *body, last = tokens[: sum(mask)]
        rewards.append(task.verify(task.decode(body), answer) if last == task.eos else 0.0)
    return torch.tensor(rewards)


def accuracy(model: Any, task: Task, questions: Sequence[tuple[int, ...]]) -> float:
    """The share of questions whose likeliest answer is entirely right."""
    rollouts = sample(model, task, [task.encode(q) for q in questions], group=1, greedy=True)
    return (score(task, rollouts, [task.answer(q) for q in questions]) == 1).float().mean().item()


# ---- 4. Advantages --------------------------------------------------------------------------------------------------


def advantages(rewards_PG: Tensor) -> Tensor:
    """How much better each answer is than its group's mean, in standard deviations of the group.

    The mean of the group is the baseline that a value network would otherwise have to learn.
    """
    return (rewards_PG - rewards_PG.mean(1, keepdim=True)) / (rewards_PG.std(1, keepdim=True) + 1e-4)


# ---- 5. Learning ----------------------------------------------------------------------------------------------------


def response_logprobs(model: Any, rollouts: Rollouts) -> Tensor:
    """Log-probability, under the model as it is now, of each response token given all before it."""
    tokens = torch.cat([rollouts.prompt_BL, rollouts.response_BR], 1)
    attention = torch.cat([rollouts.prompt_mask_BL, rollouts.mask_BR], 1)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    length = rollouts.response_BR.shape[1]
    # The logits in one column predict the token in the next: start one early, and drop the last.
    out = model(tokens, attention_mask=attention, position_ids=positions, logits_to_keep=length + 1, use_cache=False)
    logprobs_BRV = log_softmax(out.logits[:, :-1].float(), -1)
    return logprobs_BRV.gather(2, rollouts.response_BR[..., None])[..., 0]


def update(
    model: Any, optimizer: torch.optim.Optimizer, rollouts: Rollouts, advantages_B: Tensor, rows_per_pass: int
) -> float:
    """One optimizer step on the clipped objective; returns the largest |log ratio| that it met."""
    # Every token of the batch weighs the same. The weights are fixed here, before the batch is cut into passes, so
    # the passes just add up: their number and size do not change the gradient.
    weights_BR = rollouts.mask_BR / rollouts.mask_BR.sum()
    gap = 0.0
    for first in range(0, len(advantages_B), rows_per_pass):
        rows = slice(first, first + rows_per_pass)
        part = rollouts[rows]
        # How much likelier each token is now than when it was sampled: 1 in the first update after sampling, and the
        # correction that keeps the gradient right when the same answers serve for another update.
        log_ratio_BR = (response_logprobs(model, part) - part.logprobs_BR) * part.mask_BR
        ratio_BR = log_ratio_BR.exp()
        advantage_B1 = advantages_B[rows, None]
        clipped_BR = ratio_BR.clamp(1 - CLIP, 1 + CLIP)
        loss = -(weights_BR[rows] * torch.minimum(ratio_BR * advantage_B1, clipped_BR * advantage_B1)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        gap = max(gap, log_ratio_BR.abs().max().item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return gap


# ---- All of it together ---------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> float:
    """Train, print one line a step, and return the accuracy on held-out questions at the end."""
    parser = argparse.ArgumentParser(description="GRPO with a verifiable reward, in one file.")
    parser.add_argument("--model", default="tiny", help="'tiny', or a folder with a Hugging Face chat model")
    parser.add_argument("--steps", type=int, help="batches to sample and learn from")
    parser.add_argument("--prompts", type=int, help="questions in a batch")
    parser.add_argument("--group", type=int, help="answers to each question, at least 2")
    parser.add_argument("--lr", type=float, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    model, task = load(args.model)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    model.eval()  # no dropout: sampling and training must see the same function
    steps = task.steps if args.steps is None else args.steps
    prompts = task.prompts if args.prompts is None else args.prompts
    group = task.group if args.group is None else args.group
    lr = task.lr if args.lr is None else args.lr
    if group < 2:
        parser.error(f"--group must be at least 2, because answers are compared with each other, got {group}")

    held_out = [task.draw(rng) for _ in range(HELD_OUT)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    print(f"held-out accuracy {accuracy(model, task, held_out):.2f} before training")

    for step in range(1, steps + 1):
        start = time.perf_counter()
        questions: list[tuple[int, ...]] = []
        while len(questions) < prompts:
            if (question := task.draw(rng)) not in held_out:
                questions.append(question)

        rollouts = sample(model, task, [task.encode(q) for q in questions], group)
        rewards_B = score(task, rollouts, [task.answer(q) for q in questions for _ in range(group)])
        rewards_PG = rewards_B.view(prompts, group)
        advantages_B = advantages(rewards_PG).flatten().to(model.device)

        # A group whose answers all scored the same teaches nothing: leave it out before it costs a forward pass.
        signal_P = rewards_PG.amax(1) > rewards_PG.amin(1)
        rows = signal_P.repeat_interleave(group).to(model.device)
        gap = 0.0
        for _ in range(UPDATES_PER_BATCH if signal_P.any() else 0):
            gap = update(model, optimizer, rollouts[rows], advantages_B[rows], task.rows_per_pass)
        warmup.step()
        print(
            f"step {step:3d}  reward {rewards_B.mean():.3f}  groups with signal {signal_P.sum()}/{prompts}"
            f"  log-prob gap {gap:.0e}  {time.perf_counter() - start:.1f} s",
            flush=True,
        )

    final = accuracy(model, task, held_out)
    print(f"held-out accuracy {final:.2f} after training")
    return final


if __name__ == "__main__":
    main()
