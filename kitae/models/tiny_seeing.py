"""Tiny random models that see, with the processors of their families: `make_seeing(folder, "qwen2_5_vl")`.

As `kitae.models.tiny`, they are there for tries and tests; nothing of them was trained.
"""

import json
from pathlib import Path
from typing import Any

from kitae.models.picture_reader import FAMILIES
from kitae.models.quiet import quiet_transformers
from kitae.models.tiny import make_tiny, make_tokenizer

_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
_SIDE = 32  # pixels of a picture's tile
_CONTROL = {
    **dict.fromkeys(_QWEN, ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")),
    "smolvlm": ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    "idefics3": ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    "llava_onevision": ("<image>", "<video>"),
    "internvl": ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
}
_WRITTEN = dict.fromkeys(_QWEN, "<|vision_start|><|image_pad|><|vision_end|>")


def make_seeing(
    folder: Path, family: str = "smolvlm", *, seed: int = 0, hidden: int = 64, layers: int = 2, context: int = 1024,
    side: int = _SIDE, patch: int = 8,
) -> Path:  # fmt: skip
    """Write a random model of one of the families `FAMILIES`, its processor and its tokenizer to `folder`.

    side: of the tiles that the tower reads, in pixels; patch: of the squares that it cuts them into.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    tokenizer = _tokenizer(family)
    config = _config(family, tokenizer, hidden, layers, context, side, patch)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # some classes leave what is to be loaded as it is
                if not bool(parameter.isfinite().all()) or parameter.abs().max() > 1e3:
                    parameter.normal_(0, 0.1)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _image_processor(family, side, patch).save_pretrained(folder)
        if rest := _processor_settings(family, side, patch):
            (folder / "processor_config.json").write_text(json.dumps(rest))
    return folder


def make_random(folder: Path, family: str) -> Path:
    """A tiny random model of a family that sees or of another one."""
    return make_seeing(folder, family) if family in FAMILIES else make_tiny(folder, family)


def _tokenizer(family: str) -> Any:
    tokenizer = make_tokenizer()
    control = _CONTROL[family]
    tiles = tuple(f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)) if "<global-img>" in control else ()
    tokenizer.add_special_tokens({"additional_special_tokens": [*control, *tiles]})
    written = _WRITTEN.get(family, control[0])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
        "{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}" + written + "{% else %}{{ p['text'] }}"
        "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    if family == "internvl":
        names = ("context_image_token", "start_image_token", "end_image_token", "video_token")
        tokenizer = type(tokenizer)(
            tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token, pad_token=tokenizer.pad_token,
            chat_template=tokenizer.chat_template, extra_special_tokens=dict(zip(names, control, strict=True)),
        )  # fmt: skip
    return tokenizer


def _image_processor(family: str, side: int, patch: int) -> Any:
    import transformers

    if family in _QWEN:
        size = {"shortest_edge": side * side, "longest_edge": 4 * side * side}
        return transformers.Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, temporal_patch_size=2, size=size)
    square = {"height": side, "width": side}
    if family in ("smolvlm", "idefics3"):
        kind = {"smolvlm": "SmolVLMImageProcessorPil", "idefics3": "Idefics3ImageProcessorPil"}[family]
        edge = {"longest_edge": side}
        return getattr(transformers, kind)(size={"longest_edge": 2 * side}, max_image_size=edge)
    if family == "llava_onevision":
        pins = [[side, side], [side, 2 * side], [2 * side, side]]
        return transformers.LlavaOnevisionImageProcessorPil(size=square, image_grid_pinpoints=pins)
    return transformers.GotOcr2ImageProcessorPil(size=square, crop_to_patches=True, max_patches=2)


def _processor_settings(family: str, side: int, patch: int) -> dict[str, Any]:
    squares = (side // patch) ** 2
    if family in ("smolvlm", "idefics3"):
        return {"image_seq_len": squares // 4}
    if family == "llava_onevision":
        return {"num_image_tokens": squares, "vision_feature_select_strategy": "full"}
    return {"image_seq_length": squares // 4} if family == "internvl" else {}


def _config(family: str, tokenizer: Any, hidden: int, layers: int, context: int, side: int, patch: int) -> Any:
    import transformers

    soft = tokenizer.convert_tokens_to_ids(_CONTROL[family][0])
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4,
        "max_position_embeddings": context, "initializer_range": 0.1, "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    tower: dict[str, Any] = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
        "image_size": side, "patch_size": patch, "initializer_range": 0.1,
    }  # fmt: skip
    more: dict[str, Any] = {"image_token_id": soft, "tie_word_embeddings": True}
    if family in _QWEN:
        text, tower, more = _of_qwen(family, tokenizer, text, tower, more)
    elif family in ("smolvlm", "idefics3"):
        text |= {"model_type": "llama"}
        more |= {"scale_factor": 2}
    elif family == "llava_onevision":
        text |= {"model_type": "qwen2"}
        tower |= {"model_type": "siglip_vision_model"}
        pins = [[side, side], [side, 2 * side], [2 * side, side]]
        more = {
            "image_token_index": soft, "image_grid_pinpoints": pins, "tie_word_embeddings": True,
            "vision_feature_select_strategy": "full", "vision_feature_layer": -1,
            "video_token_index": tokenizer.convert_tokens_to_ids("<video>"),
        }  # fmt: skip
    else:
        text |= {"model_type": "qwen2"}
        tower |= {"image_size": [side, side], "patch_size": [patch, patch], "layer_scale_init_value": 1.0}
        more |= {"downsample_ratio": 0.5, "vision_feature_layer": -1}
    names = {
        "smolvlm": "SmolVLMConfig", "idefics3": "Idefics3Config", "llava_onevision": "LlavaOnevisionConfig",
        "internvl": "InternVLConfig", "qwen2_vl": "Qwen2VLConfig", "qwen2_5_vl": "Qwen2_5_VLConfig",
        "qwen3_vl": "Qwen3VLConfig", "qwen3_5": "Qwen3_5Config",
    }  # fmt: skip
    return getattr(transformers, names[family])(text_config=text, vision_config=tower, **more)


def _of_qwen(
    family: str, tokenizer: Any, text: dict[str, Any], tower: dict[str, Any], more: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Their towers cut pictures of any shape, and their positions have rows and columns."""
    hidden = text["hidden_size"]
    ids = tokenizer.convert_tokens_to_ids
    names = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    more = {**more, "video_token_id": ids("<|video_pad|>"), **{k: ids(v) for k, v in names.items()}}
    parts = [hidden // 8 - 2 * (hidden // 24), hidden // 24, hidden // 24]
    text = {**text, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": parts}}
    shape = {"patch_size": tower["patch_size"], "spatial_merge_size": 2, "temporal_patch_size": 2}
    blocks = {"depth": tower["num_hidden_layers"], "num_heads": 4, "initializer_range": 0.1}
    if family == "qwen2_vl":
        return text, {**shape, **blocks, "embed_dim": hidden, "hidden_size": hidden, "mlp_ratio": 2}, more
    tower = {**shape, **blocks, "hidden_size": hidden, "intermediate_size": 2 * hidden, "out_hidden_size": hidden}
    if family == "qwen2_5_vl":
        return text, {**tower, "window_size": 4 * tower["patch_size"], "fullatt_block_indexes": [1]}, more
    tower |= {"num_position_embeddings": 64}
    if family == "qwen3_vl":
        return text, {**tower, "deepstack_visual_indexes": [0]}, more
    head = hidden // 4
    kinds = [("linear_attention", "full_attention")[i % 2] for i in range(text["num_hidden_layers"])]
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes = {"linear_key_head_dim": head, "linear_value_head_dim": head}
    text["rope_parameters"] |= {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
    return {**text, "layer_types": kinds, **heads, **sizes}, tower, more
