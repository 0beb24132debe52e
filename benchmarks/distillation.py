"""On-policy distillation against fine-tuning on the teacher's own responses, at equal tokens, in one command.

    python benchmarks/distillation.py --teacher LARGE --student SMALL --data gsm8k/train.jsonl \\
        --eval-data gsm8k/test.jsonl [--steps 40] [--seconds 400] [--loss reverse-kl jsd] [--sft-lr 1e-5 3e-6]

Rows are {"question": "…", "answer": "… #### 72"}. Without a file, the generated task `arithmetic` is used.

distil   the student samples, the teacher scores its tokens, the student learns (`method.kind = "distil"`)
sft      the teacher answers the same prompts, and the likelihood of its answers is trained, in as many steps and as
         many tokens as the first distil had, an equal share in each step; nothing is filtered

All start from the same student, with the same optimizer, and are evaluated greedily on the same held-out prompts. The
seconds are for everything: each part ends in time for the next one, and the table says how far it came. The engine, the
trainer and the learner are those of a run; only its folder is left out.
"""

import argparse
import asyncio
import gc
import itertools
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kitae.algorithms.group_stages import GroupStages
from kitae.config.recipe import parse_config
from kitae.config.root import DistilConfig
from kitae.data.prompt_stream import PromptStream, eval_prompts, open_stream
from kitae.engines.native.engine import NativeEngine
from kitae.envs.environment_registry import open_world
from kitae.envs.episode_context import Running
from kitae.envs.rollouts import Episodes, episodes_of
from kitae.evaluation.measure import Evaluation, evaluate
from kitae.evaluation.statistics import compare
from kitae.evaluation.suites import own_suite
from kitae.models.facts import ModelFacts
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.rl.weight_sync import WeightSync
from kitae.run.plan import make_plan
from kitae.trainer.base import Batch
from kitae.trainer.learner import Learnt
from kitae.trainer.objectives import Likelihood
from kitae.trainer.start_trainer import local_trainer, make_learner, supervised
from kitae.trainer.teacher.frozen_teacher import Teacher
from kitae.types import Group, Prompt, Sample
from kitae.verifiers.pool import VerifierPool
from kitae.weights.probe import probe_tolerance

SHARES = {"distil": 0.5, "answers": 0.25, "sft": 0.17, "end": 0.08}
"""Of the seconds, for one part of each kind; `end` is the last evaluation. Several parts share in this proportion."""

TOGETHER = 8
"""Steps whose prompts the teacher answers at once: it does not change, so nothing need wait for a step."""

INSTRUCTION = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass
class Branch:
    """One line of the table. memory: most of the GPU's that was taken in it, in bytes."""

    name: str
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    memory: int = 0
    found: Evaluation | None = None


class Clock:
    """parts: what there is to do, in order: `["distil", "answers", "sft"]`."""

    def __init__(self, seconds: float, parts: Sequence[str]) -> None:
        self.began, self.limit = time.monotonic(), seconds
        shares = [SHARES[part] for part in (*parts, "end")]
        self._ends = [total / sum(shares) for total in itertools.accumulate(shares)]

    @property
    def passed(self) -> float:
        return time.monotonic() - self.began

    def over(self, part: int, longest: float) -> bool:
        """Whether another step of the part with this number, as long as the longest so far, would end too late."""
        return self.passed + longest > self._ends[part] * self.limit

    def say(self, text: str) -> None:
        print(f"[{self.passed:5.0f} s] {text}", flush=True)


def make_config(a: argparse.Namespace, loss: str) -> DistilConfig:
    data: dict[str, Any] = {"task": "arithmetic"}
    verifier: dict[str, Any] = {"workers": a.workers}
    if a.data:
        data = {"path": a.data, "answer_after": "####", "instruction": a.instruction}
        data |= {"eval_path": a.eval_data} if a.eval_data else {}
        verifier["name"] = "number"
    config = parse_config(
        {
            "run": {"seed": a.seed},
            "method": {"kind": "distil", "teacher": a.teacher, "loss": loss},
            "model": {"path": a.student, "device": a.device},
            "data": data,
            "verifier": verifier,
            "sampling": {"max_tokens": a.tokens},
            "engine": {"memory_gb": a.memory_gb, "max_batch": max(a.batch, a.prompts * a.group)},
            "training": {
                "steps": a.steps,
                "prompts_per_step": a.prompts,
                "group_size": a.group,
                "lr": a.lr,
                "warmup_steps": a.warmup,
            },
            "eval": {"prompts": a.eval},
        }
    )
    assert isinstance(config, DistilConfig)
    return config


