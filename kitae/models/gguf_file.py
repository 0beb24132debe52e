"""A model folder as one GGUF file, which llama.cpp and the programs around it read.

Known are the Llama, Mistral, Qwen2 and Qwen3 families with byte-level tokenizers, in float16 or in blocks of 8, 5 or
4 bits. Left out, and refused by name: other families, scaled rotary positions, SentencePiece tokenizers, and the
K-quants, which the Python package of GGUF reads but does not write.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kitae.errors import ModelError

ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""By the model type of transformers, the name of the architecture in GGUF."""

QUANTS = {"f16": "F16", "q8_0": "Q8_0", "q5_0": "Q5_0", "q4_0": "Q4_0"}
"""By the name that is asked for, the type of the matrices. Norms and biases stay in float32."""

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_QWEN2: "qwen2", _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"): "llama-bpe"}
_CONTROL, _USER, _UNUSED, _NORMAL = 3, 4, 5, 1  # kinds of tokens


def write_gguf(model: Path, file: Path, quant: str = "f16") -> None:
    """Write the model of a folder in the format of transformers; raises `ModelError` before anything is written."""
    gguf = _package()
    if quant not in QUANTS:
        raise ModelError(f"a GGUF file is written as {', '.join(QUANTS)}, got {quant!r}")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"{model}: a GGUF file is written for {', '.join(ARCHITECTURES)}, got {kind!r}; the converter of llama.cpp "
            f"reads this folder as it is"
        )
    rotary = config.get("rope_parameters") or {}
    if rotary.get("rope_type", "default") != "default":
        raise ModelError(f"{model}: positions in a GGUF file must not be scaled, got {rotary['rope_type']!r}")
    tokenizer = _Tokenizer(model, int(config["vocab_size"]))
    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURES[kind])
    names = gguf.get_tensor_name_map(architecture, int(config["num_hidden_layers"]))
    scratch = file.with_name(f".{file.name}.partial")
    writer = gguf.GGUFWriter(scratch, gguf.MODEL_ARCH_NAMES[architecture])
    _write_settings(writer, config, float(rotary.get("rope_theta", 1e4)), model.name)
    tokenizer.write(writer)
    wanted = getattr(gguf.GGMLQuantizationType, QUANTS[quant])
    for name, array in _arrays(model):
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ModelError(f"{model}: GGUF has no place for {name}")
        turned = kind in ("llama", "mistral") and name.endswith(("q_proj.weight", "k_proj.weight"))
        heads = int(config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"])
        writer.add_tensor(target, *_stored(gguf, _interleaved(array, heads) if turned else array, wanted))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scratch.replace(file)


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise ModelError("writing a GGUF file needs the package gguf: pip install 'kitae[gguf]'") from None
    return gguf


def _write_settings(writer: Any, config: dict[str, Any], theta: float, name: str) -> None:
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_name(name)
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_vocab_size(int(config["vocab_size"]))


def _arrays(model: Path) -> Iterator[tuple[str, Any]]:
    """The tensors of the folder's files as float32 arrays; a head that is tied to the embedding is not among them."""
    from safetensors import safe_open

    for part in sorted(model.glob("*.safetensors")):
        with safe_open(part, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                yield name, tensors.get_tensor(name).float().numpy()


def _interleaved(array: Any, heads: int) -> Any:
    """Rows of queries or keys in the order of llama.cpp: pairs that rotate together are neighbours there."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _stored(gguf: Any, array: Any, wanted: Any) -> tuple[Any, None, Any]:
    """What `add_tensor` takes after the name. A matrix whose rows do not fill blocks stays in float16."""
    types = gguf.GGMLQuantizationType
    if array.ndim == 1:
        return array, None, types.F32
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    kind = wanted if array.shape[-1] % block == 0 else types.F16
    return gguf.quants.quantize(array, kind), None, kind


class _Tokenizer:
    """The tokenizer of a model folder, checked, in the terms of GGUF."""

    def __init__(self, model: Path, size: int) -> None:
        path = model / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{model}: a GGUF file needs tokenizer.json, which is not there")
        self._read = json.loads(path.read_text(encoding="utf-8"))
        settings = model / "tokenizer_config.json"
        self._settings = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
        template = model / "chat_template.jinja"
        self._template = template.read_text(encoding="utf-8") if template.is_file() else None
        if self._read["model"]["type"] != "BPE" or self._read["model"].get("byte_fallback"):
            raise ModelError(f"{model}: a GGUF file is written for tokenizers of byte pairs, got another kind")
        self._splits = _split_name(model, self._read["pre_tokenizer"])
        self._size = size

    def write(self, writer: Any) -> None:
        vocabulary: dict[str, int] = self._read["model"]["vocab"]
        tokens, kinds = [f"[PAD{i}]" for i in range(self._size)], [_UNUSED] * self._size
        for token, place in vocabulary.items():
            tokens[place], kinds[place] = token, _NORMAL
        for added in self._read.get("added_tokens", []):
            tokens[added["id"]], kinds[added["id"]] = added["content"], _CONTROL if added["special"] else _USER
        merges = self._read["model"]["merges"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self._splits)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
        places = {token: place for place, token in enumerate(tokens)}
        for role, write in (
            ("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id), ("pad", writer.add_pad_token_id),
        ):  # fmt: skip
            said: Any = self._settings.get(f"{role}_token")
            text = said.get("content") if isinstance(said, dict) else said
            if text in places:
                write(places[text])
        writer.add_add_bos_token(False)  # templates write what the model was trained with
        if self._template is not None:
            writer.add_chat_template(self._template)


def _split_name(model: Path, splits: Any) -> str:
    """What GGUF calls the rule by which text is split before pairs are merged."""
    parts = splits["pretokenizers"] if splits and splits["type"] == "Sequence" else [splits]
    kinds = [part["type"] for part in parts if part]
    if kinds == ["ByteLevel"] and parts[0]["use_regex"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and parts[1]["use_regex"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and (known := _SPLITS.get(parts[0]["pattern"].get("Regex", ""))):
        return known
    raise ModelError(
        f"{model}: GGUF names the ways to split a text, and that of this tokenizer is not among "
        f"gpt-2, smollm, {', '.join(_SPLITS.values())}"
    )
