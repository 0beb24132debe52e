"""Damage to a run that was killed: it is harmless, it is mended, or it is named; never used in silence.

    PYTHONPATH=tests python tests/integration/damage.py [--trials 1000] [--first 0] [--seconds S] [--folder DIR]

Small runs of different kinds (`KINDS`) are killed, and trained to their ends too, when the first trial asks for them. A
trial copies a killed run and its model, damages one file (`DAMAGES`), and resumes it in a forked process, which has all
imports. Half of the trials draw the file from all alike, half by size. Everything follows from the seed. A trial ends
in one of these ways, and everything else is a failure:

    same       the weights are those of the run that was never killed
    mended     the same, and the damage was named
    refused    exit status 1 and a message, and the way out that it names (if it is one of `kitae resume`) works
"""

import argparse
import asyncio
import contextlib
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fault_plans import AGENTS, OFFLINE, write_rows
from harness import run_config, toy_config
from safetensors.torch import load_file
from warm_starts import POSTS, VERIFIERS, Server, context

KINDS = {
    "on policy": (),
    "lora and reference": ("model.lora_rank=2", "algorithm.kl.coef=0.1", "algorithm.reference=frozen"),
    "dpo": (),
    "sft": (),
    "critic": ("algorithm.preset=ppo", "algorithm.critic.warmup=1"),
    "agents": (*AGENTS, "verifier.max_error_share=1"),
    "teacher": ("method.kind=distil",),
    "spread": ("cluster.backend=local", "cluster.ranks=2", "engine.count=1"),
    "kto": (),
    "reward": (),
    "distil-file": (),
    "two ranks": ("cluster.backend=local", "cluster.ranks=2"),
}
"""Runs, with the settings that they have beside others."""
FILES = {"two ranks": "sft"} | {name: name for name in OFFLINE}
"""Those that learn from a file, with their methods."""
DAMAGES = ("flip", "flip", "flip", "flip", "flip", "flip", "truncate", "append", "delete", "zero", "exchange")
GIVEN = (".lock", "train.jsonl", "held_out.jsonl")  # data is compared by fingerprints, and is the affair of its owner
RL = (
    "training.steps=5", "training.prompts_per_step=2", "training.group_size=2", "checkpoint.every=2",
    "checkpoint.keep=2", "eval.prompts=0", "sampling.max_tokens=5", "verifier.check_gold=false",
)  # fmt: skip


class Crash(BaseException):
    pass


@contextlib.contextmanager
def crashing(step: int) -> Iterator[None]:
    """When this step is about to be learnt, as if killed: nothing else is written."""
    from kitae.offline.loop import OfflineLoop
    from kitae.trainer.learner import Learner

    def failing(learn: Any) -> Any:
        async def fail(self: Any, now: int, *arguments: Any, **settings: Any) -> Any:
            if now == step:
                os._exit(9)
            return await learn(self, now, *arguments, **settings)

        return fail

    Learner.learn, OfflineLoop._learn = failing(Learner.learn), failing(OfflineLoop._learn)  # type: ignore[method-assign]
    yield


def _config(kind: str, folder: Path, seed: int) -> Any:
    from kitae.config.recipe import override_config, parse_config
    from kitae.models.tiny import make_tiny

    more = [f"model.path={folder / 'base'}", *KINDS[kind]]
    if kind in ("teacher", "distil-file") and not (folder / "teacher").exists():
        make_tiny(folder / "teacher", seed=11, hidden=32)
    more += [f"method.teacher={folder / 'teacher'}"] * (kind in ("teacher", "distil-file"))
    if kind not in FILES:
        return toy_config(folder, *RL, f"run.seed={seed}", *more)
    write_rows(FILES[kind], folder)
    values: dict[str, Any] = {
        "run": {"name": "toy", "dir": str(folder), "seed": seed},
        "method": {"kind": FILES[kind], **({"teacher": str(folder / "teacher")} if kind == "distil-file" else {})},
        "model": {"path": "tiny", "device": "cpu", "dtype": "float32"},
        "data": {"path": str(folder / "train.jsonl")},
        "training": {"lr": 1e-3, "batch": 2, "steps": 5},
        "checkpoint": {"every": 2, "keep": 2},
        "eval": {"examples": 0},
    }
    return override_config(parse_config(values), more)


def _make(kind: str, folder: str, seed: int, killed_at: int) -> None:
    from kitae.models.load import find_model

    _fork_what_is_started()
    found = find_model("tiny")
    assert found is not None
    place = Path(folder)
    if not (place / "base").exists():
        shutil.copytree(found, place / "base")
    with crashing(killed_at) if killed_at else contextlib.nullcontext():
        run_config(_config(kind, place, seed))


def _fork_what_is_started() -> None:
    """Workers of this process begin with their imports done."""
    torch.set_num_threads(1)
    warm = Server.forked().instead_of(asyncio.create_subprocess_exec, POSTS + VERIFIERS)
    asyncio.create_subprocess_exec = warm  # type: ignore[assignment]


def _in_child(target: Any, *arguments: Any) -> int:
    process = context().Process(target=target, args=arguments)
    process.start()
    process.join(240)
    if process.exitcode is None:
        process.kill()
        return -1
    return int(process.exitcode)


