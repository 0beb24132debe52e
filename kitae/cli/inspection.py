"""`kitae plot`, `kitae replay` and `kitae recipes`."""

from pathlib import Path

from kitae.cli.text import table
from kitae.config.locate import shipped_chains, shipped_recipes, summary
from kitae.config.measured import by_hardware, measurements, told
from kitae.errors import StoreError


def plot(run: Path, output: Path | None) -> None:
    from kitae.observe.plots import plot_run

    print(plot_run(run, output))


def replay(run: Path, step: int | None) -> None:
    from kitae.store.run_summary import look

    wanted = look(run).step if step is None else step
    if wanted == 0:
        raise StoreError(f"{run} has no finished step to replay")
    from kitae.run.recompute_step import replay as compute

    found = compute(run, wanted, print)
    rows = [["", "logged", "again", "difference"]]
    rows += [[n, f"{then:.8g}", f"{now:.8g}", f"{abs(then - now):.3g}"] for n, (then, now) in found.numbers.items()]
    print(table(rows))
    same = found.difference == 0
    print(f"{'same' if same else 'differs'}: step {wanted}, from the checkpoint of step {found.checkpoint}, "
          f"largest difference {found.difference:.3g}")  # fmt: skip
    if not same:
        raise SystemExit(1)


def timeline(run: Path) -> None:
    from kitae.observe.timeline import busy_shares, draw, read

    picture = draw(run)
    for part, share in busy_shares(read(run)).items():
        print(f"{part:10} at work {share:6.1%} of the time")
    print(picture)


def recipes() -> None:
    for recipe in shipped_recipes():
        print(f"{recipe.stem:18} {summary(recipe)}")
        for runs in by_hardware(measurements(recipe.stem)):
            print(f"{'':18} measured: {told(runs)}")
    print("\ntrain one with: kitae train NAME [section.key=value …]\n")
    for chain in shipped_chains():
        print(f"{chain.stem:18} {summary(chain)}")
    print("\nrun one with: kitae chain NAME")
