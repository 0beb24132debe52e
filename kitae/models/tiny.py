"""Tiny random models with a byte-level tokenizer. The whole loop runs on them in seconds, without any download.

They are part of the package so that users can test their own tasks, verifiers and algorithms. `make_tiny(folder,
"qwen3")` writes an ordinary Hugging Face folder.
"""

from pathlib import Path
from typing import Any

from kitae.models.quiet import quiet_transformers

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "mistral")
MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss")
HYBRIDS = ("qwen3_5", "lfm2", "bamba", "minimax", "jamba")
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny(
    folder: Path, architecture: str = "llama", *, seed: int = 0, hidden: int = 64, layers: int = 2, context: int = 512
) -> Path:
    """Write a random model of the given architecture and its tokenizer to `folder`.

    One of `ARCHITECTURES`, of `MIXTURES`, which have experts, or of `HYBRIDS`, in which every other layer carries a
    state from token to token.
    """
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = make_tokenizer()
    config = _config(architecture, len(tokenizer), hidden, layers, context, tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    core = Tokenizer(BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[2])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _config(architecture: str, vocab: int, hidden: int, layers: int, context: int, eos: int) -> Any:
    import transformers

    classes = {
        "llama": "LlamaConfig",
        "qwen2": "Qwen2Config",
        "qwen3": "Qwen3Config",
        "gemma3": "Gemma3TextConfig",
        "mistral": "MistralConfig",
        "qwen3_moe": "Qwen3MoeConfig",
        "mixtral": "MixtralConfig",
        "gpt_oss": "GptOssConfig",
        "qwen3_5": "Qwen3_5TextConfig",
        "lfm2": "Lfm2Config",
        "bamba": "BambaConfig",
        "minimax": "MiniMaxConfig",
        "jamba": "JambaConfig",
    }
    extra: dict[str, Any] = {}
    if architecture in ("gemma3", "mistral"):
        extra["sliding_window"] = 24  # small, so that tests cross it
    if architecture == "qwen3_moe":
        extra |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    if architecture in ("mixtral", "gpt_oss"):
        extra |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if architecture == "gemma3":
        extra["query_pre_attn_scalar"] = 16
    if architecture in HYBRIDS:
        extra |= _of_hybrid(architecture, hidden, layers)
    return getattr(transformers, classes[architecture])(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=eos,
        bos_token_id=None,
        pad_token_id=0,
        **extra,
    )


def _of_hybrid(architecture: str, hidden: int, layers: int) -> dict[str, Any]:
    """Settings of layers that carry a state: the first one does, the second attends, and so on."""
    first = "conv" if architecture == "lfm2" else "linear_attention"
    kinds = [(first, "full_attention")[i % 2] for i in range(layers)]
    head = hidden // 4
    if architecture == "qwen3_5":
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        return {"layer_types": kinds, "linear_key_head_dim": head, "linear_value_head_dim": head, **heads}
    if architecture == "bamba":
        mamba = {"mamba_n_heads": 8, "mamba_d_head": head, "mamba_d_state": 16, "mamba_chunk_size": 16}
        return {"attn_layer_indices": list(range(1, layers, 2)), "mamba_n_groups": 1, **mamba}
    if architecture == "jamba":
        attention = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1}
        return {"mamba_d_state": 16, "mamba_dt_rank": 4, **attention}
    more = {"minimax": {"block_size": 16, "num_local_experts": 2, "num_experts_per_tok": 1}}
    return {"layer_types": kinds, **more.get(architecture, {})}
