"""Training kernels on a GPU against autograd, and the bf16 path against fp32."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from short_settings import algorithm_with

from kitae.algorithms.config import AlgorithmConfig
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.tiny import make_tiny

sys.path.append(str(Path(__file__).parents[1] / "unit/trainer"))

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
TinyPolicy = Callable[..., Policy]


@pytest.mark.parametrize("shape", [(5, 96), (3, 700, 1536), (1, 1, 48)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    from kitae.kernels.cuda import training

    x = torch.randn(shape, device="cuda", requires_grad=True)
    weight = torch.randn(shape[-1], device="cuda", requires_grad=True)
    grad = torch.randn(shape, device="cuda")
    expected = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    wanted = torch.autograd.grad(expected, (x, weight), grad)
    got = training.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(torch.autograd.grad(got, (x, weight), grad), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)


def test_gated_mlp() -> None:
    from kitae.kernels.cuda import training

    gate, up = (torch.randn(2, 70, 112, device="cuda", requires_grad=True) for _ in range(2))
    down = torch.randn(48, 112, device="cuda", requires_grad=True)
    grad = torch.randn(2, 70, 48, device="cuda")
    expected = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)
    wanted = torch.autograd.grad(expected, (gate, up, down), grad)
    alone = torch.nn.functional.linear(training.swiglu(gate, up), down)
    joint = training.LAYERS.swiglu_linear(gate.clone(), up.clone(), down)
    for got in (alone, joint):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        for a, b in zip(torch.autograd.grad(got, (gate, up, down), grad), wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("with_entropy", [True, False])
def test_row_statistics_and_gradients(with_entropy: bool) -> None:
    from kitae.kernels.cuda import training

    raw = (torch.randn(37, 9001, device="cuda") * 4).requires_grad_()
    targets = torch.randint(9001, (37,), device="cuda")
    logp = torch.log_softmax(raw * 1.25, -1)
    chosen, entropy = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    got = training.row_statistics(raw.detach().clone(), targets, 1.25)
    for a, b in zip(got, (chosen, torch.logsumexp(raw * 1.25, -1), entropy), strict=True):
        torch.testing.assert_close(a, b.detach(), atol=1e-4, rtol=1e-4)
    d_logp, d_entropy = torch.randn(37, device="cuda"), torch.randn(37, device="cuda") * with_entropy
    (wanted,) = torch.autograd.grad((chosen * d_logp + entropy * d_entropy).sum(), raw)
    found = training.row_gradients(
        raw.detach().clone(), targets, got[1], got[2], d_logp, d_entropy if with_entropy else None, 1.25
    )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-3)


def test_an_impossible_token_adds_nothing_to_entropy_and_gradient() -> None:
    from kitae.kernels.cuda import training

    kept, targets = torch.randn(5, 600, device="cuda") * 4, torch.randint(600, (5,), device="cuda")
    wide = torch.cat((kept, torch.full((5, 1), -torch.inf, device="cuda")), 1)
    expected = training.row_statistics(kept, targets, 1.25)
    got = training.row_statistics(wide, targets, 1.25)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    grads = torch.randn(5, device="cuda"), torch.randn(5, device="cuda")
    plain = training.row_gradients(kept.clone(), targets, *expected[1:], *grads, 1.25)
    found = training.row_gradients(wide.clone(), targets, *got[1:], *grads, 1.25)
    torch.testing.assert_close(found[:, :600], plain, atol=1e-6, rtol=1e-4)
    assert (found[:, 600] == 0).all()


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "mistral", "gemma3"])
def test_bf16_gradient_is_as_near_to_the_exact_one_as_plain_torch(
    architecture: str, share_prompts: bool, tmp_path: Path
) -> None:
    """Flash attention with shared prompts and windows, fused modules and head, against fp32 on the same weights."""
    from test_gradient import gradient, make_samples

    make_tiny(tmp_path, architecture, hidden=128, layers=3)
    shapes = [(g, 5 + 9 * g, 1 + (13 * g + 29 * i) % 90) for g in range(5) for i in range(6)]
    samples = make_samples(shapes, gaps=True)
    algorithm = algorithm_with(preset="grpo", entropy_coef=0.01)

    def policy(dtype: str, fuse: bool) -> Policy:
        return load_policy(ModelConfig.model_validate({
            "path": str(tmp_path), "dtype": dtype, "device": "cuda", "plain": not fuse
        }))  # fmt: skip

    exact = policy("float32", False)
    for p in exact.model.parameters():
        p.data = p.data.bfloat16().float()
    expected = gradient(exact, samples, algorithm, share_prompts=share_prompts)

    def error(fuse: bool, flash: bool, monkeypatch: pytest.MonkeyPatch) -> float:
        from kitae.kernels.cuda import flash as flash_kernels

        if not flash:
            monkeypatch.setattr(flash_kernels, "available", lambda like: False)
        got = gradient(policy("bfloat16", fuse), samples, algorithm, share_prompts=share_prompts)
        total = sum(float((got[n].float() - g).pow(2).sum()) for n, g in expected.items())
        return float((total / sum(float(g.pow(2).sum()) for g in expected.values())) ** 0.5)

    with pytest.MonkeyPatch.context() as patch:
        fast = error(True, True, patch)
    with pytest.MonkeyPatch.context() as patch:
        plain = error(False, False, patch)
    assert fast < 1.2 * plain + 1e-3, (fast, plain)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_norm_queries_keys_and_values(bias: bool, side_by_side: bool) -> None:
    from kitae.kernels.allocation import lay_together
    from kitae.kernels.cuda import training

    rows, width, dim = 70, 96, 24
    modules = [torch.nn.Linear(width, n * dim, bias=bias, device="cuda") for n in (6, 2, 2)]
    if side_by_side:
        lay_together([m.weight for m in modules])
    x = torch.randn(rows, width, device="cuda", requires_grad=True)
    gain = torch.randn(width, device="cuda", requires_grad=True)
    angles = torch.randn(rows, dim // 2, device="cuda").repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def rotate(y: torch.Tensor) -> torch.Tensor:
        a, b = y.chunk(2, -1)
        return y * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]

    normed = torch.nn.functional.rms_norm(x, (width,), gain, 1e-6)
    q, k, v = (m(normed).view(rows, -1, dim) for m in modules)
    expected = (x, rotate(q), rotate(k), v)
    got = training.LAYERS.normed_qkv(x, (gain, 1e-6), cos, sin, dim, *modules)
    grads = [torch.randn_like(t) for t in expected]
    grads[2] = torch.randn(rows, 5, dim, device="cuda")[:, 1:3]  # rows with a stride
    assert_same_gradients(got, expected, [x, gain, *(p for m in modules for p in m.parameters())], grads)


def test_norm_of_a_sum_and_two_products() -> None:
    from kitae.kernels.cuda import training

    x, y = (torch.randn(70, 96, device="cuda", requires_grad=True) for _ in range(2))
    gain = torch.randn(96, device="cuda", requires_grad=True)
    modules = [torch.nn.Linear(96, 112, bias=False, device="cuda") for _ in range(2)]
    normed = torch.nn.functional.rms_norm(x + y, (96,), gain, 1e-6)
    expected = (x + y, *(m(normed) for m in modules))
    got = training.LAYERS.normed_pair(x, y, (gain, 1e-6), *modules)
    grads = [torch.randn_like(t) for t in expected]
    assert_same_gradients(got, expected, [x, y, gain, *(m.weight for m in modules)], grads)


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_of_two_products_may_be_frozen(frozen: int) -> None:
    from kitae.kernels.cuda import training

    x, y, gain = (torch.randn(*shape, device="cuda") for shape in ((70, 96), (70, 96), (96,)))
    modules = [torch.nn.Linear(96, 112, bias=False, device="cuda") for _ in range(2)]
    modules[frozen].weight.requires_grad_(False)
    learns, grad = modules[1 - frozen].weight, torch.randn(70, 112, device="cuda")
    normed = torch.nn.functional.rms_norm(x + y, (96,), gain, 1e-6)
    training.LAYERS.normed_pair(x, y, (gain, 1e-6), *modules)[2 - frozen].backward(grad)
    assert modules[frozen].weight.grad is None and learns.grad is not None
    torch.testing.assert_close(learns.grad, grad.t() @ normed, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_products_add_to_gradients_of_masters(side_by_side: bool, dtype: torch.dtype) -> None:
    """In fp32, from the first row on, also where one weight got something by another way before."""
    from kitae.kernels.allocation import gradient_of, lay_together, set_master
    from kitae.kernels.cuda import training

    rows, width, dim = 70, 96, 24
    modules = [torch.nn.Linear(width, n * dim, bias=False, device="cuda", dtype=dtype) for n in (6, 2, 2)]
    weights = [m.weight for m in modules]
    if side_by_side:
        lay_together(weights)
    masters = [w if dtype == torch.float32 else w.detach().float() for w in weights]
    gain, x = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((width,), (rows, width)))
    still = torch.zeros(rows, dim, device="cuda", dtype=dtype)
    grads = [torch.randn(rows, n, dim, device="cuda", dtype=dtype) for n in (6, 2, 2)]

    def backward() -> None:
        _, *heads = training.LAYERS.normed_qkv(x, (gain, 1e-6), still + 1, still, dim, *modules)
        torch.autograd.backward(heads, grads)

    backward()
    alone = [w.grad for w in weights]
    assert all(g is not None and g.dtype == dtype for g in alone)
    for weight, master in zip(weights, masters, strict=True):
        weight.grad = None
        set_master(weight, master)
    normed = training.rms_norm(x, gain, 1e-6).float()
    expected = [g.flatten(1).float().t() @ normed for g in grads]
    for times in (1, 2):
        backward()
        for weight, master, once in zip(weights, masters, expected, strict=True):
            assert master.grad is not None and (master is weight or weight.grad is None)
            torch.testing.assert_close(master.grad, times * once, atol=1e-3, rtol=1e-4)
    for master in masters:
        master.grad = None
    other = gradient_of(weights[1])
    assert other is not None
    other += 1
    backward()
    for number, (weight, master, once) in enumerate(zip(weights, masters, expected, strict=True)):
        assert master.grad is not None
        by_autograd = 0 if master is weight or weight.grad is None else weight.grad.float()
        torch.testing.assert_close(master.grad + by_autograd, once + (number == 1), atol=0.05, rtol=0.01)


def assert_same_gradients(
    got: tuple[torch.Tensor, ...],
    expected: tuple[torch.Tensor, ...],
    inputs: list[torch.Tensor],
    grads: list[torch.Tensor],
) -> None:
    pairs = zip(torch.autograd.grad(got, inputs, grads), torch.autograd.grad(expected, inputs, grads), strict=True)
    for a, b in (*zip(got, expected, strict=True), *pairs):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral", "qwen3", "gemma3"])
def test_layers_of_the_llama_family_are_one_function(architecture: str, tiny_policy: TinyPolicy) -> None:
    """And where an adapter came in later, the layer still computes what its class defines."""
    policy = tiny_policy(architecture, device="cuda")
    layers = list(policy.decoder.layers)  # type: ignore[attr-defined]
    fused = [getattr(layer.forward, "__module__", "") == "kitae.models.fuse" for layer in layers]
    assert all(fused) if architecture in ("llama", "qwen2", "mistral", "qwen3") else not any(fused)
    row = torch.arange(5, 45, device="cuda")
    expected = tiny_policy(architecture, device="cuda", plain=True).score(row)
    torch.testing.assert_close(policy.score(row), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        tiny_policy(architecture, device="cuda", lora_rank=4).score(row), expected, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_taken_several_times_are_summed(dtype: torch.dtype) -> None:
    from kitae.kernels.cuda import training

    rows = torch.randint(50, (400,), device="cuda") // 2 * 2  # every other one is taken by nobody
    order = torch.argsort(rows, stable=True).int()
    first = torch.cat([rows.new_zeros(1), torch.bincount(rows, minlength=50).cumsum(0)]).int()
    parts = torch.randn(400, 2, 24, device="cuda", dtype=dtype)
    expected = torch.zeros(50, 2, 24, device="cuda").index_add_(0, rows, parts.float()).to(dtype)
    got = training.sum_rows(parts, order, first)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 1e-2)
    assert torch.equal(got, training.sum_rows(parts, order, first))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_accumulated_in_fp32(dtype: torch.dtype) -> None:
    from kitae.kernels.cuda import training

    parts = [torch.randn(70, 333, device="cuda").to(dtype) for _ in range(3)]
    total = None
    for part in parts:
        total = training.accumulate(total, part)
    assert total is not None and total.dtype == torch.float32
    torch.testing.assert_close(total, torch.stack([p.float() for p in parts]).sum(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_adamw_in_one_pass_equals_torch(dtype: torch.dtype, moments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With clipping, weight decay, a gradient that is not finite, and a restart from saved state.

    A moment in 16 bits may be rounded to its neighbour where the last bit of fp32 differs: rarely, and each step then
    starts from the same ones.
    """
    from trainer_workers import master_of

    from kitae.trainer.config import TrainingConfig
    from kitae.trainer.optim import Optimizer

    config = TrainingConfig(lr=1e-2, weight_decay=0.1, clip_norm=30.0, moments=moments)
    shapes = [(5001,), (64, 48), (3,)]
    start = [torch.randn(s, device="cuda").to(dtype) for s in shapes]

    def make() -> Optimizer:
        named = [(str(i), torch.nn.Parameter(t.clone())) for i, t in enumerate(start)]
        return Optimizer(named, config, 10)

    one, plain = make(), make()
    for step in range(8):
        if step == 5:
            saved = {n: t.clone() for n, t in one.state().items()}
            one = make()
            one.load_state(saved, 5)
        for i, shape in enumerate(shapes):
            grad = torch.randn(shape, device="cuda") * (1 if step % 2 else 0.1)
            if step == 3 and i == 1:
                grad[7] = float("inf")
            for optimizer in (one, plain):
                optimizer.masters[i].grad = grad.clone()
        a = one.step()
        with monkeypatch.context() as patch:
            patch.setattr("kitae.trainer.optim.training_kernels", lambda *_: None)
            b = plain.step()
        assert a.applied == b.applied == (step != 3)
        if step != 3:
            assert a.norm == pytest.approx(b.norm)
        for i, m in enumerate(one.masters):
            torch.testing.assert_close(master_of(one, i), master_of(plain, i), atol=1e-5, rtol=1e-5)
            assert m.grad is None
        if moments == "bfloat16":
            have, want = one.state(), plain.state()
            for name in (n for n in have if n.startswith("exp_avg")):
                same = have[name] == want[name]
                assert same.float().mean() > 0.99
                torch.testing.assert_close(have[name], want[name], atol=1e-6, rtol=2**-6)
            plain.load_state({name: tensor.clone() for name, tensor in have.items()}, step + 1)


