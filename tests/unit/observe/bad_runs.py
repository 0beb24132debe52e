"""Make runs that go wrong, for real, and keep what the rules of the diagnosis look at.

    python bad_runs.py                     make all of them anew: a random tiny model each, some minutes together
    python bad_runs.py all-wrong …         make some
    python bad_runs.py --keep RUN NAME COMMAND…    keep what there is of a run that this command has made

Each is tests/data/diagnosis/NAME.json: the command, and what `kitae.observe.diagnosis.see` saw of the run.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kitae.config.recipe import load_config
from kitae.errors import KitaeError
from kitae.observe.diagnosis import see
from kitae.observe.diagnosis.base import Reply, Row, Seen
from kitae.observe.timeline import Period, union

HERE = Path(__file__).parent
DATA = HERE.parents[1] / "data" / "diagnosis"
TOY = HERE.parents[1] / "integration" / "toy.toml"

KEPT = {
    *("step", "kind", "reward", "reward_std", "length", "truncated", "rollouts", "groups", "groups_dropped"),
    *("groups_with_signal", "errors", "error_share", "first_error", "staleness", "staleness_max", "overdue"),
    *("engine_restarts", "entropy", "clip_high", "clip_low", "clip_dual", "logp_gap", "mismatch_max", "ess", "kl_k3"),
    *("kl_per_response", "loss", "grad_norm", "skipped_updates", "critic_skipped_updates", "updates", "step_seconds"),
    *("hold_seconds", "sync_seconds", "save_seconds", "evaluate_seconds", "other_seconds", "trainer_idle"),
    *("engine_idle", "memory_share", "device_memory_share", "margin", "accuracy"),
}
"""The metrics that rules look at."""

DIGITS = "sum(c.isdigit() for c in response) / max(1, len(response))"
ALWAYS = ("verifier.check_gold=false", "eval.prompts=0")


@dataclass(frozen=True)
class Bad:
    """How a run is spoilt. score: the body of its score function, which has `response`, `reference`, `context`. keeps:
    what is kept beside metrics and console."""

    score: str
    settings: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    gate: str = ""
    train: Sequence[int] = ()  # numbers to ask for, in files of their own, instead of the task
    test: Sequence[int] = ()


BAD = {
    "lr-too-low": Bad(f"return {DIGITS}", (*ALWAYS, "training.lr=1e-9", "training.steps=30")),
    "nothing-learnt": Bad(
        "import zlib; return float(zlib.crc32((response + str(reference)).encode()) % 2)",
        (*ALWAYS, "training.steps=40", "training.lr=1e-2"),
    ),
    "entropy-collapse": Bad(
        "return 0.5 * float(response[:1] == '7') + 0.2 * float(reference in response)",
        (*ALWAYS, "training.lr=2e-2", "training.steps=40", "sampling.max_tokens=3"),
    ),
    "kl-runaway": Bad(
        f"return {DIGITS}",
        (*ALWAYS, "training.lr=2e-2", "algorithm.kl.coef=1e-6", "algorithm.reference=frozen", "training.steps=30"),
    ),
    "gradient-growth": Bad(
        f"share = {DIGITS}; return share if share < 0.7 else 1000 * share",
        (*ALWAYS, "training.steps=36", "training.lr=1e-3", "algorithm.advantage=group-centred"),
    ),
    "skipped-updates": Bad(
        f"return {DIGITS}",
        (*ALWAYS, "training.steps=8"),
        gate="return -tokens.advantage_N * ratio_N * (tokens.logp_N - tokens.logp_N) / 0.0",
    ),
    "clipped": Bad(
        f"return {DIGITS}",
        (*ALWAYS, "training.epochs=6", "training.minibatches=2", "training.lr=2e-2", "training.steps=10"),
    ),
    "all-wrong": Bad("return 0.0", (*ALWAYS, "training.steps=8")),
    "all-right": Bad("return 1.0", (*ALWAYS, "training.steps=8")),
    "dead-groups": Bad("return float(len(str(reference)) % 2)", (*ALWAYS, "training.steps=8")),
    "no-updates": Bad(
        "return float(len(str(reference)) % 2)", (*ALWAYS, "training.steps=8", "algorithm.filter=zero-variance")
    ),
    "truncation": Bad(f"return {DIGITS}", (*ALWAYS, "sampling.max_tokens=2", "training.steps=8")),
    "short-answers": Bad(
        "return 1.0 / (1 + len(response))",
        (*ALWAYS, "sampling.max_tokens=64", "training.lr=2e-3", "training.steps=30"),
    ),
    "held-out-flat": Bad(
        f"return {DIGITS} if int(reference) < 100 else 0.0",
        ("verifier.check_gold=false", "eval.prompts=16", "training.lr=1e-2", "training.steps=30"),
        train=range(16),
        test=range(100, 116),
    ),
    "components-diverge": Bad(
        "digits = sum(c.isdigit() for c in response) / max(1, len(response))\n"
        "    letters = sum(c.isalpha() for c in response) / max(1, len(response))\n"
        "    return {'score': digits + 0.2 * letters, 'digits': digits, 'letters': letters}",
        (*ALWAYS, "training.steps=30"),
    ),
    "same-answer": Bad(
        "return response.count('1') / 3",
        (*ALWAYS, "sampling.max_tokens=3", "training.lr=2e-2", "training.steps=60"),
        ("answers",),
    ),
    "repetition": Bad(
        "return response.count('1') / max(1, len(response))",
        (*ALWAYS, "sampling.max_tokens=256", "training.lr=2e-2", "training.steps=40", "training.group_size=4"),
        ("answers",),
    ),
    "importance-weights": Bad(
        f"return {DIGITS}",
        (*ALWAYS, "pipeline.max_staleness=4", "training.lr=5e-2", "training.steps=14"),
    ),
    "staleness": Bad(
        f"return {DIGITS}",
        (*ALWAYS, "pipeline.max_staleness=4", "training.lr=1e-2", "training.steps=14"),
    ),
    "verifier-errors": Bad(
        f"assert len(response) % 3, 'the service is down'; return {DIGITS}",
        (*ALWAYS, "verifier.max_error_share=1", "training.steps=8"),
    ),
    "slow-checks": Bad(f"import time; time.sleep(0.05); return {DIGITS}", (*ALWAYS, "training.steps=8"), ("timeline",)),
    "idle": Bad(
        f"return {DIGITS}",
        ("verifier.check_gold=false", "eval.every=1", "eval.prompts=64", "checkpoint.every=1", "training.steps=12"),
    ),
    "crashed": Bad(f"assert len(response) < 0, 'no such service'; return {DIGITS}", (*ALWAYS, "training.steps=4")),
}


def make(name: str, folder: Path) -> tuple[Path, str]:
    """The run folder, and the command that makes such a one."""
    from kitae import api
    from kitae.cli.screen import Screen  # what the command line does with a run, its console log included

    bad = BAD[name]
    own = folder / "own.py"
    own.write_text(f"def score(response, reference, context):\n    {bad.score}\n")
    settings = [f"verifier.name={own}:score", *bad.settings, f"run.dir={folder}", "run.name=bad"]
    if bad.gate:
        own.write_text(f"{own.read_text()}\n\ndef gate(ratio_N, tokens):\n    {bad.gate}\n")
        settings.append(f"algorithm.gate={own}:gate")
    recipe = folder / "toy.toml"
    recipe.write_text(
        TOY.read_text().replace('task = "arithmetic"', _files(bad, folder)) if bad.train else TOY.read_text()
    )
    config = load_config(recipe, settings)
    try:
        with Screen() as screen:
            api.train(config, observer=screen)
    except KitaeError as error:
        print(f"{name}: {error}")
    shown = " ".join(s for s in settings if not s.startswith("run."))
    return folder / "bad-001", f"kitae train tests/integration/toy.toml {shown}".replace(str(folder), "FOLDER")


def _files(bad: Bad, folder: Path) -> str:
    """Own prompts as the data of a recipe."""
    for name, numbers in (("train", bad.train), ("test", bad.test)):
        lines = [json.dumps({"question": f"Say {n}", "answer": str(n)}) for n in numbers]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return f'path = "{folder / "train.jsonl"}"\neval_path = "{folder / "test.jsonl"}"'


def keep(run: Path, name: str, command: str, keeps: tuple[str, ...] = ()) -> None:
    seen = see(run)
    kept = replace(
        seen,
        timeline=_joined(seen.timeline) if "timeline" in keeps else (),
        answers=[replace(a, text=a.text[:300]) for a in seen.answers] if "answers" in keeps else (),
        steps=[{k: v for k, v in row.items() if k in KEPT or k.startswith("reward/")} for row in seen.steps],
        settings={k: v for k, v in seen.settings.items() if v is not None and not str(v).startswith("/")},
        console=[line.replace(str(run.parent), "FOLDER") for line in seen.console if "  step " not in line],
    )
    DATA.mkdir(exist_ok=True)
    (DATA / f"{name}.json").write_text(json.dumps({"command": command, **_short(asdict(kept))}, indent=None) + "\n")


def _joined(timeline: Sequence[Row]) -> list[Row]:
    """Overlapping spans of one part as one."""
    parts: dict[str, list[Period]] = {}
    for row in timeline:
        parts.setdefault(row["part"], []).append((round(row["start"], 2), round(row["end"], 2)))
    return [{"part": part, "start": a, "end": b} for part, spans in parts.items() for a, b in union(spans)]


def kept(name: str) -> Seen:
    """A run as it was seen."""
    data = json.loads((DATA / f"{name}.json").read_text())
    del data["command"]
    return Seen(**{**data, "answers": [Reply(**a) for a in data["answers"]]})


def _short(value: Any) -> Any:
    """Numbers with five digits: nobody needs the others here."""
    if isinstance(value, Mapping):
        return {k: _short(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_short(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main(names: list[str]) -> None:
    if names[:1] == ["--keep"]:
        keep(Path(names[1]), names[2], " ".join(names[3:]), ("answers", "timeline"))
        return
    for name in names or BAD:
        with tempfile.TemporaryDirectory() as folder:
            run, command = make(name, Path(folder))
            keep(run, name, command, BAD[name].keeps)
            print(f"{name}: {(DATA / f'{name}.json').stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
