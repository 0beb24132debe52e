"""Small random models of any causal family of the installed transformers, for tests and for benchmarks/census.py.

A family is made from its own default settings: every setting that is known here as a size gets a small number, lists
with an entry for each layer keep one layer of every kind, and settings in settings (those of a text model in one that
sees) are treated alike. `SPECIAL` has what a family needs beside that. Norms, biases and sinks get random numbers too,
so that a part that is left out shows.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kitae.models.quiet import quiet_transformers
from kitae.models.tiny import make_tokenizer

LAYERS = 4  # at most, and at least two
SIZES: dict[str, int] = {
    "vocab_size": 259, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "embedding_size": 64, "embedding_dim": 64,
    "word_embed_proj_dim": 64, "dim": 64, "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "ffn_hidden_size": 96,
    "d_ff": 96, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "dense_intermediate_size": 96, "mlp_hidden_size": 96,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "attention_head_dim": 16, "max_position_embeddings": 256, "n_positions": 256, "max_seq_len": 256,
    "sliding_window": 8, "sliding_window_size": 8, "attention_window_size": 8, "window_size": 8,
    "attention_chunk_size": 256, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
    "swa_v_head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_topk": 2, "top_k_experts": 2, "moe_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "n_group": 2, "topk_group": 1, "num_expert_group": 2, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 256, "o_groups": 2, "o_lora_rank": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_n_heads": 4, "mamba_num_heads": 4, "n_mamba_heads": 2, "mamba_d_head": 32, "mamba_head_dim": 32,
    "mamba_headdim": 32, "mamba_d_state": 16, "mamba_d_ssm": 128, "mamba_chunk_size": 16, "mamba_dt_rank": 4,
    "mamba_n_groups": 1, "ssm_state_size": 16, "state_size": 16, "time_step_rank": 4, "chunk_size": 16, "lru_width": 64,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 259, "laurel_rank": 8, "attention_hidden_size": 64,
    "d_rel": 8, "rel_extent": 16, "linear_head_dim": 16, "linear_num_heads": 4, "num_experts_per_token": 2,
    "model_max_length": 256, "moe_ffn_hidden_size": 32, "router_hidden_size": 16,
}  # fmt: skip
UNSET = ("head_dim", "num_key_value_heads", "sliding_window")  # set even where the default is none
LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # with latent attention all heads have keys of their own
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_blocks")
SWA = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 24, "swa_kv_lora_rank": 24,
    "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 20,
}  # fmt: skip
SHARING = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
}  # fmt: skip
SPECIAL: dict[str, dict[str, Any]] = {  # what makes a family different from its neighbours, or what it needs
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 300},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        },
    },
    "cpmant": {"dim_head": 16, "dim_ff": 96, "prompt_types": 4, "prompt_length": 4, "segment_types": 4},
    "ctrl": {"dff": 96},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {"head_dim": 24, **SWA},
    "codegen": {"rotary_dim": 8},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 2, "topk_method": "group_limited_greedy"},
    "gptj": {"rotary_dim": 8},
    "gemma3n_text": {**SHARING, "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0]},
    "gemma4_text": {**SHARING, "global_head_dim": 32},
    "gemma4_unified_text": {**SHARING, "global_head_dim": 32},
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0, "attention_multiplier": 0.1
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        }
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "hc_lowrank": 8,
    },
    "nemotron_h": {
        "n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 32,
        "layers_block_type": ["linear_attention", "full_attention", "moe"],
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "roc_bert": {"pronunciation_vocab_size": 8, "shape_vocab_size": 8},
    "smollm3": {"no_rope_layers": [1, 0]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "attention_hidden_size": 128,
        "attention_head_dim": 32, "num_key_value_heads": 4, "n_mamba_heads": 2,
    },
    "zamba2": {"attention_hidden_size": 128, "n_mamba_heads": 4, "mamba_ngroups": 1, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def families() -> list[str]:
    """The names of all causal families of the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(family: str, **settings: Any) -> Any:
    return AutoConfig.for_model(family, **small_settings(AutoConfig.for_model(family)) | settings)


def merged(settings: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    inner = {name: merged(settings[name], more[name]) for name in settings.keys() & more if name.endswith("_config")}
    return settings | more | inner


def small_settings(default: Any) -> dict[str, Any]:
    """The settings of a small model, from the default ones of its family."""
    found: dict[str, Any] = {name: size for name, size in SIZES.items() if _is_size(default, name)}
    if "kv_lora_rank" in found:
        found |= {name: size for name, size in LATENT.items() if name in found}
    count = next((n for name in COUNTS if (n := getattr(default, name, None)) is not None), 0)
    lists = {name: value for name, value in vars(default).items() if _per_layer(value, count)}
    kept = _one_of_each_kind([tuple(map(str, kinds)) for kinds in zip(*lists.values(), strict=True)] or [()] * count)
    found |= {name: [value[i] for i in kept] for name, value in lists.items()}
    found |= {name: len(kept) for name in COUNTS if getattr(default, name, None) is not None}
    for name in getattr(default, "sub_configs", {}):
        if (inner := getattr(default, name, None)) is not None:
            found[name] = small_settings(inner)
    return merged(found, SPECIAL.get(default.model_type, {}))


def _is_size(config: Any, name: str) -> bool:
    """Whether the setting is there and may be set: it may also be computed from others."""
    if isinstance(known := getattr(type(config), name, None), property) and known.fset is None:
        return False
    try:
        value = getattr(config, name)
    except AmbiguousGlobalPerLayerAttributeError:
        return True
    except AttributeError:
        return False
    return isinstance(value, int | float) or name in UNSET or name.endswith("token_id")


def _per_layer(value: Any, count: int) -> bool:
    return count > 2 and isinstance(value, list | tuple) and len(value) == count


def _one_of_each_kind(kinds: list[tuple[str, ...]]) -> list[int]:
    """The places of the first layer of each kind, in order; if there are fewer than two, of the first two layers."""
    first = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())[:LAYERS]
    return first if len(first) > 1 else list(range(min(2, len(kinds))))


def make_small(family: str, folder: Path, seed: int = 0, **settings: Any) -> Path:
    """Write a small random model of the family, in float32, and a tokenizer of bytes, to the folder.

    settings: those that differ from the small ones.
    """
    config = small_config(family, **settings)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.15)
            else:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
        model.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    return folder
