"""Which modules get adapters, and that a model that is written has what they add."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kitae.errors import ModelError
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.written_folder import export_policy

TOKENS = torch.arange(3, 20)


@pytest.fixture(scope="module")
def gpt2(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its linear layers are of a kind of their own, with weights the other way round; head and embedding are tied."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2", n_embd=64, n_layer=2, n_head=4, vocab_size=259, n_positions=256, bos_token_id=1, eos_token_id=2
    )
    folder = tmp_path_factory.mktemp("gpt2")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder("llama")).save_pretrained(folder)
    return folder


def load(folder: Path, targets: str | None = None) -> Policy:
    adapters = {} if targets is None else {"lora_rank": 4, "lora_targets": targets}
    return load_policy(
        ModelConfig.model_validate({"path": str(folder), "dtype": "float32", "device": "cpu"} | adapters)
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", "all-linear"),
        ("llama", "q_proj,down_proj"),
        ("gpt2", "all-linear"),
        ("gpt2", "attn.c_proj"),
    ],
)
def test_what_is_written_is_what_was_trained(
    family: str, targets: str, gpt2: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    source = gpt2 if family == "gpt2" else tiny_folder(family)
    policy = load(source, targets)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2)
    expected = policy.score(TOKENS)
    assert not torch.allclose(load(source).score(TOKENS), expected, atol=1e-2)
    export_policy(policy, tmp_path / "model")
    torch.testing.assert_close(load(tmp_path / "model").score(TOKENS), expected, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("targets", ["embed_tokens", "q_proj,embed_tokens"])
def test_embeddings_get_none(targets: str, tiny_folder: Callable[[str], Path]) -> None:
    """Before anything is trained, and not when it is written."""
    with pytest.raises(
        ModelError, match=f"must name linear layers, got '{targets}': .*embed_tokens is of kind Embedding"
    ):
        load(tiny_folder("llama"), targets)


@pytest.mark.parametrize(
    ("family", "targets"), [("llama", "q_proj, lm_head"), ("qwen3_moe", "lm_head"), ("gpt2", "lm_head")]
)
def test_the_head_gets_none(family: str, targets: str, gpt2: Path, tiny_folder: Callable[[str], Path]) -> None:
    """It would learn nothing there."""
    with pytest.raises(ModelError, match=f"model.lora_targets must leave the head out, got '{targets}'"):
        load(gpt2 if family == "gpt2" else tiny_folder(family), targets)
