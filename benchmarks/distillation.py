"""On-policy distillation against fine-tuning on the teacher's own responses, at equal tokens, in one command.

    python benchmarks/distillation.py --teacher LARGE --student SMALL --data gsm8k/train.jsonl \\
        --eval-data gsm8k/test.jsonl [--steps 40] [--seconds 400] [--loss jsd]

Rows are {"question": "…", "answer": "… #### 72"}. Without a file, the generated task `arithmetic` is used.

distil   the student samples, the teacher scores its tokens, the student learns (`method.kind = "distil"`)
sft      the teacher answers other samples of the same prompts, and the likelihood of its answers is trained, in as many
         steps and up to as many response tokens as distil had; nothing is filtered

Both start from the same student, with the same optimizer, and are evaluated greedily on the same held-out prompts. The
seconds are for everything: each part ends in time for the next one, and the table says how far it came. The engine, the
trainer and the learner are those of a run; only its folder is left out.
"""

import argparse
import asyncio
import gc
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kitae.algorithms.groups import GroupStages
from kitae.config.load import parse_config
from kitae.config.root import DistilConfig
from kitae.data.prompts import PromptStream, eval_prompts, open_stream
from kitae.engines.native.engine import NativeEngine
from kitae.envs.groups import Episodes
from kitae.envs.registry import open_world
from kitae.envs.surroundings import Running
from kitae.evaluation.measure import Evaluation, evaluate
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.pipeline.prepare import make_episodes, make_pool, prepare
from kitae.pipeline.weight_sync import WeightSync
from kitae.trainer.base import Batch
from kitae.trainer.learner import Learnt
from kitae.trainer.objectives import Likelihood
from kitae.trainer.start import make_learner, start_trainer, supervised
from kitae.trainer.teacher import Teacher
from kitae.types import Group, Prompt, Sample
from kitae.verifiers.pool import VerifierPool
from kitae.weights.probe import probe_tolerance

SHARES = {"distil": 0.5, "answers": 0.68, "sft": 0.88}
"""Of the seconds, by when each part must be over; an evaluation follows the first and the last."""

INSTRUCTION = "{question}\nThink step by step. End with a line that holds only #### and the number."


@dataclass
class Branch:
    """One line of the table."""

    name: str
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    found: Evaluation | None = None


class Clock:
    def __init__(self, seconds: float) -> None:
        self.began, self.limit = time.monotonic(), seconds

    @property
    def passed(self) -> float:
        return time.monotonic() - self.began

    def over(self, part: str, longest: float) -> bool:
        """Whether another step, as long as the longest so far, would end too late."""
        return self.passed + longest > SHARES[part] * self.limit

    def say(self, text: str) -> None:
        print(f"[{self.passed:5.0f} s] {text}", flush=True)


def make_config(a: argparse.Namespace) -> DistilConfig:
    data: dict[str, Any] = {"task": "arithmetic"}
    verifier: dict[str, Any] = {"workers": a.workers}
    if a.data:
        data = {"path": a.data, "answer_after": "####", "instruction": INSTRUCTION}
        data |= {"eval_path": a.eval_data} if a.eval_data else {}
        verifier["name"] = "number"
    config = parse_config(
        {
            "run": {"seed": a.seed},
            "method": {"kind": "distil", "teacher": a.teacher, "loss": a.loss},
            "model": {"path": a.student, "device": a.device},
            "data": data,
            "verifier": verifier,
            "sampling": {"max_tokens": a.tokens},
            "engine": {"memory_gb": a.memory_gb, "max_batch": max(256, a.prompts * a.group)},
            "training": {"steps": a.steps, "prompts_per_step": a.prompts, "group_size": a.group, "lr": a.lr},
            "eval": {"prompts": a.eval},
        }
    )
    assert isinstance(config, DistilConfig)
    return config


