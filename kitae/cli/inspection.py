"""`kitae show`, `kitae plot`, `kitae replay` and `kitae recipes`."""

from pathlib import Path
from typing import TYPE_CHECKING

from kitae.cli.locate import shipped_recipes, summary
from kitae.errors import StoreError

if TYPE_CHECKING:
    from kitae.store.journal import Journal


def show(run: Path, step: int | None, best: bool, worst: bool, errors: bool, limit: int) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    from kitae.types import GREEDY

    journal = _journal(run)
    rows = list(journal.samples())
    if not rows:
        raise StoreError(f"{run} has no finished step yet")
    last = max(r[2] for r in rows)
    if errors:
        rows = [r for r in rows if r[3] is None]
    elif best or worst:
        judged = [(*r[:3], r[3]) for r in rows if r[3] is not None]
        rows = [*sorted(judged, key=lambda r: (r[3] if worst else -r[3], -r[2]))]
    if step is not None or not (errors or best or worst):
        wanted = last if step is None else step
        rows = [r for r in rows if r[2] == wanted]
        if not rows and not errors:
            raise StoreError(f"step {wanted} has no samples; the last step with samples is {last}")
    if not rows:
        print("every answer could be judged")
    console = Console()
    for group, sample, at, value in rows[:limit]:
        prompt = journal.prompt(group)
        rollout = next(r for r in journal.rollouts(group) if r.index == sample)
        assert prompt is not None and rollout.score is not None
        body = Text()
        body.append(f"{prompt.messages[-1].role}: ", style="bold").append(prompt.messages[-1].content + "\n")
        body.append("answer: ", style="bold").append(rollout.text + "\n")
        body.append("reference: ", style="bold").append(str(prompt.reference))
        if rollout.score.detail:
            body.append("\nverifier: ", style="bold").append(rollout.score.detail)
        reward = "not judged" if value is None else f"reward {value:g}"
        which = "greedy" if sample == GREEDY else f"sample {sample}"
        title = Text(f"step {at} · {prompt.id} · {which} · {reward} · {rollout.finish}")
        colour = "yellow" if value is None else "green" if value >= 1 else "red"
        console.print(Panel(body, title=title, title_align="left", border_style=colour))
    journal.close()


def plot(run: Path, output: Path | None) -> None:
    from kitae.observe.plots import plot_run

    print(plot_run(run, output))


def replay(run: Path, step: int) -> None:
    from kitae.pipeline.replay import replay as compute

    found = compute(run, step, print)
    print(f"{'':16} {'logged':>14} {'again':>14} {'difference':>12}")
    for name, (then, now) in found.numbers.items():
        print(f"{name:16} {then:14.8g} {now:14.8g} {abs(then - now):12.3g}")
    print(f"step {step}, from the checkpoint of step {found.checkpoint}: largest difference {found.difference:.3g}")


def timeline(run: Path) -> None:
    from kitae.observe.timeline import busy_shares, draw, read

    picture = draw(run)
    for part, share in busy_shares(read(run)).items():
        print(f"{part:10} at work {share:6.1%} of the time")
    print(picture)


def recipes() -> None:
    for recipe in shipped_recipes():
        print(f"{recipe.stem:14} {summary(recipe)}")
    print("\ntrain one with: kitae train NAME [section.key=value …]")


def _journal(run: Path) -> "Journal":
    from kitae.store.journal import Journal

    path = run / "journal.sqlite"
    if not path.is_file():
        raise StoreError(f"{run} is not a run folder: it has no journal.sqlite")
    return Journal(path, read_only=True)
