"""The size of a model, read from its folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from kitae.study.model_shape import ModelShape, read_model

TinyFolder = Callable[[str], Path]


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_the_shape_is_that_of_the_model(family: str, tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder(family)
    found, config = read_model(str(folder)), AutoConfig.from_pretrained(folder)
    assert found is not None and found.kind == family
    assert (found.hidden, found.layers) == (config.hidden_size, config.num_hidden_layers)
    assert (found.heads, found.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    if family == "qwen3_moe":
        assert found.inner == config.moe_intermediate_size * config.num_experts_per_tok
        left_out = config.num_experts - config.num_experts_per_tok
        assert found.idle == left_out * 3 * config.hidden_size * config.moe_intermediate_size * config.num_hidden_layers
    else:
        assert found.active == found.parameters


@pytest.fixture
def changed(tiny_folder: TinyFolder, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny model whose config.json says other things."""

    def make(family: str = "llama", **values: Any) -> Path:
        folder = Path(shutil.copytree(tiny_folder(family), tmp_path / "model"))
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**said, **values}))
        return folder

    return make


def shape_of(folder: Path) -> ModelShape:
    found = read_model(str(folder))
    assert found is not None
    return found


def test_null_is_as_if_it_were_missing(changed: Callable[..., Path]) -> None:
    found = shape_of(changed(num_key_value_heads=None, head_dim=None, text_config=None, num_experts_per_tok=None))
    assert (found.kv_heads, found.head_dim, found.mixture) == (4, 16, False)


def test_experts_that_all_tokens_share_count(changed: Callable[..., Path]) -> None:
    assert shape_of(changed("qwen3_moe", shared_expert_intermediate_size=40)).inner == 2 * 64 + 40


def test_families_have_other_names_for_the_same(changed: Callable[..., Path]) -> None:
    """GPT-2 and OPT."""
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    none = dict.fromkeys((*usual, "intermediate_size"))
    found = shape_of(changed(**none, n_embd=48, n_layer=5, n_head=6, ffn_dim=100))
    assert (found.hidden, found.layers, found.heads, found.kv_heads) == (48, 5, 6, 6)
    assert (found.head_dim, found.inner) == (8, 100)


@pytest.mark.parametrize("names", [("moe_topk", "num_experts"), ("moe_k", "moe_num_experts")])
def test_experts_have_other_names_too(names: tuple[str, str], changed: Callable[..., Path]) -> None:
    """Hunyuan and Ernie."""
    usual = dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"))
    found = shape_of(changed("qwen3_moe", **{**usual, **dict(zip(names, (3, 4), strict=True))}))
    assert found.mixture and found.inner == 3 * 64
    assert found.idle == 3 * found.hidden * 64 * found.layers


@pytest.mark.parametrize(("said", "inner"), [([96, 128], 128), ("wide", 170), ([], 170), (["wide"], 170)])
def test_what_is_no_single_number(said: Any, inner: int, changed: Callable[..., Path]) -> None:
    """Gemma 3n has a width for each layer."""
    assert shape_of(changed(intermediate_size=said)).inner == inner


@pytest.mark.parametrize("beside", ["consolidated.safetensors", "adapter_model.safetensors"])
def test_only_what_is_loaded_is_counted(beside: str, changed: Callable[..., Path], tiny_folder: TinyFolder) -> None:
    folder = changed()
    shutil.copy(folder / "model.safetensors", folder / beside)
    assert shape_of(folder).parameters == shape_of(tiny_folder("llama")).parameters


def test_parts_are_those_of_the_index(changed: Callable[..., Path], tiny_folder: TinyFolder) -> None:
    folder = changed()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    shutil.copy(folder / "model-00001-of-00001.safetensors", folder / "consolidated.safetensors")
    parts = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(parts))
    assert shape_of(folder).parameters == shape_of(tiny_folder("llama")).parameters


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"


@pytest.mark.parametrize("weights", [b"", POINTER, b"\2" + bytes(7)])
def test_weights_that_are_none_have_no_shape(weights: bytes, changed: Callable[..., Path]) -> None:
    """A pointer to a file that was not fetched begins with what would be a header of exabytes."""
    folder = changed()
    (folder / "model.safetensors").write_bytes(weights)
    assert read_model(str(folder)) is None


@pytest.mark.parametrize("said", ["{", "[]", "\udcff", '{"text_config": 3}'])
def test_a_config_that_is_none_has_no_shape(said: str, changed: Callable[..., Path]) -> None:
    folder = changed()
    (folder / "config.json").write_bytes(said.encode(errors="surrogateescape"))
    assert read_model(str(folder)) is None
