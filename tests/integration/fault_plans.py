"""What the runs of fault trials are like: everything follows from a seed.

A run is of one of these sorts (`SORTS`):

    plain       answers of one turn, sampled and trained in one process or with an engine of its own
    talking     episodes of several turns, some of which raise, hang or flood
    agents      episodes of a program that asks the model over HTTP
    distil      with a teacher, in the trainer or in a process of its own
    spread      on a cluster of processes on this machine: ranks, engines, a verifier host
    offline     supervised fine-tuning, DPO, KTO, a reward model, distillation on a file; one rank or two
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import HERE, RECIPE, toy_config

from kitae.config.recipe import load_config
from kitae.config.root import Root
from kitae.errors import ConfigError
from kitae.kernels.cpu import packed
from kitae.models.tiny import make_tiny

PROMPTS, SAMPLES = 3, 3
BATCH = 3  # examples of a step of an offline run

SORTS = {"plain": 50, "talking": 8, "agents": 8, "distil": 12, "spread": 8, "offline": 14}
"""The sorts of runs, and how often each is drawn."""

NEEDS = {
    "kill the engine": ("plain", "agents", "distil", "spread"),
    "corrupt an update": ("plain", "agents", "distil", "spread"),
    "delay an update": ("plain", "agents", "distil", "spread"),
    "kill in a corrupt update": ("plain", "agents", "distil", "spread"),
    "kill a verifier": ("plain", "talking", "agents", "distil", "spread"),
    "verifier outage": ("plain", "talking", "agents", "distil", "spread"),
    "kill a rank": ("spread", "offline"),
    "kill the teacher": ("distil",),
    "kill an agent": ("agents",),
}
"""Kinds of faults that strike some sorts of runs alone."""

OWN_PROCESS = ("kill the engine", "corrupt an update", "delay an update", "kill in a corrupt update")

SCORE = """
import os, time, zlib

def score(response, reference, context):
    if os.path.exists({outage!r}):
        raise RuntimeError("the service is down")
    mark = zlib.crc32(repr((response, reference)).encode())
    if {flaky} and mark % 7 == 0 and not os.path.exists(path := os.path.join({folder!r}, f"seen-{{mark}}")):
        open(path, "w").close()
        raise RuntimeError("not now")
    if {slow} and mark % 11 == 0:
        time.sleep(0.25)
    return {value}