class Bench:
    """config: of the first loss; what the branches have in common is read from it."""

    def __init__(self, config: DistilConfig, clock: Clock, pool: VerifierPool) -> None:
        self.config = config
        self.clock = clock
        self.pool = pool
        self.stream: PromptStream = open_stream(config.data, config.run.seed)
        self.student: Policy | None = None  # as it was distilled last; both are kept for the teacher's answers
        self.teacher: Policy | None = None
        self.held_out: list[Prompt] = eval_prompts(config.data, config.run.seed, config.eval.prompts)

    def episodes(self, engine: NativeEngine, student: Policy) -> Episodes:
        """Prompts are written as the student reads them, whoever answers."""
        return episodes_of(self.config, engine, self.pool, open_world(self.config.env), ModelFacts.of(student))

    async def evaluate(self, episodes: Episodes, who: str) -> Evaluation:
        sampling = replace(episodes.sampling, temperature=0.0)
        greedy = replace(episodes, sampling=sampling, label="eval", running=Running())
        found = await evaluate(greedy, self.held_out, 1)
        self.clock.say(f"{who}: {found.avg.mean:.3f} of {len(self.held_out)} held-out prompts, greedily")
        return found

    async def groups(self, episodes: Episodes, first: int, steps: int = 1) -> list[Group]:
        """Of the prompts of these steps; the first step is 1."""
        size, t = self.config.training.prompts_per_step, self.config.training
        ids = range((first - 1) * size, (first - 1 + steps) * size)
        return list(await asyncio.gather(*(episodes.group(i, self.stream.at(i), t.group_size) for i in ids)))

    async def distil(self, part: int, config: DistilConfig, before: Branch, steps: int) -> Branch:
        """`before` is filled in by the first branch."""
        branch = Branch(f"distil {config.method.loss}")
        self.student = self.teacher = None
        release()
        student = load_policy(config.model, config.run.seed)
        trainer = local_trainer(config, student)
        learner = make_learner(config, trainer)
        engine = NativeEngine(student, config.engine, 0)
        weights = WeightSync(trainer, engine, recompute=False, tolerance=probe_tolerance(student.dtype))
        episodes = self.episodes(engine, student)
        self.clock.say("student and teacher are loaded")
        before.found = before.found or await self.evaluate(episodes, "student before")
        began, longest = time.monotonic(), 0.0
        for step in range(1, steps + 1):
            start = time.monotonic()
            groups = await self.groups(episodes, step)
            sampled = time.monotonic() - start
            learnt = await learner.learn(step, groups, before_update=engine.pause)
            await weights.hand_over(step)
            branch.steps, branch.tokens = step, branch.tokens + response_tokens(groups)
            longest = max(longest if step > 2 else 0.0, time.monotonic() - start)  # the first one builds kernels
            took = f"{branch.tokens:,} tokens  sampling {sampled:.1f} s of {time.monotonic() - start:.1f} s"
            self.clock.say(f"{branch.name} {step}: {learning(learnt)}  {took}")
            if self.clock.over(part, longest):
                break
        branch.seconds, branch.memory = time.monotonic() - began, peak_memory()
        branch.found = await self.evaluate(episodes, f"student after {branch.name}")
        await engine.close()
        await trainer.close()
        assert isinstance(trainer.worker.teacher, Teacher)
        self.student, self.teacher = student, trainer.worker.teacher.policy
        return branch

    async def answers(self, part: int, steps: int, tokens: int) -> tuple[Branch, list[Sample]]:
        """What the teacher says to the prompts of these steps, and to further ones if need be, up to so many tokens."""
        branch, taken = Branch("teacher"), list[Sample]()
        assert self.student is not None and self.teacher is not None
        release()
        engine = NativeEngine(self.teacher, self.config.engine, 0)
        episodes = replace(self.episodes(engine, self.student), label="teacher")
        branch.found = await self.evaluate(episodes, "teacher")
        stages = GroupStages(self.config.algorithm, self.config.sampling.max_tokens)
        began, longest = time.monotonic(), 0.0
        at_once = min(TOGETHER, steps)
        for first in itertools.count(1, at_once):
            start = time.monotonic()
            groups = await self.groups(episodes, first, at_once)
            taken += [s for c in stages.candidates(groups) for s in c.samples]
            longest = max(longest, time.monotonic() - start)
            if sum(s.loss_tokens for s in taken) >= tokens or self.clock.over(part, longest):
                break
        ends = np.cumsum([s.loss_tokens for s in taken])
        taken = [s for s, end in zip(taken, ends, strict=True) if end <= tokens]
        branch.tokens, branch.seconds = sum(s.loss_tokens for s in taken), time.monotonic() - began
        branch.memory = peak_memory()
        self.clock.say(f"the teacher gave {len(taken):,} answers of {branch.tokens:,} tokens")
        await engine.close()
        self.student = self.teacher = None
        return branch, taken

    async def fine_tune(self, part: int, parts: Sequence[Sequence[Sample]], lr: float) -> Branch:
        branch = Branch(f"sft {lr:g}")
        release()
        student = load_policy(self.config.model, self.config.run.seed)
        training = self.config.training.model_copy(update={"lr": lr})
        trainer = supervised(Likelihood(student, training, temperature=1.0), training)
        began, longest = time.monotonic(), 0.0
        for step, samples in enumerate(parts, 1):
            start = time.monotonic()
            tokens = sum(s.loss_tokens for s in samples)
            weighted = tuple(replace(s, weight_T=s.spread(np.float32(1 / tokens))) for s in samples)
            totals = (await trainer.forward_backward(Batch(weighted)) + await trainer.optim_step()).numbers()
            branch.steps, branch.tokens = step, branch.tokens + tokens
            longest = max(longest if step > 2 else 0.0, time.monotonic() - start)
            self.clock.say(f"{branch.name} {step}: loss {totals['loss']:.4f}  {time.monotonic() - start:.1f} s")
            if self.clock.over(part, longest):
                break
        branch.seconds, branch.memory = time.monotonic() - began, peak_memory()
        engine = NativeEngine(student, self.config.engine, 0)
        branch.found = await self.evaluate(self.episodes(engine, student), f"student after {branch.name}")
        await engine.close()
        await trainer.close()
        return branch


