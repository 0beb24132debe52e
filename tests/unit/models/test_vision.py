"""Models that see: tokens, log-probs and gradients are those of transformers, in the engine and in packed rows."""

import asyncio
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from seeing import asked, folder_of, load, picture, source
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from kitae.data.chat import Chat
from kitae.data.packing import lay_out
from kitae.data.pictures import PICTURE, SHELF, is_picture
from kitae.engines.base import Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.errors import DataError, ModelError, RequestError
from kitae.models.classifier import begin_scalar
from kitae.models.config import ModelConfig
from kitae.models.picture_reader import FAMILIES, read_processor
from kitae.models.policy import Policy
from kitae.trainer.config import LearningConfig
from kitae.trainer.forward import MicroBatch
from kitae.trainer.objectives import PolicyScorer
from kitae.types import Message, Sample

SHAPES = ((40, 50), (64, 30))
SOURCES = tuple(source(seed, *shape) for seed, shape in enumerate(SHAPES))
SAID = "What differs?"
PROMPT = (asked(SAID, *SOURCES),)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing")


def theirs(policy: Policy, folder: Path, tokens: tuple[int, ...]) -> tuple[list[int], Tensor]:
    """The tokens of the prompt, and the log-probs of all of `tokens`, as processor and model of transformers have
    them."""
    assert policy.vision is not None
    processor, pictures = policy.vision.reader.processor, [picture(i, *shape) for i, shape in enumerate(SHAPES)]
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": SAID}]}]
    text = policy.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    takes = inspect.signature(model.forward).parameters
    kinds = {"return_mm_token_type_ids": True} if "mm_token_type_ids" in takes else {}
    given = processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False, **kinds)
    prompt = given["input_ids"][0].tolist()
    rest = torch.tensor([tokens[len(prompt) :]], dtype=torch.long)
    given["input_ids"] = torch.cat((given["input_ids"], rest), 1)
    for name in ("attention_mask", "mm_token_type_ids"):
        if name in given:
            given[name] = torch.cat((given[name], torch.full_like(rest, int(name == "attention_mask"))), 1)
    with torch.no_grad():
        logits = model(**{k: v for k, v in given.items() if k in takes}).logits[0].float()
    logp = logits[:-1].log_softmax(-1).gather(1, given["input_ids"][0, 1:, None])[:, 0]
    return prompt, logp


async def sample(policy: Policy, prompts: list[tuple[int, ...]], config: EngineConfig | None = None) -> Any:
    engine = NativeEngine(policy, config or EngineConfig(memory_gb=0.02))
    requests = [
        Request(f"{i}/{k}", p, SamplingParams(max_tokens=12), 31 * i + k, share=f"{i}")
        for i, p in enumerate(prompts)
        for k in range(2)
    ]
    try:
        return list(zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True))
    finally:
        await engine.close()


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_log_probs_are_those_of_transformers(family: str, root: Path) -> None:
    """Two pictures in a prompt, beside prompts with one and with none in the same batch."""
    folder = folder_of(family, root)
    policy = load(folder)
    chat = Chat(policy.tokenizer)
    assert policy.vision is not None
    prompts = [chat.encode_prompt(p) for p in (PROMPT, (asked("Hm?", SOURCES[1]),), (Message("user", "Hi"),))]
    for request, done in asyncio.run(sample(policy, prompts)):
        tokens = (*request.prompt_tokens, *done.tokens)
        before = len(request.prompt_tokens) - 1
        ours = policy.score(torch.tensor(tokens))[before:]
        torch.testing.assert_close(torch.tensor(done.logprobs), ours, atol=1e-4, rtol=0)
        if request.id.startswith("0/"):
            prompt, expected = theirs(policy, folder, tokens)
            soft = [policy.vision.reader.soft_id if is_picture(t) else t for t in request.prompt_tokens]
            assert soft == prompt
            torch.testing.assert_close(ours, expected[before:], atol=1e-4, rtol=0)
    other = tuple(SHELF.put(source(7, *SHAPES[0])) if t == SHELF.put(SOURCES[0]) else t for t in prompts[0])
    blind, seeing = (policy.score(torch.tensor((*p, 5, 6)))[-2:] for p in (other, prompts[0]))
    assert (blind - seeing).abs().max() > 1e-3


def made_samples(policy: Policy) -> list[Sample]:
    """Two samples of each of two prompts, the first with two pictures."""
    chat, found = Chat(policy.tokenizer), []
    for group, messages in enumerate((PROMPT, (asked("Hm?", SOURCES[1]),))):
        prompt = chat.encode_prompt(messages)
        for index in range(2):
            answer = [(11 * group + 5 * index + 3 * i) % 200 + 5 for i in range(6 + index)]
            tokens = np.array([*prompt, *answer])
            mask = np.arange(len(tokens)) >= len(prompt)
            found.append(Sample(group, index, tokens, len(prompt), mask, mask.astype(np.float32) * (1 + index)))
    return found


