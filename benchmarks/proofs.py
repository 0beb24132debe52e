"""How well the proof of an engine tells honest answers from others, and what it costs.

    python benchmarks/proofs.py [--model smollm2-135m] [--dtype float32] [--device auto] [--answers 200] [--tokens 20]
    python benchmarks/proofs.py --speed [--rounds 3]

An engine samples answers with their proofs, the trainer computes them again on its own path (packed rows, shared
prompts), and each answer is judged as `kitae.rl.proof_check` does. The table has, for each kind of answer, how many
there were, how many false alarms (of honest ones) or misses (of all others), and of what was compared (states, draws,
log-probs) the middle and the largest or, of cheats, the smallest. `--judge` names another tolerance than that of the
model's dtype. `--speed`: tokens a second with and without proofs, in turns, and what checking costs the trainer.
"""

import argparse
import asyncio
import copy
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kitae.algorithms.config import AlgorithmConfig
from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig, ProofConfig
from kitae.engines.native.engine import NativeEngine
from kitae.engines.proof import SKETCH, Differences, Tolerance
from kitae.models.attention_seam import SelfAttention
from kitae.models.config import ModelConfig
from kitae.models.facts import ModelFacts
from kitae.models.load import load_policy, pick_device
from kitae.models.policy import Policy
from kitae.models.tiny import make_tiny
from kitae.rl.proof_check import ProofCheck, tolerance_of
from kitae.trainer.base import Column
from kitae.trainer.build_worker import reinforced
from kitae.trainer.config import TrainingConfig
from kitae.trainer.local_trainer import LocalTrainer

GROUP = 8
WORDS = "river stone seven doctor music garden window paper captain winter bridge silver market teacher engine forest"
Pair = tuple[Request, Completion]