"""

KL = ("algorithm.kl.coef=0.05", "algorithm.reference=frozen")
METHODS: tuple[tuple[str, ...], ...] = (
    (),
    ("algorithm.preset=grpo", "algorithm.kl.coef=0.05", "algorithm.reference=frozen"),
    ("algorithm.preset=dapo",),
    ("training.minibatches=2", "training.epochs=2"),
    ("algorithm.preset=remax",),
    ("algorithm.preset=ppo", "algorithm.critic.warmup=1"),
    ("algorithm.preset=grpo", "algorithm.kl.coef=0.05", "algorithm.reference=reset", "algorithm.reference.every=2"),
    ("algorithm.kl.coef=0.05", "algorithm.reference=ema", "algorithm.reference.every=1", "algorithm.reference.mix=0.3"),
    ("algorithm.shaping.norm=running", *KL, "algorithm.kl.target=0.1"),
)
DISTILLING: tuple[tuple[str, ...], ...] = (
    (), ("method.loss=jsd",), ("training.minibatches=2",), ("algorithm.advantage.reward_coef=0.5",),
)  # fmt: skip
OFFLINE = {
    "sft": {"completion": "yes {0}"},
    "dpo": {"chosen": "yes yes", "rejected": "no {0}"},
    "kto": {"completion": "yes {0}", "label": True},
    "reward": {"chosen": "yes yes", "rejected": "no {0}"},
    "distil-file": {"completion": "yes {0}"},
}
"""The methods that learn from a file, with the columns of their rows beside the prompt."""

TALKING = (
    f"env.name={HERE / 'dialogue.py'}:Dialogue", "env.seconds=3",
    "sampling.stop=" + str(list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")).replace("'", '"'),
)  # fmt: skip
AGENTS = (f"env.command={sys.executable} {HERE / 'captured_agent.py'}",)


@dataclass(frozen=True)
class Plan:
    """What a run of a trial is like: everything that its seed decides.

    repeats: how far a resumed run has the numbers of one that was not interrupted, as the docs promise; None: it may
    have others.
    """

    sort: str
    recipe: Path
    settings: list[str]
    steps: int
    outage: Path
    repeats: float | None
    later: list[str]  # what a resume changes
    extended: int  # steps, after the run was finished

    @staticmethod
    def draw(seed: int, kind: str, folder: Path) -> "Plan":
        """Settings that contradict each other are drawn again."""
        rng = random.Random(f"sort {seed}")
        sorts = NEEDS.get(kind, tuple(SORTS))
        sort = rng.choices(sorts, [SORTS[each] for each in sorts])[0]
        for attempt in range(100):
            again = f" {attempt}" if attempt else ""
            plan = (_offline if sort == "offline" else _rl)(f"{seed}{again}", sort, kind, folder)
            try:
                plan.config(folder, plan.steps)
                return plan
            except ConfigError as error:
                refused = error
        raise AssertionError(f"no settings of a run of the sort {sort!r} go together: {refused}")

    def config(self, folder: Path, steps: int) -> Root:
        settings = [*self.settings, f"training.steps={steps}"]
        if self.sort == "offline":
            return load_config(self.recipe, [f"run.dir={folder}", *settings])
        return toy_config(folder, *settings)


def _rl(seed: str, sort: str, kind: str, folder: Path) -> Plan:
    rng = random.Random(f"settings {seed}")

    def chance(share: float) -> bool:
        return rng.random() < share

    stale, steps = rng.choice([0, 0, 1, 2, 3]), rng.choice([3, 4, 6, 8] if sort == "plain" else [3, 4])
    flaky, slow, refill, mastered = chance(0.2), chance(0.3), chance(0.3), chance(0.25)
    right_or_wrong = "float(any(c.isdigit() for c in response))"
    part = "sum(c.isdigit() for c in response) / max(1, len(response))"
    value = right_or_wrong if refill or mastered else part
    outage = folder / "outage"
    (folder / "own.py").write_text(
        SCORE.format(outage=str(outage), folder=str(folder), flaky=flaky, slow=slow, value=value)
    )
    fails = flaky or sort in ("talking", "agents")
    settings = [
        f"verifier.name={folder / 'own.py'}:score",
        f"run.seed={seed.partition(' ')[0]}",
        f"training.steps={steps}",
        f"training.prompts_per_step={PROMPTS}",
        f"training.group_size={SAMPLES}",
        f"checkpoint.every={rng.choice([1, 2, 3])}",
        f"checkpoint.keep={rng.choice([1, 2])}",
        f"pipeline.max_staleness={stale}",
        f"pipeline.in_flight={rng.choice(['keep', 'recompute'])}",
        f"sampling.max_tokens={rng.choice([6, 40])}",
        f"verifier.workers={rng.choice([1, 2, 4])}",
        "verifier.check_gold=false",
        f"verifier.max_error_share={(1 if sort in ('talking', 'agents') else 0.9) if fails else 0.1}",
        *rng.choice([["eval.prompts=0"], ["eval.prompts=3", f"eval.every={rng.choice([0, 1, 2])}"]]),
        *rng.choice(DISTILLING if sort == "distil" else METHODS),
    ]
    own_process = kind in OWN_PROCESS or chance(0.1)
    if chance(0.35) and "algorithm.reference=ema" not in settings:
        settings += ["model.lora_rank=4", "training.lr=1e-2"]
    if stale and chance(0.4):
        settings.append("pipeline.overdue=drop")
    if refill:
        settings += [
            "algorithm.filter=zero-variance",
            f"pipeline.refill.most={rng.choice([1, 5])}",
            f"pipeline.refill.oversample={rng.choice([1, 1.5, 3])}",
        ]
    if mastered:
        (folder / "data.jsonl").write_text("".join(f'{{"question": "p{i}", "answer": "{i}"}}\n' for i in range(5)))
        settings += [f"data.path={folder / 'data.jsonl'}", "pipeline.mastered_visits=0.4", "pipeline.mastered=0.6"]
        settings = ["eval.prompts=0" if s.startswith("eval.prompts") else s for s in settings]
    if sort == "spread":
        ranks = 2 if kind == "kill a rank" else rng.choice([1, 2])
        settings += ["cluster.backend=local", f"cluster.ranks={ranks}", f"engine.count={rng.choice([1, 1, 2])}"]
        settings += [f"cluster.verifiers={rng.choice([0, 1])}", f"cluster.transport={rng.choice(TRANSPORTS)}"]
    elif own_process:
        settings += ["engine.kind=process", f"engine.sync={rng.choice(['full', 'delta'])}"]
        settings.append(f"engine.count={rng.choice([1, 1, 2])}")
    elif chance(0.15):
        settings += ["engine.keep_cache=false", "engine.host_memory_gb=0.01"]
    if packed.available(torch.float32) and random.Random(f"engine {seed}").random() < 0.25:
        settings.append("engine.weights_dtype=float8")
    settings += _SORTED[sort](rng, kind, folder)
    apart = own_process or sort == "spread"
    repeats = None if stale or refill or flaky or kind in COSTS_ANSWERS else 1e-4 if apart else 1e-5
    later = ["checkpoint.every=1"] if chance(0.1) else []
    extended = rng.choice([1, 3]) if chance(0.12) else 0
    return Plan(sort, RECIPE, settings, steps, outage, repeats, later, extended)


COSTS_ANSWERS = ("verifier outage", "kill an agent")
TRANSPORTS = ("memory", "memory", "broadcast")


def _distil(rng: random.Random, kind: str, folder: Path) -> Iterator[str]:
    yield "method.kind=distil"
    yield f"method.teacher={make_tiny(folder / 'teacher', seed=11, hidden=32)}"
    if kind == "kill the teacher" or rng.random() < 0.4:
        yield "method.teacher.place=process"


_SORTED: dict[str, Callable[[random.Random, str, Path], Iterator[str]]] = {
    "plain": lambda *_: iter(()),
    "spread": lambda *_: iter(()),
    "talking": lambda *_: iter(TALKING),
    "agents": lambda *_: iter(AGENTS),
    "distil": _distil,
}
"""What a sort of runs has in its settings."""


def _offline(seed: str, sort: str, kind: str, folder: Path) -> Plan:
    rng = random.Random(f"settings {seed}")
    method, ranks = rng.choice(list(OFFLINE)), 2 if kind == "kill a rank" else rng.choice([1, 1, 1, 2])
    steps = rng.choice([3, 4, 6])
    write_rows(method, folder)
    settings = [
        f"method.kind={method}",
        f"run.seed={seed.partition(' ')[0]}",
        f"training.steps={steps}",
        f"training.batch={BATCH}",
        f"training.lr={rng.choice(['1e-3', '1e-2'])}",
        f"checkpoint.every={rng.choice([1, 2, 3])}",
        f"checkpoint.keep={rng.choice([1, 2])}",
        *rng.choice([["eval.every=0"], ["eval.every=1"], ["eval.every=2"]]),
        *rng.choice([[], ["model.lora_rank=4"]]),
    ]
    if rng.random() < 0.7:
        settings.append(f"data.eval_path={folder / 'held_out.jsonl'}")
    else:
        settings.append("eval.examples=0")
    if method == "distil-file":
        settings.append(f"method.teacher={make_tiny(folder / 'teacher', seed=11, hidden=32)}")
    if ranks > 1:
        settings += ["cluster.backend=local", f"cluster.ranks={ranks}"]
    recipe = folder / "toy.toml"
    recipe.write_text(
        f'[method]\nkind = "{method}"\n[model]\npath = "tiny"\ndtype = "float32"\ndevice = "cpu"\n'
        f'[data]\npath = "{folder / "train.jsonl"}"\n'
    )
    extended = rng.choice([1, 3]) if rng.random() < 0.12 else 0
    later = ["checkpoint.every=1"] if rng.random() < 0.1 else []
    return Plan(sort, recipe, settings, steps, folder / "outage", 1e-5, later, extended)


def write_rows(method: str, folder: Path) -> None:
    for name, numbers in (("train", range(8)), ("held_out", range(90, 93))):
        rows = []
        for i in numbers:
            row = {key: text.format(i) if isinstance(text, str) else text for key, text in OFFLINE[method].items()}
            if "label" in row:
                row["label"] = i % 2 == 0
            rows.append({"prompt": f"say {i}", **row})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