class Bench:
    def __init__(self, config: DistilConfig, clock: Clock, pool: VerifierPool) -> None:
        self.config = config
        self.clock = clock
        self.pool = pool
        self.stream: PromptStream = open_stream(config.data, config.run.seed)
        self.student: Policy | None = None  # as it was distilled; both are kept for the teacher's answers
        self.teacher: Policy | None = None
        self.held_out: list[Prompt] = eval_prompts(config.data, config.run.seed, config.eval.prompts)

    def episodes(self, engine: NativeEngine, student: Policy) -> Episodes:
        """Prompts are written as the student reads them, whoever answers."""
        return make_episodes(self.config, engine, self.pool, open_world(self.config.env), student)

    async def evaluate(self, episodes: Episodes, who: str) -> Evaluation:
        sampling = replace(episodes.sampling, temperature=0.0)
        greedy = replace(episodes, sampling=sampling, label="eval", running=Running())
        found = await evaluate(greedy, self.held_out, 1)
        self.clock.say(f"{who}: {found.avg.mean:.3f} of {len(self.held_out)} held-out prompts, greedily")
        return found

    async def groups(self, episodes: Episodes, step: int) -> list[Group]:
        size, t = self.config.training.prompts_per_step, self.config.training
        ids = range((step - 1) * size, step * size)
        return list(await asyncio.gather(*(episodes.group(i, self.stream.at(i), t.group_size) for i in ids)))

    async def distil(self) -> tuple[Branch, Branch]:
        """The student before and after."""
        before, branch = Branch("student"), Branch("distil")
        student = load_policy(self.config.model, self.config.run.seed)
        trainer = start_trainer(self.config, student)
        learner = make_learner(self.config, trainer)
        engine = NativeEngine(student, self.config.engine, 0)
        weights = WeightSync(trainer, engine, recompute=False, tolerance=probe_tolerance(student))
        episodes = self.episodes(engine, student)
        self.clock.say("student and teacher are loaded")
        before.found = await self.evaluate(episodes, "student before")
        began, longest = time.monotonic(), 0.0
        for step in range(1, self.config.training.steps + 1):
            start = time.monotonic()
            groups = await self.groups(episodes, step)
            sampled = time.monotonic() - start
            learnt = await learner.learn(step, groups, before_update=engine.pause)
            await weights.hand_over(step)
            branch.steps, branch.tokens = step, branch.tokens + response_tokens(groups)
            longest = max(longest if step > 2 else 0.0, time.monotonic() - start)  # the first one builds kernels
            self.clock.say(
                f"distil {step}: {learning(learnt)}  sampling {sampled:.1f} s of {time.monotonic() - start:.1f} s"
            )
            if self.clock.over("distil", longest):
                break
        branch.seconds = time.monotonic() - began
        branch.found = await self.evaluate(episodes, "distilled student")
        await engine.close()
        await trainer.close()
        assert isinstance(trainer.worker.teacher, Teacher)
        self.student, self.teacher = student, trainer.worker.teacher.policy
        return before, branch

    async def answers(self, steps: int, tokens: int) -> tuple[Branch, list[list[Sample]]]:
        """What the teacher says: for each step as many answers as the student gave, up to so many tokens in all."""
        branch, parts = Branch("teacher"), list[list[Sample]]()
        assert self.student is not None and self.teacher is not None
        engine = NativeEngine(self.teacher, self.config.engine, 0)
        episodes = replace(self.episodes(engine, self.student), label="teacher")
        branch.found = await self.evaluate(episodes, "teacher")
        stages = GroupStages(self.config.algorithm, self.config.sampling.max_tokens)
        began, longest, left = time.monotonic(), 0.0, tokens
        for step in range(1, steps + 1):
            start = time.monotonic()
            samples = [s for c in stages.candidates(await self.groups(episodes, step)) for s in c.samples]
            taken = [
                s
                for s, total in zip(samples, np.cumsum([s.loss_tokens for s in samples]), strict=True)
                if total <= left
            ]
            left -= sum(s.loss_tokens for s in taken)
            parts += [taken] if taken else []
            longest = max(longest, time.monotonic() - start)
            if left <= 0 or len(taken) < len(samples) or self.clock.over("answers", longest):
                break
        branch.tokens, branch.seconds = tokens - left, time.monotonic() - began
        self.clock.say(f"the teacher gave {branch.tokens:,} tokens for {len(parts)} steps")
        await engine.close()
        self.student = self.teacher = None
        return branch, parts

    async def fine_tune(self, parts: Sequence[Sequence[Sample]], lr: float) -> Branch:
        branch = Branch("sft")
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
            self.clock.say(f"sft {step}: loss {totals['loss']:.4f}  {time.monotonic() - start:.1f} s")
            if self.clock.over("sft", longest):
                break
        branch.seconds = time.monotonic() - began
        engine = NativeEngine(student, self.config.engine, 0)
        branch.found = await self.evaluate(self.episodes(engine, student), "fine-tuned student")
        await engine.close()
        await trainer.close()
        return branch


def response_tokens(groups: Sequence[Group]) -> int:
    return sum(r.response_length for g in groups for r in g.rollouts)


def learning(learnt: Learnt) -> str:
    keys = ("teacher_kl", "teacher_agreement", "teacher_divergence", "entropy")
    return "  ".join(f"{key} {learnt.numbers[key]:.4f}" for key in keys if key in learnt.numbers)


def release() -> None:
    """The models of a branch that is over."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(branches: Sequence[Branch]) -> str:
    lines = [
        f"{'':10} {'steps':>5} {'tokens':>10} {'seconds':>8} {'accuracy':>9}  95 % interval   {'length':>6} cut off"
    ]
    for b in branches:
        assert b.found is not None
        e = b.found
        lines.append(
            f"{b.name:10} {b.steps or '–':>5} {b.tokens or '–':>10} {b.seconds:8.0f} {e.avg.mean:9.3f}  "
            f"{e.avg.low:.3f}–{e.avg.high:.3f}     {e.length:6.0f} {e.truncated:6.0%}"
        )
    return "\n".join(lines)


async def bench(a: argparse.Namespace, config: DistilConfig, clock: Clock) -> None:
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(make_pool(config))
        runs = Bench(config, clock, pool)
        before, distilled = await runs.distil()
        release()
        teacher, parts = await runs.answers(distilled.steps, distilled.tokens)
        release()
        tuned = await runs.fine_tune(parts, a.sft_lr or a.lr)
    print(f"\n{config.method.teacher} into {config.model.path}, {config.method.loss}, {clock.passed:.0f} s in all\n")
    print(table([before, distilled, tuned, teacher]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="folder, hub id or short name")
    parser.add_argument("--student", required=True)
    parser.add_argument("--data", default="", help="problems to train on (.jsonl)")
    parser.add_argument("--eval-data", default="", help="held-out problems (.jsonl); without, the last of the data")
    parser.add_argument("--loss", choices=("reverse-kl", "jsd"), default="reverse-kl")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=400.0, help="for everything")
    parser.add_argument("--prompts", type=int, default=32, help="in a step")
    parser.add_argument("--group", type=int, default=4, help="samples of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="longest response")
    parser.add_argument("--eval", type=int, default=200, help="held-out prompts")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--sft-lr", type=float, default=0.0, help="0: the same")
    parser.add_argument("--memory-gb", type=float, default=8.0, help="of the engine's cache")
    parser.add_argument("--workers", type=int, default=4, help="of the verifier")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    clock, config = Clock(a.seconds), make_config(a)
    prepare(config, print)
    asyncio.run(bench(a, config, clock))


if __name__ == "__main__":
    main()
