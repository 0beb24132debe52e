"""Kitae's offline stages beside TRL's on the same rows: losses of every step, final weights, seconds and memory.

    python benchmarks/offline.py make --work FOLDER                       a tiny random model, a teacher, rows
    PEER/bin/python benchmarks/peers/trl_stages.py --work FOLDER --kind dpo --lr 1e-4 --save FOLDER/trl-dpo > dpo.json
    python benchmarks/offline.py train --work FOLDER --kind dpo --lr 1e-4 --peer dpo.json --peer-model FOLDER/trl-dpo

`make` takes the tokenizer of SmolLM2; with `--model smollm2-135m` it takes its weights too, in fp32, and rows that are
four times as long, for measuring time and memory. `train` runs the stage as `kitae train` does, without evaluation, in
the order of the rows, and prints one line of JSON; with `--peer`, also how far losses and weights are at most from
those of TRL. Peak memory is that of the process. jsd is no kind of run here: its loss is trained by this script.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from kitae.algorithms.distillation import generalised_jsd
from kitae.config.recipe import parse_config
from kitae.config.root import StageConfig
from kitae.data.chat import Chat
from kitae.data.examples import Conversation
from kitae.data.rendering import Renderer
from kitae.models.config import ModelConfig
from kitae.models.load import find_model, load_policy
from kitae.models.logprobs import Head
from kitae.models.policy import Policy
from kitae.observe.meter import Meter
from kitae.observe.observer import Bystander, Silent
from kitae.observe.progress import peak_memory_gb
from kitae.offline.base import Item, sample_of
from kitae.offline.example_batches import ExampleBatches
from kitae.run import train_run
from kitae.trainer.base import Batch, Conditions
from kitae.trainer.config import LearningConfig
from kitae.trainer.forward import MicroBatch, attention
from kitae.trainer.objectives import PolicyScorer
from kitae.trainer.start_trainer import supervised
from kitae.types import Message

WORDS = (
    "the",
    "number",
    "sum",
    "is",
    "first",
    "then",
    "because",
    "answer",
    "seven",
    "red",
    "sky",
    "walks",
    "over",
    "who",
)
ROWS = {"sft": "sft", "jsd": "sft", "dpo": "pairs", "kto": "rated", "reward": "pairs"}


def make(args: argparse.Namespace) -> None:
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    source = find_model("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(source)
    if args.model == "tiny":
        for name, seed, layers in (("model", 0, 3), ("teacher", 1, 2)):
            torch.manual_seed(seed)
            _save(
                AutoModelForCausalLM.from_config(_tiny(tokenizer, layers), dtype=torch.float32), tokenizer, work / name
            )
    else:
        _save(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), tokenizer, work / "model")
    rows = _rows(tokenizer, args.rows, 1 if args.model == "tiny" else 4)
    (work / "rows.json").write_text(json.dumps(rows))
    for name, mine in rows.items():
        lines = (json.dumps(row["kitae"]) + "\n" for row in mine)
        (work / f"{name}.jsonl").write_text("".join(lines))


def _tiny(tokenizer: Any, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.1, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _rows(tokenizer: Any, count: int, scale: int) -> dict[str, list[dict[str, Any]]]:
    """Each row as Kitae reads it, and as texts and tokens for the other side."""
    random = np.random.default_rng(0)
    chat = Chat(tokenizer)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("sft", "turns", "last", "text", "pairs", "rated")}

    def words(least: int, most: int) -> str:
        return " ".join(random.choice(WORDS, random.integers(least * scale, most * scale))).capitalize() + "."

    def rendered(messages: Sequence[tuple[str, str]], train_on: Any = "all", text: str | None = None) -> Any:
        said = Conversation(tuple(Message(*m) for m in messages), text=text)
        return Renderer(chat, train_on, 10**6).render(said)

    def masked(made: Any) -> dict[str, Any]:
        return {"ids": made.tokens_T.tolist(), "mask": made.mask_T.astype(int).tolist()}

    for i in range(count):
        ask, chosen, rejected, again, more = words(5, 25), words(3, 30), words(3, 30), words(3, 10), words(3, 10)
        one = [("user", ask), ("assistant", chosen)]
        two = [*one, ("user", again), ("assistant", more)]
        messages = [{"role": role, "content": content} for role, content in two]
        good, bad = rendered(one), rendered([("user", ask), ("assistant", rejected)])
        at = good.prompt_length
        prompt = good.tokens_T[:at].tolist()
        texts = {"prompt": tokenizer.decode(prompt), "prompt_ids": prompt}
        answers = [x.tokens_T[at:].tolist() for x in (good, bad)]
        margin = round(0.1 * (i % 5), 1)
        found["sft"].append({**masked(good), "kitae": {"prompt": ask, "completion": chosen}})
        found["turns"].append({**masked(rendered(two)), "kitae": {"messages": messages}})
        found["last"].append({**masked(rendered(two, "last")), "kitae": {"messages": messages}})
        found["text"].append({**masked(rendered((), text=chosen)), "kitae": {"text": chosen}})
        pair = {"chosen": chosen, "rejected": rejected, "margin": margin}
        ids = dict(zip(("chosen_ids", "rejected_ids"), answers, strict=True))
        found["pairs"].append({**texts, **pair, **ids, "kitae": {"prompt": ask, **pair}})
        label = i % 3 != 0
        rated = {"completion": chosen, "label": label}
        found["rated"].append({**texts, **rated, "completion_ids": answers[0], "kitae": {"prompt": ask, **rated}})
    return found


def settings(args: argparse.Namespace, folder: str) -> StageConfig:
    work = Path(args.work)
    method = {
        "sft": {},
        "dpo": {"loss": args.loss, "beta": args.beta},
        "kto": {"beta": args.beta, "undesirable": args.undesirable},
        "reward": {"centring": args.centring, "margin_coef": 1.0},
    }[args.kind]
    values = {
        "run": {"name": "offline", "dir": folder},
        "method": {"kind": args.kind, **method},
        "model": {"path": str(work / "model"), "device": "cpu", "dtype": args.dtype},
        "data": {
            "path": str(work / f"{args.rows or ROWS[args.kind]}.jsonl"),
            "shuffle": False,
            "train_on": "last" if args.rows == "last" else "all",
        },
        "training": {"steps": args.steps, "batch": args.batch, "lr": args.lr},
        "eval": {"examples": 0},
        "checkpoint": {"every": 10**6},
    }
    config = parse_config(values)
    assert isinstance(config, StageConfig)
    return config


class Clocked(Silent):
    """Processor time at the end of each step: where wall time is well above it, the machine did something else too."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def step(self, report: Any) -> None:
        self.ends.append(time.process_time())