def test_rows_of_a_step_are_launched_without_waiting(tiny_policy: TinyPolicy) -> None:
    """Forward and backward of all micro-batches; only the metrics at the end wait for the device."""
    import warnings

    from test_gradient import make_samples
    from trainer_workers import forward_backward, make_worker, weighted

    from kitae.trainer.config import TrainingConfig

    algorithm = AlgorithmConfig(preset="grpo")
    samples = weighted(make_samples([(g, 9, 20 + i) for g in range(6) for i in range(3)]), algorithm)
    policy = tiny_policy("qwen2", device="cuda", dtype="bfloat16")
    worker = make_worker(policy, TrainingConfig(token_budget=100), algorithm)
    forward_backward(worker, samples)
    worker.optim_step()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            forward_backward(worker, samples)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in seen if "called a synchronizing" in str(w.message)]
    assert len(waits) <= 1, [f"{w.filename}:{w.lineno}" for w in waits]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_recomputed_activations_give_the_same_gradient(architecture: str, tiny_policy: TinyPolicy) -> None:
    from test_gradient import SHAPES, assert_same, gradient, make_samples

    samples = make_samples(SHAPES)
    algorithm = AlgorithmConfig(preset="grpo")
    kept = gradient(tiny_policy(architecture, device="cuda"), samples, algorithm)
    again = gradient(tiny_policy(architecture, device="cuda"), samples, algorithm, checkpoint_activations=True)
    assert_same(again, kept)


def test_chunks_of_logits_give_one_gradient(tiny_policy: TinyPolicy) -> None:
    """The last chunk's logits are kept, the others made again; products of all of them are added in fp32."""
    from test_gradient import SHAPES, gradient, make_samples

    samples = make_samples(SHAPES)
    algorithm = algorithm_with(preset="grpo", entropy_coef=0.01)

    def head(chunk: int) -> torch.Tensor:
        policy = tiny_policy("qwen2", device="cuda", dtype="bfloat16")
        return gradient(policy, samples, algorithm, token_budget=2 * chunk)["model.embed_tokens.weight"]

    whole = head(1000)
    for chunk in (1, 7, 20):
        assert (head(chunk) - whole).norm() < 0.01 * whole.norm(), chunk
