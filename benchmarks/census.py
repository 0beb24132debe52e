"""Which causal families of the installed transformers run, and why the others are refused.

    python benchmarks/census.py [--families llama,qwen3 …] [--write]

Each family is made small with random weights (`small_models.py`), loaded as a run loads it, sampled by the native
engine (prompts of several lengths and samples of one prompt in one batch, past the windows), trained for a step on
packed rows that share prompts, exported and sampled again. Log-probs and gradients are compared with those of the
family's own modules in plain transformers, sequence by sequence. `--write` keeps the verdicts in
docs/families.json and writes the table of docs/families.md from them; a test compares them with what comes out.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.errors import KitaeError
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.quiet import quiet_transformers
from kitae.models.written_folder import export_policy
from kitae.trainer.base import Conditions, Role
from kitae.trainer.build_worker import supervised_worker
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import pack_rows
from kitae.trainer.objectives import Likelihood
from kitae.types import Sample

sys.path.append(str(Path(__file__).parent))
from small_models import families, make_small, small_config

DATA = Path(__file__).parents[1] / "docs/families.json"
PAGE = DATA.with_suffix(".md")
BEGIN, END = "<!-- written by benchmarks/census.py -->\n", "<!-- end -->"
RUNS, NOT_MADE, NO_DECODERS = "runs", "not made", ("encoder", "half")
HALVES = ("git", "musicgen", "musicgen_melody", "trocr")  # whose configuration does not say so
WHY = {  # what an error cannot tell
    "bloom": "adds a bias for the distance of tokens (ALiBi) in modules of its own",
    "deepseek_v4": "keys of compressed stretches beside those of tokens",
    "doge": "each layer computes a mask",
    "falcon": "attends in modules of its own; convert newer ones to another family",
    "inkling_text": "adds a bias that is computed from queries for the distance of tokens",
    "inkling2_text": "adds a bias that is computed from queries for the distance of tokens",
    "mpt": "adds a bias for the distance of tokens (ALiBi) in modules of its own",
    "qwen4_exp": "an index picks blocks of tokens, and layers carry a state",
    "qwen4_exp_text": "an index picks blocks of tokens, and layers carry a state",
    "reformer": "attends to tokens with the same hash",
}
ROUNDING = 3e-4  # of a log-prob in float32
ROUNDED_GRADIENT = 2e-3  # of its norm
LENGTHS = (5, 12, 19, 19, 33)  # of prompts; those of one length are samples of one prompt


@dataclass(frozen=True, slots=True)
class Verdict:
    """`Verdict("bert", "encoder", "tokens attend to later ones")`.

    verdict: runs, refused, wrong (other log-probs or gradients), crashed (anything but a refusal), or why it is no
    decoder of text: encoder, half (of an encoder and decoder), not made (its configuration could not be made small).
    """

    family: str
    verdict: str
    reason: str = ""


def verdict_of(family: str, folder: Path) -> Verdict:
    try:
        if getattr(small_config(family), "is_encoder_decoder", False) or family in HALVES:
            return Verdict(family, "half", "the decoder of a model with an encoder")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = plain_model(make_small(family, folder / "start"))
            early = attends_to_later_tokens(plain)
    except Exception as error:
        return Verdict(family, NOT_MADE, _short(error))
    if early:
        return Verdict(family, "encoder", "tokens attend to later ones")
    try:
        return Verdict(family, *run(folder, plain))
    except KitaeError as error:
        return Verdict(family, "refused", _short(error).replace(str(folder / "start"), family))
    except Exception as error:
        traceback.print_exc()
        return Verdict(family, "crashed", _short(error))


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return text[0][:300] if isinstance(error, KitaeError) else f"{type(error).__name__}: {text[0][:200]}"


def plain_model(folder: Path) -> Any:
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def attends_to_later_tokens(plain: Any) -> bool:
    row = torch.arange(5, 25)[None]
    other = row.clone()
    other[0, -1] = 99
    with torch.no_grad():
        a, b = (plain(input_ids=tokens, use_cache=False).logits[0, :-1] for tokens in (row, other))
    return not torch.allclose(a, b, atol=1e-4)


def run(folder: Path, plain: Any) -> tuple[str, str]:
    """The verdict on a model that can be loaded, and what is wrong with it."""
    policy = load_policy(ModelConfig(path=str(folder / "start"), dtype="float32", device="cpu"))
    sampled = asyncio.run(sample(policy))
    if (off := farthest(sampled, plain)) > ROUNDING:
        return "wrong", f"log-probs of the engine are off by {off:.2g}"
    samples = [as_sample(i, *pair) for i, pair in enumerate(sampled)]
    worker = supervised_worker(Likelihood(policy, TrainingConfig(), 1.0), TrainingConfig(lr=1e-3, warmup_steps=0))
    _, rows = pack_rows(samples, worker.training, policy.device, policy.dtype)
    worker.forward_backward(rows, Conditions(), [Role.POLICY])
    if (gap := gradient_gap(worker.trained[Role.POLICY].optimizer, plain, samples)) > ROUNDED_GRADIENT:
        return "wrong", f"gradients of packed rows are off by {gap:.2g} of their norm"
    worker.optim_step()
    export_policy(policy, folder / "trained")
    if (off := farthest(asyncio.run(sample(policy)), plain_model(folder / "trained"))) > ROUNDING:
        return "wrong", f"log-probs of the engine are off by {off:.2g} after a step of training"
    return "runs", ""


async def sample(policy: Policy) -> list[tuple[Request, Completion]]:
    engine = NativeEngine(policy, EngineConfig(memory_gb=0.01))
    prompts = [tuple((7 * i + n * i * i) % 250 + 3 for i in range(n)) for n in LENGTHS]
    requests = [
        Request(f"{i}", prompt, SamplingParams(max_tokens=16), i, share=f"{len(prompt)}")
        for i, prompt in enumerate(prompts)
    ]
    try:
        return list(zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True))
    finally:
        await engine.close()


def logprobs(plain: Any, tokens: Tensor) -> Tensor:
    """Of all tokens but the first."""
    logits = plain(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def farthest(sampled: Sequence[tuple[Request, Completion]], plain: Any) -> float:
    """How far the engine's log-probs are from the model's own, at most; infinity where one is no number."""
    most = 0.0
    for request, done in sampled:
        with torch.no_grad():
            expected = logprobs(plain, torch.tensor(request.prompt_tokens + done.tokens))
        off = (torch.tensor(done.logprobs) - expected[len(request.prompt_tokens) - 1 :]).abs().max().item()
        most = max(most, off if off == off else float("inf"))
    return most


def as_sample(index: int, request: Request, done: Completion) -> Sample:
    prompt = len(request.prompt_tokens)
    tokens_T = np.array(request.prompt_tokens + done.tokens)
    mask_T = np.arange(len(tokens_T)) >= prompt
    weight_T = np.where(mask_T, 1 + np.arange(len(tokens_T)) % 3, 0).astype(np.float32)
    return Sample(0, index, tokens_T, prompt, mask_T, weight_T)


def gradient_gap(optimizer: Any, plain: Any, samples: Sequence[Sample]) -> float:
    """The largest difference of a weight's gradient, as a share of the norm of that gradient, or of a hundredth of the
    whole one where that is larger."""
    ours = {n: m.grad for n, m in zip(optimizer.names, optimizer.masters, strict=True)}
    plain.zero_grad()
    total = torch.zeros(())
    for s in samples:
        total = total - (logprobs(plain, torch.tensor(s.tokens_T)) * torch.tensor(s.weight_T)[1:]).sum()
    total.backward()  # type: ignore[no-untyped-call]
    theirs = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    floor = 0.01 * sum(float(g.square().sum()) for g in theirs.values()) ** 0.5
    most = 0.0
    for name, grad in theirs.items():
        own = ours.get(name)
        gap = float((grad if own is None else own - grad).norm()) / max(floor, float(grad.norm()))
        most = max(most, gap if gap == gap else float("inf"))
    return most


def page(verdicts: Sequence[Verdict]) -> str:
    """The part of docs/families.md that is written from the verdicts."""
    runs = [v for v in verdicts if v.verdict == RUNS]
    made = [v for v in verdicts if v.verdict not in (*NO_DECODERS, NOT_MADE)]
    lines = [
        f"transformers {transformers.__version__}: **{len(runs)} of {len(made)} decoders run** "
        f"({100 * len(runs) / len(made):.0f} %).",
        "",
        _names(runs),
        "",
        "| refused | why |",
        "|---|---|",
        *(f"| `{v.family}` | {_why(v)} |" for v in made if v.verdict != RUNS),
        "",
        "No decoders of text: encoders, and halves of models with one: "
        + _names([v for v in verdicts if v.verdict in NO_DECODERS]),
        "",
        "Not made small, so not tried: " + _names([v for v in verdicts if v.verdict == NOT_MADE]),
    ]
    return "\n".join(lines) + "\n"


def _why(verdict: Verdict) -> str:
    reason = verdict.reason.removeprefix(f"{verdict.family}: ").replace("|", "/")
    return f"{WHY[verdict.family]}: {reason}" if verdict.family in WHY else reason


def _names(verdicts: Sequence[Verdict]) -> str:
    return ", ".join(f"`{v.family}`" for v in verdicts) + "."


def write(verdicts: Sequence[Verdict]) -> None:
    """Verdicts that are new replace those that are known."""
    known = {v.family: v for v in (*read(), *verdicts)}
    kept = [known[family] for family in sorted(known.keys() & set(families()))]
    DATA.write_text(json.dumps({v.family: [v.verdict, v.reason] for v in kept}, indent=0) + "\n")
    text = PAGE.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(text[:start] + page(kept) + text[end:])


def read() -> list[Verdict]:
    return [Verdict(family, *kept) for family, kept in json.loads(DATA.read_text()).items()] if DATA.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="", help="names, with commas; all if not given")
    parser.add_argument("--write", action="store_true", help="keep the verdicts, and write the page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for family in args.families.split(",") if args.families else families():
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(verdict := verdict_of(family, Path(scratch)))
        print(f"{family:24} {verdict.verdict:9} {time.perf_counter() - start:5.1f} s  {verdict.reason}", flush=True)
    counts = Counter(v.verdict for v in found)
    decoders = sum(counts[name] for name in ("runs", "refused", "wrong", "crashed"))
    print(f"{dict(counts)}: {counts['runs']} of {decoders} decoders run")
    if args.write:
        write(found)


if __name__ == "__main__":
    main()
