"""Reinforcement learning as a loop of one's own, on the primitives: sample, score, one gradient, one update.

    python examples/own_loop.py [MODEL] [STEPS]

The task: answer with many vowels. The reward is the share of vowels in the answer, so it rises within a few steps.
"""

import sys

import kitae.primitives
from kitae.primitives import AdamParams, Datum
from kitae.primitives.core import SampledAnswer

PROMPTS = ["Name an animal.", "Name a fruit.", "Say hello.", "Name a colour."]
GROUP = 8


def reward(text: str) -> float:
    return sum(letter in "aeiouAEIOU" for letter in text) / max(1, len(text))


def datum(prompt: list[int], answer: SampledAnswer, advantage: float) -> Datum:
    """One answer: the prompt is read and not trained on."""
    tokens, before = [*prompt, *answer.tokens], [0.0] * (len(prompt) - 1)
    inputs = {"logprobs": [*before, *answer.logprobs], "advantages": [*before, *[advantage] * len(answer.tokens)]}
    return Datum(tokens[:-1], tokens[1:], inputs)


def main(model: str = "smollm2-135m", steps: int = 20, folder: str = "own_loop_adapter") -> list[float]:
    """The mean reward of each step; the adapter is in the folder at the end."""
    rewards = []
    with kitae.primitives.open(model) as bench:
        policy = bench.create_lora(rank=16)
        prompts = [bench.tokenizer.encode(prompt) for prompt in PROMPTS]
        for step in range(steps):
            groups = policy.sampler().sample_many(prompts, max_tokens=16, n=GROUP, seed=step * len(prompts))
            data, means = [], []
            for prompt, group in zip(prompts, groups, strict=True):
                scores = [reward(bench.tokenizer.decode(list(answer.tokens))) for answer in group]
                mean = sum(scores) / len(scores)
                means.append(mean)
                data += [datum(prompt, a, s - mean) for a, s in zip(group, scores, strict=True)]
            policy.forward_backward(data, "importance_sampling")
            policy.optim_step(AdamParams(learning_rate=1e-3))
            rewards.append(sum(means) / len(means))
            print(f"step {step + 1}: reward {rewards[-1]:.3f}", flush=True)
        policy.save(folder)
    return rewards


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m", int(sys.argv[2]) if len(sys.argv) > 2 else 20)
