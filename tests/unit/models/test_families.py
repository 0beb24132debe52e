"""Families of models of transformers: engine and trainer give what the model gives by itself, or it is refused.

What the page docs/models.md says of each is read from it, and must be so.
"""

import asyncio
import importlib
import json
import math
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import load_script
from torch import Tensor
from transformers import AutoModelForCausalLM

from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.cpu_runner import PackedDecoder
from kitae.engines.native.decoder_layers import is_known, is_plain
from kitae.engines.native.engine import NativeEngine
from kitae.engines.native.page_cache import KVCache
from kitae.errors import KitaeError
from kitae.kernels.cpu import packed
from kitae.kernels.cpu.compile_cpp import cpu_library
from kitae.kernels.norms import NormRule
from kitae.models.config import ModelConfig
from kitae.models.fuse import fuse
from kitae.models.layer_kinds import is_llama_layer, norm_of
from kitae.models.load import load_policy
from kitae.models.policy import Policy

PAGE = Path(__file__).parents[3] / "docs/models.md"


def table() -> list[tuple[str, list[str]]]:
    """Rows of the page: the name of the family in transformers, and the cells after it."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [(name.strip().strip("`"), [cell.strip() for cell in cells]) for name, *cells in rows]


ROWS = dict(table())
RUN = [name for name, cells in ROWS.items() if cells[0] == "yes"]
REFUSED = [name for name, cells in ROWS.items() if cells[0] == "refused"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    small_models = load_script("small_models")

    @cache
    def make(family: str) -> Path:
        folder: Path = small_models.make_small(family, tmp_path_factory.mktemp(family))
        return folder

    return make


def load(folder: Path, *, fused: bool = True) -> Policy:
    return load_policy(ModelConfig(path=str(folder), dtype="float32", device="cpu", plain=not fused))


async def sample(policy: Policy) -> list[tuple[Request, Completion]]:
    """Past the window of those that have one."""
    engine = NativeEngine(policy, EngineConfig(memory_gb=0.01))
    prompts = [tuple((7 * i + j * j) % 250 + 3 for j in range(5 + 7 * i)) for i in range(3)]
    requests = [Request(f"{i}", p, SamplingParams(max_tokens=16), i, share=f"{i}") for i, p in enumerate(prompts)]
    try:
        return list(zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True))
    finally:
        await engine.close()


@pytest.mark.thorough(keep=10)
@pytest.mark.parametrize("family", RUN)
def test_log_probs_are_those_of_the_model(family: str, made: Callable[[str], Path]) -> None:
    folder = made(family)
    policy, model = load(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for request, done in asyncio.run(sample(policy)):
        row = torch.tensor(request.prompt_tokens + done.tokens)
        before = len(request.prompt_tokens) - 1
        with torch.no_grad():
            logp = torch.log_softmax(model(row[None]).logits[0].float(), -1)[before:-1]
            ours = policy.score(row)[before:]
        expected = logp.gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.thorough(keep=10)
@pytest.mark.parametrize("family", RUN)
def test_nothing_is_left_to_chance_in_training(family: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    """Modules are in training mode where activations are computed again: dropout has many names."""
    folder = shutil.copytree(made(family), tmp_path / family)
    config = json.loads((folder / "config.json").read_text())
    drops = {name: 0.5 for name in config if name.endswith(("drop", "dropout", "_pdrop", "jitter_noise"))}
    (folder / "config.json").write_text(json.dumps(config | drops))
    policy = load(folder, fused=False)
    policy.model.train()
    row = torch.arange(5, 45)
    assert torch.equal(policy.score(row), policy.score(row))


@pytest.mark.thorough(keep=10)
@pytest.mark.parametrize("family", RUN)
def test_what_is_fused(family: str, made: Callable[[str], Path]) -> None:
    """On a CPU: layers of the trainer, and whether a GPU's decoder would be tried."""
    policy = load(made(family), fused=False)
    layer = type(policy.decoder.layers[0]).__name__ if hasattr(policy.decoder, "layers") else ""  # type: ignore[index, union-attr, arg-type]
    known = is_known(policy)
    count = fuse(policy.model, policy.device, policy.dtype)
    own = [m for m in policy.model.modules() if type(m).__name__ == layer and "forward" in vars(m)]
    _, trainer, decoder, *_ = ROWS[family]
    assert trainer == ("layers" if own else "parts" if count else "modules"), (count, layer)
    assert decoder != "kernels" or known
    assert known or decoder in ("graph", "modules")