class Made:
    """The killed runs, a twin of each with another seed, and the weights that they lead to."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.place = home / "here"  # where each trial is, one after the other: settings have absolute paths
        self._weights: dict[str, dict[str, torch.Tensor]] = {}

    def weights(self, kind: str) -> dict[str, torch.Tensor]:
        """Those that a run of this kind leads to; the first to ask waits until the runs are made."""
        if kind not in self._weights:
            for name, seed, killed_at in (("whole", 1, 0), ("killed", 1, 4), ("twin", 2, 4)):
                if self.folder(kind, name).exists():
                    continue
                self.place.mkdir()
                code = _in_child(_make, kind, str(self.place), seed, killed_at)
                assert code == (9 if killed_at else 0), (kind, name, code)
                self.place.rename(self.folder(kind, name))
            self._weights[kind] = _weights(self.folder(kind, "whole") / "toy-001")
        return self._weights[kind]

    def folder(self, kind: str, name: str) -> Path:
        return self.home / f"{kind}-{name}".replace(" ", "-")


@cache
def made(home: Path | None = None) -> Made:
    """In a folder of its own, unless told where runs are kept for later trials."""
    if home is not None:
        shutil.rmtree(home / "here", ignore_errors=True)  # of trials that were ended
    return Made(home or Path(tempfile.mkdtemp(prefix="kitae-trial-")))


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next((run / "model").glob("*.safetensors")))


def _resume(run: str, arguments: list[str], output: str) -> None:
    """The command line."""
    from kitae.cli.main import run as kitae

    _fork_what_is_started()
    sys.argv = ["kitae", "resume", run, *arguments]
    with open(output, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            kitae()
        except SystemExit:
            raise
        except BaseException:
            traceback.print_exc()
            file.flush()
            os._exit(99)


class Trial:
    def __init__(self, seed: int, home: Path | None = None) -> None:
        self.made = made(home)
        self.rng = random.Random(f"damage {seed}")
        self.seed, self.kind = seed, list(KINDS)[seed % len(KINDS)]

    def __call__(self) -> str:
        """How it ended; raises `AssertionError` on what must not be."""
        self.expected = self.made.weights(self.kind)
        self.place = shutil.copytree(self.made.folder(self.kind, "killed"), self.made.place)
        try:
            self.what = self._damage()
            return self._judge()
        finally:
            shutil.rmtree(self.place)

    def _damage(self) -> str:
        files = [p for p in sorted(self.place.rglob("*")) if p.is_file() and p.name not in GIVEN]
        sizes = [p.stat().st_size for p in files]
        weights = sizes if self.rng.random() < 0.5 else [min(1, size) for size in sizes]
        path = self.rng.choices(files, weights)[0]
        how, content = self.rng.choice(DAMAGES), bytearray(path.read_bytes())
        at = self.rng.randrange(len(content))
        if how == "flip":
            content[at] ^= 1 << self.rng.randrange(8)
        elif how == "truncate":
            del content[at:]
        elif how == "append":
            content += self.rng.randbytes(self.rng.choice([1, 7, 4096]))
        elif how == "zero":
            content[at : at + 512] = bytes(len(content[at : at + 512]))
        elif how == "exchange":
            twin = self.made.folder(self.kind, "twin") / path.relative_to(self.place)
            content = bytearray(twin.read_bytes()) if twin.exists() else content
        path.write_bytes(content)
        if how == "delete":
            path.unlink()
        return f"{how} {path.relative_to(self.place)} at {at}"

    def _judge(self) -> str:
        run, output = self.place / "toy-001", self.place / "output.txt"
        code = _in_child(_resume, str(run), [], str(output))
        said = output.read_text(errors="replace")
        self.said = said
        assert code != 99 and "Traceback" not in said, self._say("a traceback")
        assert code in (0, 1), self._say(f"exit status {code}")
        if code == 1:
            assert "error: " in said, self._say("no message")
            if way := re.search(r"--from (step-\d+|start)( --forget)?", said):
                arguments = ["--from", way[1], *(["--forget"] if way[2] else [])]
                code = _in_child(_resume, str(run), arguments, str(output))
                self.said += output.read_text(errors="replace")
                if code:
                    assert code == 1 and "Traceback" not in self.said, self._say("the way out fails")
                    return "refused, its way out too"
                if "the models must be" in said:
                    return "refused, its way out trains on the other model"
                assert self._is_same(), self._say("the way out leads elsewhere")
                return "refused, its way out works"
            return "refused"
        if self._is_same():
            return "mended" if "damage" in said or "sampled again" in said else "same"
        assert "changed for this run" in said, self._say("used in silence")
        return "taken for a change of settings, and said"

    def _is_same(self) -> bool:
        ours, theirs = _weights(self.place / "toy-001"), self.expected
        return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)

    def _say(self, problem: str) -> str:
        return f"trial {self.seed} ({self.kind}; {self.what}): {problem}\n{self.said[-3000:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no trial after so long")
    parser.add_argument("--folder", type=Path, help="where the runs are, or are made and stay")
    arguments = parser.parse_args()
    found: Counter[str] = Counter()
    ends = time.monotonic() + arguments.seconds
    try:
        for seed in range(arguments.first, arguments.first + arguments.trials):
            if time.monotonic() > ends:
                break
            try:
                ended = Trial(seed, arguments.folder)()
            except AssertionError as error:
                ended = "FAILED"
                print(error, file=sys.stderr, flush=True)
            found[ended] += 1
    finally:
        if arguments.folder is None:
            shutil.rmtree(made().home)
    print(
        f"{found.total()} trials from seed {arguments.first}: {', '.join(f'{n} x {k}' for k, n in found.most_common())}"
    )
    sys.exit(found["FAILED"] > 0)


if __name__ == "__main__":
    main()