def in_steps(samples: Sequence[Sample], steps: int) -> list[list[Sample]]:
    """In order, cut where the tokens of a step are full; a step without any is left out."""
    ends = np.cumsum([s.loss_tokens for s in samples])
    parts: list[list[Sample]] = [[] for _ in range(steps)]
    for s, end in zip(samples, ends, strict=True):
        parts[int((end - 1) * steps // ends[-1])].append(s)
    return [part for part in parts if part]


def response_tokens(groups: Sequence[Group]) -> int:
    return sum(r.response_length for g in groups for r in g.rollouts)


def learning(learnt: Learnt) -> str:
    keys = ("teacher_kl", "teacher_agreement", "teacher_divergence", "entropy", "grad_norm")
    return "  ".join(f"{key} {learnt.numbers[key]:.4f}" for key in keys if key in learnt.numbers)


def release() -> None:
    """The models of a branch that is over; what the next one takes is counted afresh."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


_COLUMNS = f"{'steps':>5} {'tokens':>10} {'seconds':>8} {'GiB':>5} {'accuracy':>9}  95 % interval {'length':>7} cut off"
HEADER = f"{'':18} {_COLUMNS}"


def line(b: Branch) -> str:
    assert b.found is not None
    e = b.found
    return (
        f"{b.name:18} {b.steps or '–':>5} {b.tokens or '–':>10} {b.seconds:8.0f} {b.memory / 2**30:5.1f} "
        f"{e.avg.mean:9.3f}  {e.avg.low:.3f}–{e.avg.high:.3f}   {e.length:7.0f} {e.truncated:7.0%}"
    )


def differences(students: Sequence[Branch]) -> str:
    """Each pair, on the same problems."""
    lines = ["second minus first, on the problems that both were judged on:"]
    for first, second in itertools.combinations(students, 2):
        assert first.found is not None and second.found is not None
        a, b = first.found.marks[0].values, second.found.marks[0].values
        both = sorted(a.keys() & b.keys())
        d = compare(*(np.array([values[i] for i in both], dtype=np.float32) for values in (a, b)))
        name, i = f"{first.name} → {second.name}", d.interval
        lines.append(f"{name:40} {i.mean:+.3f}  [{i.low:+.3f}, {i.high:+.3f}]  p = {d.p:.2g} ({d.test})")
    return "\n".join(lines)


def write_answers(file: Path, b: Branch) -> None:
    """Every held-out answer of a branch with its score, a row each, after those that are there."""
    assert b.found is not None
    with file.open("a") as out:
        for g in b.found.groups:
            for r in g.rollouts:
                score = None if r.score is None else r.score.value
                row = {"branch": b.name, "prompt": g.prompt.id, "reference": g.prompt.reference, "score": score}
                out.write(json.dumps(row | {"finish": r.finish, "text": r.text}) + "\n")


async def bench(a: argparse.Namespace, configs: Sequence[DistilConfig], clock: Clock) -> None:
    config, before, distilled, tuned = configs[0], Branch("student"), list[Branch](), list[Branch]()

    def keep(*branches: Branch) -> None:
        """What is over is told at once: a run that is stopped later has not lost it."""
        print("\n".join((HEADER, *map(line, branches))), flush=True)
        if a.answers:
            for branch in branches:
                write_answers(a.answers, branch)

    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(own_suite(config).pool())
        runs = Bench(config, clock, pool)
        part = itertools.count()
        for each in configs:
            steps = distilled[0].steps if distilled else config.training.steps
            distilled.append(await runs.distil(next(part), each, before, steps))
            keep(*([before] if len(distilled) == 1 else []), distilled[-1])
        teacher, samples = await runs.answers(next(part), distilled[0].steps, distilled[0].tokens)
        keep(teacher)
        for lr in a.sft_lr or [a.lr]:
            tuned.append(await runs.fine_tune(next(part), in_steps(samples, distilled[0].steps), lr))
            keep(tuned[-1])
    students = [before, *distilled, *tuned]
    print(f"\n{config.method.teacher} into {config.model.path}, lr {a.lr:g}, {clock.passed:.0f} s in all\n")
    print("\n".join((HEADER, *map(line, (*students, teacher)))))
    print(f"\n{differences(students)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="folder, hub id or short name")
    parser.add_argument("--student", required=True)
    parser.add_argument("--data", default="", help="problems to train on (.jsonl)")
    parser.add_argument("--eval-data", default="", help="held-out problems (.jsonl); without, the last of the data")
    parser.add_argument("--instruction", default=INSTRUCTION, help="what is asked; {question} is replaced")
    parser.add_argument(
        "--loss", choices=("reverse-kl", "jsd"), nargs="+", default=["reverse-kl"], help="a branch each"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=400.0, help="for everything")
    parser.add_argument("--prompts", type=int, default=32, help="in a step")
    parser.add_argument("--group", type=int, default=4, help="samples of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="longest response")
    parser.add_argument("--eval", type=int, default=200, help="held-out prompts")
    parser.add_argument("--lr", type=float, default=1e-5, help="of distil")
    parser.add_argument("--sft-lr", type=float, nargs="*", default=[], help="a branch each; none: one, with --lr")
    parser.add_argument("--warmup", type=int, default=0, help="steps of linear warm-up, in every branch")
    parser.add_argument("--memory-gb", type=float, default=8.0, help="of the engine's cache")
    parser.add_argument("--batch", type=int, default=256, help="sequences decoded together, if a step has fewer")
    parser.add_argument("--workers", type=int, default=4, help="of the verifier")
    parser.add_argument("--answers", type=Path, help="file that gets the held-out answers of all (.jsonl)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    parts = ["distil"] * len(a.loss) + ["answers"] + ["sft"] * max(1, len(a.sft_lr))
    clock, configs = Clock(a.seconds, parts), [make_config(a, loss) for loss in a.loss]
    make_plan(configs[0], print)  # the others differ in nothing that it looks at but a preset
    asyncio.run(bench(a, configs, clock))


if __name__ == "__main__":
    main()