PLAIN = ("llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss", "phi3", "smollm3", "mixtral", "qwen3_moe")


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("family", [name for name in RUN if ROWS[name][2] == "kernels"])
def test_kernels_that_know_plain_layers_alone_get_no_others(family: str, made: Callable[[str], Path]) -> None:
    """Those of a few rows on a GPU."""
    assert is_plain(load(made(family), fused=False)) == (family in PLAIN)


@pytest.mark.thorough(keep=4)
@pytest.mark.skipif(not packed.available(torch.float32), reason="no C++ compiler")
@pytest.mark.parametrize("family", RUN)
def test_which_have_a_compiled_decoder_on_a_cpu(family: str, made: Callable[[str], Path]) -> None:
    policy = load(made(family))
    found = PackedDecoder.of(policy, KVCache(policy, 0.01, 16))
    assert ("modules" if found is None else "compiled") == ROWS[family][3]


def test_a_mixture_with_other_gates_is_unknown(made: Callable[[str], Path]) -> None:
    """MiniMax-M2 is built like OLMoE, but its gates come from a sigmoid, and a bias has its say in the choice."""
    assert is_known(load(made("olmoe"), fused=False)) and not is_known(load(made("minimax_m2"), fused=False))


@pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", ["limit", "elsewhere"])
def test_an_mlp_with_limits_is_another(name: str, made: Callable[[str], Path]) -> None:
    """Rows of usual size do not reach them. Of a whole layer a probe cannot, so there a name must tell."""
    policy = load_policy(ModelConfig(path=str(made("smollm3")), dtype="float32", device="cpu", plain=True))
    mlp: Any = policy.decoder.layers[0].mlp

    class Limited(type(mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            limited = self.act_fn(self.gate_proj(x).clamp(-10, 10)) * self.up_proj(x).clamp(-10, 10)
            return self.down_proj(limited)  # type: ignore[no-any-return]

    assert is_llama_layer(policy.decoder.layers[0]) and is_known(policy)
    mlp.__class__ = Limited
    setattr(mlp, name, 10.0)
    assert fuse(mlp, torch.device("cpu"), torch.float32) == 0
    if name == "limit":
        assert not is_llama_layer(policy.decoder.layers[0]) and not is_known(policy)
        mlp.limit = math.inf
        assert is_llama_layer(policy.decoder.layers[0])


class LateRMSNorm(torch.nn.Module):
    """As Qwen3's, but rounded once, after the weight."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
        return normed.to(x.dtype)


@pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("change", ["none", "rule", "epsilon"])
def test_a_layer_with_other_norms_of_heads_stays_in_parts(change: str, made: Callable[[str], Path]) -> None:
    """What a probe in float32, of few rows, need not show."""
    policy = load(made("qwen3"), fused=False)
    layer = policy.decoder.layers[0]  # type: ignore[index, union-attr]
    attn: Any = layer.self_attn
    if change == "rule":
        attn.q_norm, attn.k_norm = LateRMSNorm(attn.head_dim), LateRMSNorm(attn.head_dim)
    if change == "epsilon":
        attn.k_norm.variance_epsilon *= 2
    fuse(policy.model, policy.device, policy.dtype)
    assert ("forward" in vars(layer)) == (change == "none")


def test_what_a_norm_computes_is_found_by_trying() -> None:
    rules = {
        "llama": NormRule.EARLY,
        "olmo2": NormRule.LATE,
        "gpt_oss": NormRule.LATE,
        "gemma3": NormRule.LATE_PLUS_ONE,
    }
    for family, rule in rules.items():
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        (name,) = (n for n in vars(module) if n.endswith("RMSNorm"))
        norm = norm_of(vars(module)[name](8, eps=1e-3))
        assert norm is not None and norm.rule == rule and norm.eps == 1e-3
    assert norm_of(torch.nn.LayerNorm(8)) is None and norm_of(None) is None


def test_no_fused_decoder_for_attention_that_reads_positions(made: Callable[[str], Path]) -> None:
    """What it does with them may begin far behind the tokens of a probe."""
    assert is_known(load(made("ministral"))) and not is_known(load(made("ministral3")))


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("family", REFUSED)
def test_what_would_be_wrong_is_refused(family: str, made: Callable[[str], Path]) -> None:
    with pytest.raises(KitaeError):
        asyncio.run(sample(load(made(family))))
