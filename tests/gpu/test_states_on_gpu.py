"""Layers that carry a state on a GPU, without CUDA graphs: engine and trainer give what the model gives by itself."""

import asyncio
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from kitae.data.packing import Span
from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.tiny import HYBRIDS
from kitae.trainer.packed_attention import PackedAttention

Folder = Callable[[str], object]


def load(folder: object, dtype: str) -> Policy:
    return load_policy(ModelConfig(path=str(folder), dtype=dtype, device="cuda"))


async def sample(policy: Policy, **settings: object) -> list[tuple[Request, Completion]]:
    """Groups of prompts of several lengths."""
    engine = NativeEngine(policy, EngineConfig.model_validate({"memory_gb": 0.05, **settings}))
    prompts = [tuple((7 * i + j * j) % 250 + 3 for j in range(1 + 9 * i)) for i in range(4)]
    sampling = SamplingParams(max_tokens=40)
    requests = [
        Request(f"{i}/{k}", p, sampling, 10 * i + k, share=f"{i}") for i, p in enumerate(prompts) for k in range(4)
    ]
    try:
        return list(zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True))
    finally:
        await engine.close()


@pytest.mark.parametrize("max_batch", [3, 256])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_log_probs_are_those_of_the_model(architecture: str, max_batch: int, tiny_folder: Folder) -> None:
    folder = tiny_folder(architecture)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    for request, done in asyncio.run(sample(load(folder, "float32"), max_batch=max_batch)):
        row, before = torch.tensor([request.prompt_tokens + done.tokens]).cuda(), len(request.prompt_tokens) - 1
        with torch.no_grad():
            logp = model(row, use_cache=False).logits[0, before:-1].log_softmax(-1)
        expected = logp.gather(1, row[0, before + 1 :, None])[:, 0].cpu()
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_packed_rows_give_what_their_sequences_give(architecture: str, dtype: str, tiny_folder: Folder) -> None:
    """A prompt with three samples, and a sequence by itself: values and gradients."""
    policy = load(tiny_folder(architecture), dtype)
    draw = torch.Generator().manual_seed(0)
    prompt, *samples, alone = (torch.randint(3, 250, (n,), generator=draw).cuda() for n in (21, 9, 1, 70, 33))
    spans, end = [Span(0, len(prompt))], len(prompt)
    for s in samples:
        spans.append(Span(end, len(s), 0, len(prompt)))
        end += len(s)
    spans.append(Span(end, len(alone)))
    places = [torch.arange(s.length) + (len(prompt) if s.prefix_length else 0) for s in spans]
    context = PackedAttention(spans, policy.device, policy.heads)
    packed = policy.hidden(torch.cat([prompt, *samples, alone]), torch.cat(places).cuda(), context)
    apart = []
    for sequence in ([prompt], *([prompt, s] for s in samples), [alone]):
        row = torch.cat(sequence)
        positions = torch.arange(len(row)).cuda()
        whole = policy.hidden(row, positions, PackedAttention([Span(0, len(row))], policy.device, policy.heads))
        apart.append(whole[len(row) - len(sequence[-1]) :])
    grads = []
    for states in (packed, torch.cat(apart)):
        policy.model.zero_grad()
        states.float().square().mean().backward()
        grads.append(torch.cat([p.grad.float().flatten() for p in policy.model.parameters() if p.grad is not None]))
    most = 1e-4 if dtype == "float32" else 0.05
    assert (packed - torch.cat(apart)).norm() < most * packed.norm()
    assert (grads[0] - grads[1]).norm() < most * grads[1].norm()