def train(args: argparse.Namespace) -> None:
    began, clock = time.perf_counter(), Clocked()
    with tempfile.TemporaryDirectory() as folder:
        if args.kind == "jsd":
            losses, weights, seconds = distil(args)
        else:
            config = settings(args, folder)
            result = train_run.train(config, Bystander(clock))
            lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
            steps = [line for line in lines if line["kind"] == "step"]
            losses, seconds = [s["loss"] for s in steps], [s["step_seconds"] - s.get("save_seconds", 0) for s in steps]
            weights = load_file(result.folder / "model" / "model.safetensors")
    found = {
        "kind": args.kind,
        "losses": losses,
        "seconds_per_step": [round(s, 3) for s in seconds],
        "cpu_seconds_per_step": [round(s, 3) for s in np.diff(clock.ends).tolist()],  # from the second one on
        "seconds": round(time.perf_counter() - began, 2),
        "peak_rss_gb": round(peak_memory_gb() * 2**30 / 1e9, 2),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    if args.peer:
        peer = json.loads(Path(args.peer).read_text().strip().splitlines()[-1])["losses"]
        found["largest_difference_of_losses"] = max(abs(a - b) for a, b in zip(losses, peer, strict=True))
    if args.peer_model:
        theirs = load_file(Path(args.peer_model) / "model.safetensors")
        start = load_file(Path(args.work) / "model" / "model.safetensors")
        names = weights.keys() & theirs.keys()
        found["largest_difference_of_weights"] = max(float((weights[n] - theirs[n]).abs().max()) for n in names)
        found["largest_move_of_weights"] = max(float((weights[n] - start[n]).abs().max()) for n in names & start.keys())
        found["weights_compared"] = f"{len(names)} of {len(weights)}"
    if not args.losses:
        del found["losses"]
    print(json.dumps(found))


class Distilled(PolicyScorer):
    """The generalised JSD to a teacher, at the same tokens."""

    def __init__(self, policy: Policy, teacher: Policy, config: LearningConfig, beta: float) -> None:
        super().__init__(policy, config, temperature=1.0)
        self._teacher, self._beta = teacher, beta

    def loss(self, micro: MicroBatch, conditions: Conditions, meter: Meter) -> torch.Tensor:
        states = []
        for policy in (self.policy, self._teacher):
            with torch.set_grad_enabled(policy is self.policy):
                context = attention(policy, micro)
                states.append(policy.hidden(micro.tokens_T, micro.positions_T, context)[micro.source_N])
        heads = [Head(p.head.weight, None, p.transform, p.exact) for p in (self.policy, self._teacher)]
        loss_N = generalised_jsd(heads[0], states[0], heads[1], states[1], beta=self._beta, chunk=self._chunk)
        loss = (loss_N * micro.weight_N).sum()
        meter.total("loss", loss.detach())
        return loss


def distil(args: argparse.Namespace) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    args.kind = "sft"
    config = settings(args, "")
    policy, teacher = (
        load_policy(ModelConfig(path=str(Path(args.work) / name), device="cpu", dtype=args.dtype))
        for name in ("model", "teacher")
    )
    data, objective = ExampleBatches(config), Distilled(policy, teacher, config.training, args.beta)
    losses, seconds = [], []

    def batch(items: list[Item]) -> Batch:
        tokens = sum(int(item.sequences[0].mask_T.sum()) for item in items)
        return Batch(tuple(sample_of(i, 0, item.sequences[0], 1 / tokens) for i, item in enumerate(items)))

    async def run() -> None:
        trainer = supervised(objective, config.training)
        for step in range(1, args.steps + 1):
            began = time.perf_counter()
            totals = await trainer.forward_backward(batch(data.batch(step)))
            await trainer.optim_step()
            losses.append(totals.numbers()["loss"])
            seconds.append(time.perf_counter() - began)
        await trainer.close()

    asyncio.run(run())
    return losses, {name: p.detach() for name, p in policy.model.named_parameters()}, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "train"))
    parser.add_argument("--work", required=True)
    parser.add_argument("--model", default="tiny", choices=("tiny", "smollm2-135m"), help="of make")
    parser.add_argument("--kind", choices=ROWS)
    parser.add_argument("--rows", default="", help="make: how many; train: another file than that of the kind")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--loss", default="sigmoid")
    parser.add_argument("--undesirable", type=float, default=1.0)
    parser.add_argument("--centring", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--losses", action="store_true", help="print them all")
    parser.add_argument("--peer", help="what trl_stages.py printed")
    parser.add_argument("--peer-model", help="where it saved its model")
    args = parser.parse_args()
    if args.what == "make":
        args.rows = int(args.rows or 80)
        make(args)
    else:
        train(args)


if __name__ == "__main__":
    main()
