"""Credit by turn beside credit by episode, on three games of several turns: how many steps until they are won.

    python benchmarks/turn_credit.py [--games keys,lake,guess] [--seeds 3] [--steps 60] [--folder runs/turns]

The model is the tiny random one, which first learns from random games how a move is written (SFT), and then plays: the
same start, settings and seeds for each method, on a CPU. Runs that are finished already are not repeated. Prints a
table, and writes docs/turn_credit.csv and docs/turn_credit.png: the reward of sampled games by step. A game is learnt
at the first of five steps whose mean is at least 0.8 (guess: 0.6).
"""

import argparse
import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

import kitae
from kitae.envs.games.game_world import OWN

ROOT = Path(__file__).parent.parent
GAMES: dict[str, dict[str, Any]] = {
    "keys": {"options": {"moves": 10}, "words": ["l", "r"], "learnt": 0.8},
    "lake": {"options": {"map": ["S..", ".H.", "..G"], "moves": 10}, "words": ["l", "r", "u", "d"], "learnt": 0.8},
    "guess": {"options": {"high": 7, "guesses": 3}, "words": list("1234567"), "learnt": 0.6},
}
METHODS = {"episode (grpo)": "grpo", "turn (gigpo)": "gigpo"}
WINDOW = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", default=",".join(GAMES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=Path("runs/turns"))
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    a = parser.parse_args()
    found: dict[tuple[str, str], list[list[float]]] = {(g, label): [] for g in a.games.split(",") for label in METHODS}
    for game in a.games.split(","):
        start = beginner(game, a.folder)
        for seed in range(a.seeds):
            for label, preset in METHODS.items():
                found[game, label].append(rewards(game, preset, seed, start, a.steps, a.folder))
    print_table(found)
    write(found, a.docs)


def beginner(game: str, folder: Path) -> Path:
    """A model that plays at random: SFT on games of random moves."""
    if not (found := sorted(folder.glob(f"{game}-beginner-*/model"))):
        rows = folder / f"{game}.jsonl"
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.write_text("".join(json.dumps({"messages": random_game(game, seed)}) + "\n" for seed in range(600)))
        settings = [
            "method.kind=sft", "model.path=tiny", f"data.path={rows}", "training.batch=16", "training.lr=3e-3",
            "eval.examples=0", f"run.dir={folder}", f"run.name={game}-beginner",
        ]  # fmt: skip
        return kitae.train({}, overrides=settings, quiet=True).folder
    return found[-1].parent


def random_game(game: str, seed: int) -> list[dict[str, str]]:
    draw, about = random.Random(seed), GAMES[game]
    player = OWN[game](seed, about["options"])
    talk = [{"role": "user", "content": player.start()}]
    while True:
        word = draw.choice(about["words"])
        move = player.move(word)
        talk += [{"role": "assistant", "content": word}]
        if move.done:
            return talk
        talk += [{"role": "user", "content": move.text}]


def rewards(game: str, preset: str, seed: int, start: Path, steps: int, folder: Path) -> list[float]:
    """The mean reward of each step of one run."""
    name = f"{game}-{preset}-{seed}"
    for path in folder.glob(f"{name}-[0-9]*/metrics.jsonl"):
        if len(known := _read(path)) >= steps:
            return known[:steps]
    params = {"game": game, "options": GAMES[game]["options"]}
    run = kitae.train(
        {"data": {"task": "episodes"}, "env": {"name": "games", "turns": 16, "params": params}},
        overrides=[
            f"model.path={start}",
            "verifier.check_gold=false",
            "sampling.max_tokens=64",
            f"algorithm.preset={preset}",
            f"training.steps={steps}",
            "training.prompts_per_step=4",
            "training.group_size=8",
            "training.lr=1e-3",
            "eval.prompts=0",
            "checkpoint.every=1000",
            "engine.memory_gb=0.1",
            f"run.seed={seed}",
            f"run.dir={folder}",
            f"run.name={name}",
        ],
        quiet=True,
    )
    return _read(run.folder / "metrics.jsonl")


def _read(path: Path) -> list[float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [row["reward"] for row in rows if row.get("kind") == "step"]


def learnt_at(curve: list[float], least: float) -> int | None:
    means = np.convolve(curve, np.ones(WINDOW) / WINDOW, "valid")
    return next((step + 1 for step, mean in enumerate(means) if mean >= least), None)


def print_table(found: dict[tuple[str, str], list[list[float]]]) -> None:
    print("| game | credit by | learnt at step, by seed | reward, first step | last five |\n|---|---|---|---:|---:|")
    for (game, label), curves in found.items():
        steps = ", ".join(str(learnt_at(c, GAMES[game]["learnt"]) or "–") for c in curves)
        first, last = (np.mean([np.mean(c[part]) for c in curves]) for part in (slice(1), slice(-WINDOW, None)))
        print(f"| {game} | {label} | {steps} | {first:.2f} | {last:.2f} |")


def write(found: dict[tuple[str, str], list[list[float]]], docs: Path) -> None:
    with (docs / "turn_credit.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["game", "credit", "seed", "step", "reward"])
        for (game, label), curves in found.items():
            for seed, curve in enumerate(curves):
                rows.writerows([game, label, seed, step + 1, round(r, 4)] for step, r in enumerate(curve))
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    games = list(dict.fromkeys(game for game, _ in found))
    figure, axes = plt.subplots(1, len(games), figsize=(4 * len(games), 3), squeeze=False)
    for axis, game in zip(axes[0], games, strict=True):
        for label in METHODS:
            runs = np.array([np.convolve(c, np.ones(WINDOW) / WINDOW, "valid") for c in found[game, label]])
            axis.plot(range(1, runs.shape[1] + 1), runs.mean(0), label=label)
            axis.fill_between(range(1, runs.shape[1] + 1), runs.min(0), runs.max(0), alpha=0.2)
        axis.set(title=game, xlabel="step", ylabel="reward, mean of five steps", ylim=(0, 1))
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(docs / "turn_credit.png", dpi=120)


if __name__ == "__main__":
    main()
