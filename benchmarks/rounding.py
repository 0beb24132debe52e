"""What 8 bits for weights and rows do to the log-probs of a real model, in plain torch in float32 on any machine.

    python benchmarks/rounding.py --data gsm8k.jsonl [--model smollm2-135m] [--texts 24]

Weights for q, k, v and the MLP, and the rows that go into their products, are rounded as `engine.weights_dtype =
"float8"` has them on a GPU, and as whole numbers of 8 bits with a unit for each row would be. The data has a line of
JSON for each question, with `question` and perhaps `answer`. Printed, in nats: how far the log-prob of a token of these
texts is from that of the model, on average and for 99 of 100.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kitae.kernels import float8
from kitae.models.attention_seam import SelfAttention
from kitae.models.config import ModelConfig
from kitae.models.layer_kinds import norm_of
from kitae.models.load import load_policy
from kitae.models.policy import Policy

Rounding = Callable[[Tensor], Tensor]
Products = tuple[list[nn.Linear], Tensor | None]  # that share an input; the unit of its rows, if a norm gives one


def products(policy: Policy) -> Iterator[Products]:
    decoder: Any = policy.decoder
    for layer in decoder.layers:
        attn, mlp = layer.self_attn, layer.mlp
        before = [norm_of(norm) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        units = [float8.unit_of_normed(norm) for norm in before if norm is not None]
        yield [attn.q_proj, attn.k_proj, attn.v_proj], units[0]
        yield [mlp.gate_proj, mlp.up_proj], units[1]
        yield [mlp.down_proj], None


def whole(x: Tensor) -> Tensor:
    """Whole numbers of 8 bits, each row with a unit of its own."""
    unit = x.abs().amax(-1, keepdim=True).div(127).clamp(min=1e-30)
    return (x / unit).round() * unit


def rows_in_float8(unit: Tensor | None) -> Rounding:
    """Float8, over a unit or over one of each row."""

    def rounded(x: Tensor) -> Tensor:
        own = x.abs().amax(-1, keepdim=True).div(float8.LARGEST).clamp(min=1e-30) if unit is None else unit
        return (x / own).clamp(-float8.LARGEST, float8.LARGEST).to(float8.KIND).float() * own

    return rounded


def round_weights(policy: Policy, rounding: Rounding) -> None:
    for modules, _ in products(policy):
        joined = rounding(torch.cat([m.weight.data for m in modules]))
        for module, part in zip(modules, joined.split([len(m.weight) for m in modules]), strict=True):
            module.weight.data.copy_(part)


def round_rows(policy: Policy, rounding: Callable[[Tensor | None], Rounding]) -> list[Any]:
    """Hooks, to be removed."""

    def hook(rounded: Rounding) -> Callable[..., Any]:
        return lambda module, given: (rounded(given[0]),)

    return [m.register_forward_pre_hook(hook(rounding(unit))) for group, unit in products(policy) for m in group]


@torch.inference_mode()
def logprobs(policy: Policy, texts: list[list[int]]) -> Tensor:
    found = []
    for text in texts:
        tokens, positions = torch.tensor(text), torch.arange(len(text))
        logp = torch.log_softmax(policy.logits(policy.hidden(tokens, positions, SelfAttention(positions))).float(), -1)
        found.append(logp[:-1].gather(1, tokens[1:, None])[:, 0])
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=24)
    args = parser.parse_args()
    policy = load_policy(ModelConfig(path=args.model, dtype="float32", device="cpu", plain=True))
    rows = [json.loads(line) for line in args.data.read_text().splitlines()[: args.texts]]
    tokenizer: Any = policy.tokenizer
    texts = [tokenizer(row["question"] + "\n" + row.get("answer", ""))["input_ids"][:300] for row in rows]
    exact = logprobs(policy, texts)
    kept = [p.data.clone() for p in policy.model.parameters()]
    print(f"{args.model}: {len(exact)} tokens of {-exact.mean():.2f} nats")
    variants: dict[str, tuple[Rounding | None, Callable[[Tensor | None], Rounding] | None]] = {
        "weights in float8": (float8.rounded, None),
        "rows in float8": (None, rows_in_float8),
        "weights and rows in float8": (float8.rounded, rows_in_float8),
        "weights in int8": (whole, None),
        "rows in int8": (None, lambda unit: whole),
    }
    for name, (of_weights, of_rows) in variants.items():
        if of_weights is not None:
            round_weights(policy, of_weights)
        hooks = [] if of_rows is None else round_rows(policy, of_rows)
        gap = (logprobs(policy, texts) - exact).abs()
        for hook in hooks:
            hook.remove()
        for parameter, was in zip(policy.model.parameters(), kept, strict=True):
            parameter.data.copy_(was)
        print(f"{name:28} {gap.mean():.3f}, 99 % below {gap.quantile(0.99):.2f}", flush=True)


if __name__ == "__main__":
    main()
