"""A mixture of experts from a dense model: real language for tests and studies, where there are no other weights.

    python benchmarks/upcycle.py smollm2-135m mixture --experts 4 --top-k 2 --noise 0.05

Every MLP becomes several experts with its weights, and a random router before them; all else stays. Gates of Mixtral
add up to 1, so with `noise` 0 the mixture computes what the dense model does. With more, experts differ, and it matters
which are chosen.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitae.errors import KitaeError, ModelError
from kitae.models.load import find_model
from kitae.models.quiet import quiet_transformers
from kitae.models.written_folder import written_whole

if TYPE_CHECKING:
    from torch import Generator, Tensor

_SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype",
)  # fmt: skip


def upcycle(path: str, folder: Path, *, experts: int = 4, top_k: int = 2, noise: float = 0.0, seed: int = 0) -> Path:
    """Write a Mixtral of the Llama at `path` to `folder`, which must be new or empty, with its tokenizer.

    noise: of the weights of each expert, relative to their deviation.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

    if not 1 <= top_k <= experts:
        raise ModelError(f"top_k must be from 1 to the number of experts, {experts}, got {top_k}")
    if not 0 <= noise < math.inf:
        raise ModelError(f"noise must be a finite number of at least 0, got {noise:g}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"the mixture must go into a new or empty folder, got {folder}")
    source = find_model(path)
    assert source is not None
    _check(AutoConfig.from_pretrained(source), path)
    with quiet_transformers():
        dense, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
        config = MixtralConfig(
            **{key: getattr(dense.config, key) for key in _SAME}, num_local_experts=experts, num_experts_per_tok=top_k
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            mixture = MixtralForCausalLM(config).to(dense.dtype)
        _fill(mixture, dense, experts, noise, torch.Generator().manual_seed(seed))
        mixture.generation_config = dense.generation_config
        with written_whole(folder) as scratch:
            mixture.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
    return folder


def _check(config: Any, path: str) -> None:
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise ModelError(f"only a Llama without biases can be upcycled, got {path!r} ({config.model_type})")


def _fill(mixture: Any, dense: Any, experts: int, noise: float, generator: "Generator") -> None:
    """With the weights of the dense model; routers keep theirs."""
    import torch

    found: dict[str, Tensor] = dense.state_dict()
    with torch.no_grad():
        for name, parameter in mixture.named_parameters():
            block = name.rpartition(".mlp.")[0]
            if name.endswith(".mlp.experts.gate_up_proj"):
                both = torch.cat([found[f"{block}.mlp.{part}_proj.weight"] for part in ("gate", "up")])
                parameter.copy_(_several(both, experts, noise, generator))
            elif name.endswith(".mlp.experts.down_proj"):
                parameter.copy_(_several(found[f"{block}.mlp.down_proj.weight"], experts, noise, generator))
            elif not name.endswith(".mlp.gate.weight"):
                parameter.copy_(found[name])


def _several(weight: "Tensor", experts: int, noise: float, generator: "Generator") -> "Tensor":
    import torch

    copies = weight.float().expand(experts, *weight.shape)
    return copies + noise * weight.float().std() * torch.randn(copies.shape, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args())
    try:
        print(upcycle(given.pop("model"), given.pop("folder"), **given))
    except KitaeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
