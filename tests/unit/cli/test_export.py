"""What `kitae export` writes is read by other programs, and gives what the run's model gives."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from written_runs import WrittenRun

from kitae.cli.export import export
from kitae.errors import KitaeError, ModelError, StoreError
from kitae.models.config import ModelConfig
from kitae.models.gguf_file import write_gguf
from kitae.models.load import load_policy
from kitae.models.written_folder import export_policy

TEXT = "Reverse 12, 34, 56: the answer"


def logits(folder: Path, tokenizer: Path | None = None, **settings: object) -> torch.Tensor:
    tokens = AutoTokenizer.from_pretrained(tokenizer or folder)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings)(
            tokens
        ).logits
    return found


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(("quant", "gap"), [("f16", 2e-2), ("q8_0", 0.2)])
def test_gguf_files_give_the_same(
    architecture: str, quant: str, gap: float, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf")
    folder = tiny_folder(architecture)
    write_gguf(folder, tmp_path / "model.gguf", quant)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = gguf.GGUFReader(tmp_path / "model.gguf").fields
    tokens = said["tokenizer.ggml.tokens"].contents()
    assert len(tokens) >= 259 and tokens == tokenizer.convert_ids_to_tokens(range(len(tokens)))
    assert said["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eos_token_id
    assert said["tokenizer.chat_template"].contents() == tokenizer.chat_template
    ours, theirs = logits(folder), logits(tmp_path, folder, gguf_file="model.gguf")
    assert (ours - theirs).abs().max() < gap * ours.abs().max()


def test_all_tensors_of_a_qwen3_have_a_place(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers reads no size of heads from a GGUF file of this family but its default."""
    gguf = pytest.importorskip("gguf")
    folder = tiny_folder("qwen3")
    write_gguf(folder, tmp_path / "model.gguf")
    read = gguf.GGUFReader(tmp_path / "model.gguf")
    assert read.fields["qwen3.attention.key_length"].contents() == 16
    sizes = sorted(int(t.n_elements) for t in read.tensors)
    assert sizes == sorted(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())


def test_what_gguf_cannot_say_is_refused(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(ModelError, match="llama, mistral, qwen2, qwen3, got 'gemma3_text'"):
        write_gguf(tiny_folder("gemma3"), tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="f16, q8_0, q5_0, q4_0, got 'q4_k'"):
        write_gguf(tiny_folder("llama"), tmp_path / "model.gguf", "q4_k")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_adapters_are_those_of_peft(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = tiny_folder("llama")
    policy = load_policy(ModelConfig(path=str(base), lora_rank=4, dtype="float32", device="cpu"))
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    export_policy(policy, tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(base)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        before = plain(tokens).logits
        adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "model/adapter")(tokens).logits
    merged = logits(tmp_path / "model")
    assert (adapted - before).abs().max() > 1e-2
    torch.testing.assert_close(adapted, merged, atol=1e-4, rtol=1e-4)


def test_a_run_is_exported_with_its_card(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.step(rewards=[[1.0, 0.0]])
    finished_run = run.evaluate(0.75).finish()
    shutil.copytree(tiny_folder("llama"), finished_run / "model")
    export(str(finished_run), tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "llama"
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers") and "| step | held-out mean score |" in card
    assert "`model.safetensors`" in card and "| 0.7500 |" in card
    assert torch.equal(logits(tmp_path / "out"), logits(finished_run / "model"))
    with pytest.raises(StoreError, match="exists already"):
        export(str(finished_run), tmp_path / "out")
    with pytest.raises(KitaeError, match="has no adapters"):
        export(str(finished_run), tmp_path / "adapter", form="adapter")
    assert not (tmp_path / "adapter").exists()
    with pytest.raises(StoreError, match="add --as gguf"):
        export(str(finished_run), tmp_path / "out.gguf")


def test_the_card_of_adapters_is_about_them(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run = WrittenRun(tmp_path)
    run.step(rewards=[[1.0, 0.0]])
    finished = run.finish()
    config = ModelConfig(path=str(tiny_folder("llama")), lora_rank=2, dtype="float32", device="cpu")
    mask = os.umask(0o022)
    try:
        export_policy(load_policy(config), finished / "model")
        export(str(finished), tmp_path / "out", form="adapter")
    finally:
        os.umask(mask)
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft") and "`model.safetensors`" not in card
    assert "`adapter_model.safetensors`" in card and "`adapter_config.json`" in card
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (finished / "model").rglob("*")}
    assert (modes.pop("adapter"), set(modes.values())) == ("0o755", {"0o644"}), "others may read it"
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def test_a_model_is_exported_too(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    export(str(tiny_folder("qwen3")), tmp_path / "model.gguf", form="gguf", quant="q8_0")
    assert (tmp_path / "model.gguf").stat().st_size > 10_000
    with pytest.raises(StoreError, match="there is no folder"):
        export(str(tiny_folder("qwen3")), tmp_path / "none/model")
