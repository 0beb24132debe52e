"""Weights in 4 bits on a GPU: bitsandbytes' kernel gives what plain torch gives, and a run learns on them."""

from pathlib import Path

import pytest
import torch
from harness import rows, run_toy

from kitae.models import four_bits
from kitae.models.four_bits import dequantise, quantise

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_same_numbers(dtype: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes")
    weight = torch.randn(256, 512, device="cuda", dtype=dtype)
    codes, scales = quantise(weight)
    plain = dequantise(codes.cpu(), scales.cpu(), (256, 512), dtype)
    assert torch.equal(dequantise(codes, scales, (256, 512), dtype).cpu(), plain)


@pytest.mark.parametrize("kernel", [True, False])
def test_a_run_learns(kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(four_bits, "_has_kernel", lambda: kernel)
    if kernel:
        pytest.importorskip("bitsandbytes")
    qlora = "model.lora_rank=8", "model.lora_base=nf4", "training.lr=2e-2", "model.device=cuda"
    result = run_toy(tmp_path, "training.steps=16", "algorithm.preset=grpo", *qlora)
    steps = [r for r in rows(result.folder) if r["kind"] == "step"]
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.2