def gradients(policy: Policy, rows: list[list[Sample]], share: bool) -> tuple[dict[str, Tensor], list[np.ndarray]]:
    scorer = PolicyScorer(policy, LearningConfig(lr=1e-3), 1.0)
    policy.model.zero_grad()
    scores = []
    for row in rows:
        laid = lay_out(row, share)
        micro = MicroBatch.of(laid, policy.device)
        logp_N = scorer.score(micro)[0]
        (logp_N * micro.weight_N).sum().backward()
        scores += laid.split(logp_N.detach().numpy())
    return {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}, scores


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_give_the_gradients_of_separate_ones(family: str, root: Path) -> None:
    """Of the tower too, where it is trained; a picture that two prompts show is computed once."""
    policy = load(folder_of(family, root), train_vision=True)
    assert policy.vision is not None and policy.vision.trained
    samples = made_samples(policy)
    computed = []
    compute = policy.vision._compute
    policy.vision._compute = lambda tokens: (computed.extend(tokens), compute(tokens))[1]  # type: ignore[method-assign]
    packed, scores = gradients(policy, [samples], True)
    assert len(computed) == len(set(computed)) == 2
    alone, expected = gradients(policy, [[s] for s in samples], False)
    for a, b in zip(scores, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert packed.keys() == alone.keys() and any("vis" in name for name in packed)
    for name, gradient in alone.items():
        assert (packed[name] - gradient).norm() <= 2e-3 * gradient.norm() + 1e-6, name


def test_a_frozen_tower_has_no_gradient_and_is_computed_once(root: Path) -> None:
    policy = load(folder_of("qwen2_5_vl", root))
    assert policy.vision is not None and not policy.vision.trained
    computed = []
    compute = policy.vision._compute
    policy.vision._compute = lambda tokens: (computed.extend(tokens), compute(tokens))[1]  # type: ignore[method-assign]
    prompts = [Chat(policy.tokenizer).encode_prompt(PROMPT)]
    asyncio.run(sample(policy, prompts))
    found, _ = gradients(policy, [made_samples(policy)], True)
    assert len(computed) == 2 and not any("visual" in name for name in found)


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl", "qwen3_5"])
def test_preempted_sequences_see_what_they_saw(family: str, root: Path) -> None:
    policy = load(folder_of(family, root))
    prompts = [Chat(policy.tokenizer).encode_prompt((asked(SAID, s),)) for s in SOURCES]
    plenty = asyncio.run(sample(policy, prompts))
    bytes_of_page = 16 * 2 * 2 * 2 * 16 * 4
    pages = sum(-(-len(p) // 16) + 2 for p in prompts) + 1
    states = family == "qwen3_5"  # their slots take half
    few = EngineConfig(memory_gb=pages * bytes_of_page * (1 + states) / 2**30, host_memory_gb=0)
    for (_, a), (_, b) in zip(plenty, asyncio.run(sample(policy, prompts, few)), strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.parametrize("shields", [False, True])
def test_what_marks_pictures_stays_text_where_people_type_it(root: Path, shields: bool) -> None:
    """And so does the character that stands for a picture on its way into tokens."""
    policy = load(folder_of("qwen2_5_vl", root))
    chat, soft = Chat(policy.tokenizer, shields=shields), policy.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    typed = f"<|image_pad|> and \U000ffffd{SHELF.put(SOURCES[0]) - PICTURE:08x}000004 here"
    tokens = chat.encode_prompt((asked(typed, SOURCES[1]),))
    shown = [t for t in tokens if is_picture(t)]
    assert soft not in tokens and set(shown) == {SHELF.put(SOURCES[1])}
    assert typed in chat.decode(tokens)
    turn = chat.encode_turn((asked(typed, SOURCES[0], role="user"),))
    assert soft not in turn and {t for t in turn if is_picture(t)} == {SHELF.put(SOURCES[0])}


def test_what_cannot_be_seen_is_refused(root: Path, tiny_policy: Any) -> None:
    policy = load(folder_of("smolvlm", root))
    prompt = Chat(policy.tokenizer).encode_prompt(PROMPT)

    async def refused(asked_of: Policy, tokens: tuple[int, ...]) -> str:
        engine = NativeEngine(asked_of, EngineConfig(memory_gb=0.02))
        try:
            with pytest.raises(RequestError) as problem:
                await engine.generate(Request("0", tokens, SamplingParams(max_tokens=2), 1))
            return str(problem.value)
        finally:
            await engine.close()

    text = tiny_policy("llama")
    assert "cannot see" in asyncio.run(refused(text, prompt))
    cut = prompt[: next(i for i, t in enumerate(prompt) if is_picture(t)) + 1]
    assert "places" in asyncio.run(refused(policy, cut))
    assert "must be on the shelf" in asyncio.run(refused(policy, (5, PICTURE + 12345)))
    with pytest.raises(DataError, match="no processor"):
        Chat(text.tokenizer).encode_prompt(PROMPT)


def test_samples_that_look_alike_and_show_others_are_other_prompts(root: Path) -> None:
    policy = load(folder_of("smolvlm", root))
    chat = Chat(policy.tokenizer)
    one, two = (chat.encode_prompt((asked("Hm?", source(seed)),)) for seed in (1, 2))
    assert len(one) == len(two) and one != two
    sample_of = made_samples(policy)[0]
    rows = [replace(sample_of, tokens_T=np.array([*p, 9, 9]), prompt_length=len(p),
                    mask_T=np.arange(len(p) + 2) >= len(p), weight_T=np.ones(len(p) + 2, np.float32))
            for p in (one, two)]  # fmt: skip
    assert len(lay_out(rows).spans) == 4


def test_a_family_that_was_not_compared_is_a_model_of_text(root: Path, tmp_path: Path) -> None:
    """Gemma 3 lets the places of a picture see each other: shown as it is, it would learn from other log-probs."""
    folder = folder_of("smolvlm", root)
    reader, config = load(folder).vision, AutoConfig.from_pretrained(folder)
    assert reader is not None and read_processor(folder, config, reader.reader.processor.tokenizer) is not None
    config.model_type = "gemma3"
    assert read_processor(folder, config, reader.reader.processor.tokenizer) is None


def test_a_model_that_sees_is_no_reward_model(root: Path) -> None:
    """Its spans would be scored at positions in a row; transformers has a classifier for this family."""
    with pytest.raises(ModelError, match="must begin with a model of text"):
        begin_scalar(ModelConfig(path=str(folder_of("qwen3_5", root)), dtype="float32", device="cpu"), seed=1)
