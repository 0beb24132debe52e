"""Reward models as folders: what the library loads gives our scores."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from kitae.data.chat import Chat
from kitae.errors import DataError, ModelError
from kitae.models.classifier import check_classifier, export_scalar, load_scalar
from kitae.models.config import ModelConfig
from kitae.models.load import check_model
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.models.scorer import Scorer
from kitae.models.tiny import ARCHITECTURES
from kitae.types import Message

TinyPolicy = Callable[..., Policy]

TALKS = [
    [Message("user", "What is 6 times 7?"), Message("assistant", "It is 42.")],
    [Message("user", "What is 6 times 7?"), Message("assistant", "I do not know, and I would rather not say.")],
    [Message("system", "Be brief."), Message("user", "Hello"), Message("assistant", "")],
]


def reward_model(policy: Policy) -> ScalarModel:
    """With random weights where training would put some: in the head, and in adapters."""
    model = ScalarModel(policy, bias=False)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        model.head.weight.copy_(0.1 * torch.randn(model.head.weight.shape, generator=generator))
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def ours(model: ScalarModel, talks: Sequence[Sequence[Message]] = TALKS, row: int = 2048) -> list[float]:
    scores = Scorer(model, Chat(model.policy.tokenizer, model.policy.base.generation_config), row).score(talks)
    assert all(isinstance(score, float) for score in scores), scores
    return [float(score) for score in scores]  # type: ignore[arg-type]


def theirs(folder: Path, talks: Sequence[Sequence[Message]] = TALKS) -> list[float]:
    """As a user of the library would: one padded batch. The template ends a turn with a newline, which is taken off."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    turns = [[{"role": m.role, "content": m.content} for m in talk] for talk in talks]
    texts = [tokenizer.apply_chat_template(turn, tokenize=False).rstrip("\n") for turn in turns]
    batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        found: list[float] = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits[:, 0].tolist()  # fmt: skip
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_library_loads_it_and_gives_the_same_scores(
    tiny_policy: TinyPolicy, tmp_path: Path, architecture: str
) -> None:
    model = reward_model(tiny_policy(architecture))
    export_scalar(model, tmp_path / "reward")
    scores = ours(model)
    assert scores == pytest.approx(theirs(tmp_path / "reward"), abs=1e-5)
    assert len({round(score, 3) for score in scores}) == len(TALKS)
    again = load_scalar(ModelConfig(path=str(tmp_path / "reward"), dtype="float32", device="cpu"))
    assert ours(again) == pytest.approx(scores, abs=1e-6)


def test_adapters_are_merged(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    model = reward_model(tiny_policy("llama", lora_rank=4))
    plain = reward_model(tiny_policy("llama"))
    export_scalar(model, tmp_path / "reward")
    assert ours(model) == pytest.approx(theirs(tmp_path / "reward"), abs=1e-5)
    assert ours(model) != pytest.approx(ours(plain), abs=1e-3)
    assert any("lora_" in name for name, _ in model.policy.model.named_parameters())  # as it was


def test_a_stop_token_does_not_pad(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    """Its score would be read before the end of the answer: most chat models pad with the token that ends a turn."""
    policy = tiny_policy()
    policy.tokenizer.pad_token = policy.tokenizer.eos_token
    model = reward_model(policy)
    export_scalar(model, tmp_path / "reward")
    assert ours(model) == pytest.approx(theirs(tmp_path / "reward"), abs=1e-5)
    assert policy.tokenizer.pad_token == policy.tokenizer.eos_token  # as it was


def test_the_head_keeps_its_precision(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    model = reward_model(tiny_policy(dtype="bfloat16", plain=True))
    export_scalar(model, tmp_path / "reward")
    again = load_scalar(ModelConfig(path=str(tmp_path / "reward"), dtype="bfloat16", device="cpu", plain=True))
    assert torch.equal(again.head.weight, model.head.weight)
    assert again.policy.dtype == torch.bfloat16
    assert ours(again) == ours(model)


def test_a_foreign_classifier_in_old_files(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    export_scalar(reward_model(tiny_policy("qwen2")), tmp_path / "reward")
    foreign = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    torch.save(foreign.state_dict(), tmp_path / "reward" / "pytorch_model.bin")
    before = theirs(tmp_path / "reward")
    (tmp_path / "reward" / "model.safetensors").unlink()
    model = load_scalar(ModelConfig(path=str(tmp_path / "reward"), dtype="float32", device="cpu"))
    assert ours(model) == pytest.approx(before, abs=1e-5)


def test_what_is_no_reward_model_is_refused(
    tiny_policy: TinyPolicy, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="must be a sequence classifier with 1 label, got LlamaForCausalLM with 2"):
        check_classifier(tiny_folder("llama"))
    with pytest.raises(ModelError, match="must have no bias"):
        export_scalar(ScalarModel(tiny_policy()), tmp_path / "reward")
    export_scalar(reward_model(tiny_policy()), tmp_path / "reward")
    weights = tmp_path / "reward" / "model.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({k: v for k, v in load_file(weights).items() if k != "score.weight"}, weights)
    with pytest.raises(ModelError, match=r"must hold all weights of Llama.*lacks score\.weight"):
        load_scalar(ModelConfig(path=str(tmp_path / "reward"), device="cpu"))


def test_the_company_in_a_row_changes_rounding_alone(tiny_policy: TinyPolicy) -> None:
    for architecture in ("llama", "gemma3"):
        model = reward_model(tiny_policy(architecture))
        together = ours(model)
        assert together == pytest.approx([ours(model, [talk])[0] for talk in TALKS], abs=1e-5)
        assert together == pytest.approx(ours(model, row=8), abs=1e-5)
        assert together == pytest.approx(ours(model, TALKS[::-1])[::-1], abs=1e-5)


def test_a_conversation_that_has_no_score_costs_the_others_nothing(tiny_policy: TinyPolicy) -> None:
    model = reward_model(tiny_policy())
    scorer = Scorer(model, Chat(model.policy.tokenizer))
    long = [Message("user", "x" * 600), Message("assistant", "y")]
    fake = [Message("user", "x"), Message("assistant", "y<|im_end|>z")]
    first, bad, worse, last = scorer.score([TALKS[0], long, fake, TALKS[1]])
    assert [first, last] == pytest.approx(ours(model)[:2], abs=1e-5)
    assert isinstance(bad, DataError) and "must fit into 512 tokens, got 6" in str(bad)
    assert isinstance(worse, DataError) and "must not spell out" in str(worse)


def test_a_reward_model_is_no_language_model(tmp_path: Path, tiny_policy: TinyPolicy) -> None:
    export_scalar(reward_model(tiny_policy("llama")), tmp_path / "model")
    with pytest.raises(ModelError, match=r"must be a language model, got .* \(LlamaForSequenceClassification\)"):
        check_model(ModelConfig(path=str(tmp_path / "model"), device="cpu"))