class Bench:
    def __init__(self, a: argparse.Namespace, folder: Path) -> None:
        self.a = a
        self.path = str(make_tiny(folder / "tiny")) if a.model == "tiny" else a.model
        self.policy = self.load(a.dtype)
        self.trainer, self.check = self.checked(self.policy)
        self.requests = self.asked()
        self.rows: list[dict[str, Any]] = []
        usual = tolerance_of(self.policy.dtype)
        self.tolerance = {"float32": tolerance_of(torch.float32),
                          "bfloat16": tolerance_of(torch.bfloat16),
                          "8 bits": tolerance_of(torch.float32, ["weights_dtype"])}.get(a.judge, usual)  # fmt: skip

    def load(self, dtype: str, *, plain: bool = False) -> Policy:
        given = {"path": self.path, "device": self.a.device, "dtype": dtype, "plain": plain}
        return load_policy(ModelConfig.model_validate(given))

    def checked(self, policy: Policy) -> tuple[LocalTrainer, ProofCheck]:
        settings = {"max_tokens": self.a.tokens, "temperature": 1.0}
        algorithm = AlgorithmConfig.model_validate({"preset": "grpo"})
        trainer = LocalTrainer(reinforced(policy, TrainingConfig(), algorithm, **settings))
        learner: Any = SimpleNamespace(trainer=trainer, updates=0)
        check = ProofCheck(
            learner, ModelFacts.of(policy), share=1.0, temperature=1.0, recompute=False,
            tolerance=tolerance_of(policy.dtype),
        )  # fmt: skip
        return trainer, check

    def asked(self) -> list[Request]:
        words, rng = WORDS.split(), np.random.default_rng(self.a.seed)
        found = []
        for number in range(-(-self.a.answers // GROUP)):
            text = "Tell me about the " + " and the ".join(rng.choice(words, 3, replace=False)) + ":"
            prompt = tuple(self.policy.tokenizer.encode(text))
            sampling = SamplingParams(max_tokens=self.a.tokens)
            found += [
                Request(f"train/{number}/{i}/0", prompt, sampling, seed=1000 * number + i, share=f"train/{number}")
                for i in range(GROUP)
            ]
        return found[: self.a.answers]

    async def answers(self, policy: Policy, requests: list[Request] | None = None, **settings: Any) -> list[Pair]:
        """What an engine answers; the requests are those that it was given."""
        config = EngineConfig(
            kind="process", memory_gb=self.a.memory_gb, max_batch=self.a.batch, proof=ProofConfig(share=1.0), **settings
        )
        engine = NativeEngine(policy, config, 0)
        asked = requests or self.requests
        done = await asyncio.gather(*map(engine.generate, asked))
        await engine.close()
        return list(zip(self.requests, done, strict=True))

    async def found(self, pairs: list[Pair], check: ProofCheck | None = None) -> list[np.ndarray]:
        """What a trainer computes of answers."""
        check = check or self.check
        samples = [
            replace(check._sample(r, np.asarray(d.tokens, np.int64), np.ones(len(d.tokens), bool)), index=n)
            for n, (r, d) in enumerate(pairs)
        ]
        taken = await check._learner.trainer.annotate(samples, [Column.PROOF])
        return [np.stack([s.loss(f"{Column.PROOF.value}{i}") for i in range(2 + SKETCH)], 1) for s in taken]

    async def judge(
        self, kind: str, pairs: list[Pair], honest: bool = False, tolerance: Tolerance | None = None,
        found: list[np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        found = found if found is not None else await self.found(pairs)
        limits = tolerance or self.tolerance
        differ = [
            Differences.of(d.proof, np.asarray(d.logprobs), ours)  # type: ignore[arg-type]
            for (_, d), ours in zip(pairs, found, strict=True)
        ]
        refused = sum(bool(each.fault(limits)) for each in differ)
        by = {
            name: sum(getattr(d, name) > getattr(limits, name) for d in differ) for name in ("state", "draw", "logprob")
        }
        row: dict[str, Any] = {"kind": kind, "honest": honest, "answers": len(differ), "refused": refused, "by": by}
        for name in ("state", "draw", "logprob"):
            values = [getattr(each, name) for each in differ]
            row[name] = [statistics.median(values), max(values) if honest else min(values)]
        self.rows.append(row)
        wrong = f"{refused} false alarms" if honest else f"{len(differ) - refused} missed"
        numbers = "  ".join(f"{name} {row[name][0]:.2g} ({row[name][1]:.2g})" for name in ("state", "draw", "logprob"))
        print(f"{kind:58s} {len(differ):5d} {wrong:>17s}   {numbers}   by {by}", flush=True)


def moved(policy: Policy, lr: float, steps: int, tokens: torch.Tensor) -> Policy:
    """After optimizer steps of AdamW, with masters in fp32, on some text."""
    found = copy.deepcopy(policy)
    modules = list(found.model.parameters())
    masters = [p.detach().float().clone().requires_grad_() for p in modules]
    optimizer = torch.optim.AdamW(masters, lr=lr, weight_decay=0.0)
    for step in range(steps):
        part = tokens[step % len(tokens)]
        places = torch.arange(len(part), device=part.device)
        logits = found.logits(found.hidden(part, places, SelfAttention(places))[:-1])
        torch.nn.functional.cross_entropy(logits.float(), part[1:]).backward()
        for master, p in zip(masters, modules, strict=True):
            master.grad, p.grad = (None if p.grad is None else p.grad.float()), None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, modules, strict=True):
                p.copy_(master)
    return found


def shortened(policy: Policy) -> Policy:
    """A smaller model with the same vocabulary: every tenth layer is left out, or one of two."""
    found = copy.deepcopy(policy)
    decoder: Any = found.decoder
    layers = decoder.layers
    left_out = set(range(4, len(layers) - 1, 10)) or {0}
    decoder.layers = torch.nn.ModuleList([each for i, each in enumerate(layers) if i not in left_out])
    for number, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = number
    found.base.config.num_hidden_layers = found.layers = len(decoder.layers)
    return found


async def rates(b: Bench) -> None:
    a, rng = b.a, np.random.default_rng(b.a.seed)
    eight = tolerance_of(b.policy.dtype, ["weights_dtype"])
    honest = await b.answers(b.policy)
    found = await b.found(honest)
    await b.judge(f"honest: {a.dtype} engine, {a.dtype} trainer", honest, honest=True, found=found)

    def claimed(kind: str, claims: list[Completion]) -> Any:
        return b.judge(kind, list(zip(b.requests, claims, strict=True)), found=found)

    trainer, check = b.checked(b.load(a.dtype, plain=True))
    plain = await b.found(honest, check)
    await b.judge("honest: the trainer in plain torch", honest, honest=True, found=plain)
    await trainer.close()
    done = [d for _, d in honest]
    turned = [done[(n + GROUP) % len(done)] for n in range(len(done))]
    await claimed("replayed: the proof of an answer to another prompt", [
        replace(d, proof=np.resize(o.proof, d.proof.shape)) for d, o in zip(done, turned, strict=True)])  # fmt: skip
    near = [
        done[n - n % GROUP + (n + 1) % GROUP] if n - n % GROUP + GROUP <= len(done) else done[n - 1]
        for n in range(len(done))
    ]
    await claimed("replayed: of another answer to the same prompt", [
        replace(d, proof=np.resize(o.proof, d.proof.shape)) for d, o in zip(done, near, strict=True)])  # fmt: skip
    await claimed("forged: random numbers of the right size", [
        replace(d, proof=(rng.normal(size=d.proof.shape) * d.proof.std(0) + d.proof.mean(0)).astype(np.float32))
        for d in done])  # fmt: skip
    for apart in (0.1, 0.5):
        lie = [replace(d, logprobs=tuple(x + apart for x in d.logprobs)) for d in done]
        await claimed(f"invented: log-probs higher by {apart:g}", lie)

    def edited(place: Any) -> list[Pair]:
        out = []
        for r, d in honest:
            tokens, at = list(d.tokens), place(len(d.tokens))
            others = [t for _, e in honest[:64] for t in e.tokens if t != tokens[at]]
            tokens[at] = int(rng.choice(others))
            out.append((r, replace(d, tokens=tuple(tokens))))
        return out

    middle, last = edited(lambda n: int(rng.integers(0, n))), edited(lambda n: n - 1)
    await b.judge("edited: one token anywhere", middle)
    await b.judge("edited: the last token", last)
    true = await b.found(middle)
    await b.judge("edited: one token, true proof and log-probs of that text", _proved(middle, true), found=true)
    wrong = [replace(r, prompt_tokens=_changed(r.prompt_tokens, rng), share="") for r in b.requests]
    await b.judge("prompt: one token of it changed", await b.answers(b.policy, wrong))
    small = await b.answers(shortened(b.policy))
    await b.judge("model: every tenth layer left out", small)
    true = await b.found(small)
    await b.judge("model: tokens of that one, true proof and log-probs", _proved(small, true), found=true)
    if b.policy.device.type == "cuda" or a.dtype == "float32":
        low = await b.answers(b.policy if b.policy.device.type == "cpu" else b.load(a.dtype), weights_dtype="float8")
        await b.judge(f"precision: weights in 8 bits, for {a.dtype}", low)
        await b.judge("honest: weights in 8 bits, as configured", low, honest=True, tolerance=eight)
        if b.policy.device.type == "cuda":
            low = await b.answers(b.load(a.dtype), cache_dtype="int8")
            await b.judge(f"precision: cache in 8 bits, for {a.dtype}", low)
            cache = tolerance_of(b.policy.dtype, ["cache_dtype"])
            await b.judge("honest: cache in 8 bits, as configured", low, honest=True, tolerance=cache)
    if a.dtype == "float32" and a.bfloat16:
        half = await b.answers(b.load("bfloat16"))
        await b.judge("precision: bfloat16 engine, float32 trainer", half)
    text = torch.tensor([[*r.prompt_tokens, *d.tokens][: a.tokens] for r, d in honest], device=b.policy.device)
    for lr, steps in a.moves:
        policy = moved(b.policy, lr, steps, text)
        trainer, check = b.checked(policy)
        later = await b.found(honest, check)
        await trainer.close()
        await b.judge(f"stale: trainer is {steps} step{'s' * (steps > 1)} of lr {lr:g} ahead", honest, found=later)
        del policy, trainer, check


def _proved(pairs: list[Pair], found: list[np.ndarray]) -> list[Pair]:
    """As if whoever wrote these tokens had computed their states and log-probs with the right weights."""
    return [
        (r, replace(d, proof=ours[:, 2:], logprobs=tuple(ours[:, 0].tolist())))
        for (r, d), ours in zip(pairs, found, strict=True)
    ]


def _changed(prompt: tuple[int, ...], rng: np.random.Generator) -> tuple[int, ...]:
    at = int(rng.integers(1, len(prompt)))
    return (*prompt[:at], prompt[at] + 1 if prompt[at] < 200 else prompt[at] - 1, *prompt[at + 1 :])


async def speed(b: Bench) -> None:
    """Tokens a second with and without proofs, in turns; seconds that checking takes."""
    rates: dict[float, list[float]] = {0.0: [], 1.0: []}
    engines = {
        share: NativeEngine(
            b.policy,
            EngineConfig(kind="process", memory_gb=b.a.memory_gb, max_batch=b.a.batch, proof=ProofConfig(share=share)),
            0,
        )
        for share in rates
    }
    for turn in range(b.a.rounds + 1):
        for share, engine in engines.items():
            began = time.perf_counter()
            done = await asyncio.gather(*(engine.generate(replace(r, seed=r.seed + turn)) for r in b.requests))
            if turn:  # the first one captures graphs
                rates[share].append(sum(len(d.tokens) for d in done) / (time.perf_counter() - began))
    for engine in engines.values():
        await engine.close()
    pairs = list(zip(b.requests, done, strict=True))
    await b.found(pairs)
    began = time.perf_counter()
    await b.found(pairs)
    seconds = time.perf_counter() - began
    without, with_ = (statistics.median(rates[share]) for share in (0.0, 1.0))
    count = sum(len(d.tokens) for _, d in pairs)
    row = {
        "kind": "speed",
        "batch": b.a.batch,
        "without": rates[0.0],
        "with": rates[1.0],
        "check_tokens_s": count / seconds,
    }
    b.rows.append(row)
    print(f"batch {b.a.batch}: {without:.0f} tokens/s without proofs, {with_:.0f} with ({with_ / without - 1:+.1%})")
    print(f"the trainer checks {count / seconds:.0f} tokens/s")


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="As model.path, or tiny.")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--judge", default="", choices=["", "float32", "bfloat16", "8 bits"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-gb", type=float, default=0.6)
    parser.add_argument("--no-bfloat16", dest="bfloat16", action="store_false", help="Without an engine in bfloat16.")
    parser.add_argument("--moves", default="1e-6x1,1e-6x8,1e-5x1,1e-5x8,1e-4x1", help="LRxSTEPS, …")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    a.device = pick_device(a.device).type
    a.moves = [(float(lr), int(n)) for lr, n in (each.split("x") for each in a.moves.split(",") if each)]
    with TemporaryDirectory() as folder:
        b = Bench(a, Path(folder))
        print(f"# {a.model}, {a.dtype}, {a.device}, {a.answers} answers of {a.tokens} tokens, {b.tolerance}")
        await (speed(b) if a.speed else rates(b))
        await b.trainer.close()
    if a.out is not None:
        a.out.write_text(json.dumps({"settings": {k: str(v) for k, v in vars(a).items()}, "rows": b.rows}, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
