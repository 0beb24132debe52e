"""Models that learn side by side over one base, and samples from snapshots of them."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import kitae.primitives
from kitae.engines.config import EngineConfig
from kitae.errors import ConfigError, RequestError, StoreError
from kitae.models.load import find_model
from kitae.primitives import AdamParams, Datum, Workbench

TEXT = list(range(5, 25))
OTHER = [7, 3, 9, 11, 4, 8, 2, 30, 31, 32]


def datum(text: list[int], weight: float = 1.0) -> Datum:
    return Datum(text[:-1], text[1:], {"weights": [weight] * (len(text) - 1)})


@pytest.fixture
def bench() -> Iterator[Workbench]:
    with kitae.primitives.open("tiny", engine=EngineConfig(memory_gb=0.05), dtype="float32", device="cpu") as opened:
        yield opened


def test_a_model_learns_and_a_sampler_stays_what_it_was(bench: Workbench) -> None:
    model = bench.create_lora(4)
    before = model.sampler()
    first = before.logprobs(TEXT)
    losses = []
    for _ in range(5):
        losses.append(model.forward_backward([datum(TEXT)]).loss)
        model.optim_step(AdamParams(1e-2))
    assert losses[-1] < 0.6 * losses[0] and losses[0] == pytest.approx(-sum(first), rel=1e-5)
    assert before.logprobs(TEXT) == pytest.approx(first, abs=1e-5)
    after = model.sampler()
    assert after.logprobs(TEXT) == pytest.approx(model.forward([datum(TEXT)]).logprobs[0].tolist(), abs=1e-5)
    (answer,) = after.sample(TEXT[:5], max_tokens=6, temperature=0.5, seed=1)
    again, other = after.sample(TEXT[:5], max_tokens=6, n=2, seed=2)
    assert again.tokens != other.tokens and answer == after.sample(TEXT[:5], max_tokens=6, temperature=0.5, seed=1)[0]


@pytest.mark.thorough
def test_models_that_learn_at_once_become_what_each_becomes_alone(bench: Workbench) -> None:
    """Their passes share rows, and their ranks differ."""
    texts = {2: TEXT, 5: OTHER, 3: TEXT[3:12]}

    def train(rank: int, delay: bool) -> list[float]:
        model = bench.create_lora(rank, seed=rank)
        for _ in range(4):
            model.forward_backward([datum(texts[rank]), datum(OTHER[:4], 0.5)])
            model.optim_step(AdamParams(5e-3))
        return model.sampler().logprobs(TEXT)

    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(lambda rank: train(rank, True), texts))
    for rank, found in zip(texts, together, strict=True):
        assert found == pytest.approx(train(rank, False), abs=1e-5)


def test_gradients_add_up_until_the_update(bench: Workbench) -> None:
    one, two = bench.create_lora(4, seed=1), bench.create_lora(4, seed=1)
    one.forward_backward([datum(TEXT), datum(OTHER)])
    two.forward_backward([datum(TEXT)])
    two.forward([datum(OTHER, 9.0)])  # adds nothing
    two.forward_backward([datum(OTHER)])
    params = AdamParams(1e-2, grad_clip_norm=0.5, weight_decay=0.1)
    assert one.optim_step(params) == pytest.approx(two.optim_step(params), rel=1e-5)
    assert one.sampler().logprobs(TEXT) == pytest.approx(two.sampler().logprobs(TEXT), abs=1e-5)


@pytest.mark.thorough
def test_several_targets_at_a_place(bench: Workbench) -> None:
    model = bench.create_lora(4)
    targets = np.array([[t, t + 1] for t in TEXT[1:]])
    weights = np.tile([0.75, 0.25], (len(targets), 1))
    found = model.forward_backward([Datum(TEXT[:-1], targets, {"weights": weights})])
    assert found.logprobs[0].shape == targets.shape
    assert found.loss == pytest.approx(-(found.logprobs[0] * weights).sum(), rel=1e-5)
    plain = model.forward([datum(TEXT)]).logprobs[0]
    assert found.logprobs[0][:, 0] == pytest.approx(plain, abs=1e-5)


def test_what_is_saved_goes_on_as_if_nothing_had_been(bench: Workbench, tmp_path: Path) -> None:
    model = bench.create_lora(4)

    def step() -> None:
        model.forward_backward([datum(TEXT)])
        model.optim_step(AdamParams(1e-2))

    step()
    model.save(tmp_path / "here")
    step()
    expected = model.sampler().logprobs(TEXT)
    model.load(tmp_path / "here")
    step()
    assert model.sampler().logprobs(TEXT) == pytest.approx(expected, abs=1e-6)
    model.load(tmp_path / "here", optimizer=False)
    step()
    assert model.sampler().logprobs(TEXT) != pytest.approx(expected, abs=1e-4)
    with pytest.raises(StoreError, match="of the same names and shapes"):
        bench.create_lora(8).load(tmp_path / "here")
    model.save(tmp_path / "plain", optimizer=False)
    with pytest.raises(StoreError, match="no state of an optimizer"):
        model.load(tmp_path / "plain")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_peft_reads_what_is_saved(bench: Workbench, tmp_path: Path) -> None:
    model = bench.create_lora(4)
    model.forward_backward([datum(TEXT)])
    model.optim_step(AdamParams(1e-2))
    model.save(tmp_path / "adapter", optimizer=False)
    base = AutoModelForCausalLM.from_pretrained(find_model("tiny"), dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        logits = adapted(torch.tensor([TEXT])).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0].tolist()
    assert model.sampler().logprobs(TEXT) == pytest.approx(expected, abs=1e-4)


@pytest.mark.thorough
def test_a_whole_model_learns_beside_the_adapters(bench: Workbench, tmp_path: Path) -> None:
    whole, adapter = bench.create_full(), bench.create_lora(4)
    before = adapter.sampler().logprobs(TEXT)
    snapshot = whole.sampler()
    for _ in range(3):
        whole.forward_backward([datum(TEXT)])
        whole.optim_step(AdamParams(1e-3))
    assert sum(whole.forward([datum(TEXT)]).logprobs[0]) > sum(before) + 1
    assert snapshot.logprobs(TEXT) == pytest.approx(before, abs=1e-5)
    assert adapter.sampler().logprobs(TEXT) == pytest.approx(before, abs=1e-5)
    (answer,) = snapshot.sample(TEXT[:4], max_tokens=3)
    assert len(answer.tokens) <= 3
    snapshot.close()


@pytest.mark.parametrize(
    "wrong, message",
    [
        (Datum([1, 2], [2]), "a target for each of its 2 tokens"),
        (Datum([1, 10**6], [2, 3]), "must be ids in 0…258, got 1000000"),
        (Datum([], []), "must not be empty"),
        (Datum([1.5], [2]), "must be whole numbers"),
        (Datum([1, 2], [2, 3], {"weights": [1.0]}), "weights must have the shape of the targets"),
        (Datum([1, 2], [2, 3], {"weights": [1.0, math.nan]}), "weights must be finite"),
        (Datum([1] * 600, [1] * 600), "must fit into the context of 512, got 600"),
    ],
)
def test_wrong_data_are_refused_and_harm_nobody(bench: Workbench, wrong: Datum, message: str) -> None:
    model = bench.create_lora(2)
    with pytest.raises(RequestError, match=message):
        model.forward_backward([datum(TEXT), wrong])
    assert model.optim_step(AdamParams(1e-2)) == 0.0


def test_what_a_loss_lacks_is_named(bench: Workbench) -> None:
    with pytest.raises(RequestError, match="needs logprobs and advantages, got no logprobs"):
        bench.create_lora(2).forward_backward([datum(TEXT)], "ppo")
    with pytest.raises(RequestError, match="rank of an adapter must be at least 1"):
        bench.create_lora(0)


def test_a_rank_in_the_settings_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.lora_rank must be 0, got 4"):
        kitae.primitives.open("tiny", lora_rank=4)
