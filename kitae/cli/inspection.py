"""`kitae show`, `kitae plot`, `kitae replay` and `kitae recipes`."""

from pathlib import Path
from typing import TYPE_CHECKING

from kitae.cli.text import table
from kitae.config.locate import shipped_chains, shipped_recipes, summary
from kitae.errors import KitaeError, StoreError

if TYPE_CHECKING:
    from kitae.store.journal import Journal
    from kitae.types import Group, Message


def show(run: Path, step: int | None, best: bool, worst: bool, errors: bool, one_per_prompt: bool, limit: int) -> None:
    from kitae.config.root import reinforcement
    from kitae.store.run import read_config

    journal = _journal(run)
    rows = [*journal.samples(), *(journal.unjudged() if errors else ())]
    if not rows:
        if (run / "config.json").is_file():
            reinforcement(read_config(run), "kitae show")
        raise StoreError(f"{run} has no finished step yet: there is nothing to show")
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
    if one_per_prompt:
        first: dict[int, tuple[int, int, int, float | None]] = {}
        for row in rows:
            first.setdefault(row[0], row)
        rows = list(first.values())
    if not rows:
        print("every answer could be judged")
    advantages = _Advantages(run, journal)
    for group, sample, at, value in rows[:limit]:
        _print_sample(journal, group, sample, at, value, advantages.of(group, sample, at))
    if len(rows) > limit:
        print(f"{limit} of {len(rows)} samples; --limit shows more, --one-per-prompt one of each prompt")
    journal.close()


def _print_sample(
    journal: "Journal", group: int, sample: int, step: int, value: float | None, advantage: float | None
) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    from kitae.types import GREEDY

    prompt = journal.prompt(group)
    rollout = next(r for r in journal.rollouts(group) if r.index == sample)
    assert prompt is not None and rollout.score is not None
    failed = rollout.status == "failed"
    said = [(m.role, _spoken(m)) for m in rollout.transcript]
    said = said or [(prompt.messages[-1].role, _spoken(prompt.messages[-1])), ("answer", rollout.text)]
    body = Text()
    for who, text in [*said, ("reference", str(prompt.reference))]:
        body.append(f"{who}: ", style="bold").append(f"{text}\n")
    if rollout.score.detail:
        body.append("failed: " if failed else "verifier: ", style="bold").append(f"{rollout.score.detail}\n")
    turns = sum(s.source == "model" for s in rollout.segments)
    facts = [
        "failed" if failed else "not judged" if value is None else f"reward {value:g}",
        *([] if advantage is None else [f"advantage {advantage:+.2f}"]),
        *([f"{turns} turns"] if turns > 1 else []),
        f"{rollout.response_length} tokens",
        "cut off" if rollout.finish == "length" else rollout.finish,
    ]
    body.append(" · ".join(facts), style="dim")
    title = Text(f"step {step} · {prompt.id} · {'greedy' if sample == GREEDY else f'sample {sample}'}")
    colour = "yellow" if value is None else "green" if value >= 1 else "red"
    Console().print(Panel(body, title=title, title_align="left", border_style=colour))


def _spoken(message: "Message") -> str:
    """What a message says, with the calls of tools in it."""
    parts = [str(part.get("text", f"[{part.get('type')}]")) for part in message.parts] or [message.content]
    calls = [
        f"{c.name}({', '.join(f'{name}={value!r}' for name, value in c.arguments.items())})" for c in message.calls
    ]
    return " ".join(filter(None, [*parts, *calls]))


class _Advantages:
    """What samples were worth to the trainer, worked out again from the journal, a step at a time."""

    def __init__(self, run: Path, journal: "Journal") -> None:
        from kitae.config.root import RLConfig
        from kitae.store.run import read_config

        self._journal = journal
        config = read_config(run) if (run / "config.json").is_file() else None
        self._config = config if isinstance(config, RLConfig) else None
        self._steps: dict[int, dict[tuple[int, int], float]] = {}

    def of(self, group: int, sample: int, step: int) -> float | None:
        """None: it was not trained on, or its advantage cannot be known from the journal alone."""
        if step not in self._steps:
            self._steps[step] = self._compute(step)
        return self._steps[step].get((group, sample))

    def _compute(self, step: int) -> dict[tuple[int, int], float]:
        if self._config is None:
            return {}
        from kitae.algorithms.groups import GroupStages

        try:
            stages = GroupStages(self._config.algorithm, self._config.sampling.max_tokens)
        except KitaeError:  # a stage of the user's own that is not here any more
            return {}
        if stages.wants_values or stages.wants_old or self._config.algorithm.reward_norm == "running":
            return {}
        by_fate: dict[str, list[Group]] = {"trained": [], "dropped": []}
        for group, _, fate, _ in self._journal.groups(step):
            if fate in by_fate:
                by_fate[fate].append(self._journal.group(group))
        candidates = stages.advantages(stages.candidates(by_fate["trained"], by_fate["dropped"]))
        return {(c.group, c.index): float(c.column("advantage").mean()) for c in candidates}


def plot(run: Path, output: Path | None) -> None:
    from kitae.observe.plots import plot_run

    print(plot_run(run, output))


def replay(run: Path, step: int | None) -> None:
    from kitae.store.look import look

    wanted = look(run).step if step is None else step
    if wanted == 0:
        raise StoreError(f"{run} has no finished step to replay")
    from kitae.pipeline.replay import replay as compute

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
        print(f"{recipe.stem:14} {summary(recipe)}")
    print("\ntrain one with: kitae train NAME [section.key=value …]\n")
    for chain in shipped_chains():
        print(f"{chain.stem:14} {summary(chain)}")
    print("\nrun one with: kitae chain NAME")


def _journal(run: Path) -> "Journal":
    from kitae.store.journal import Journal

    path = run / "journal.sqlite"
    if not path.is_file():
        what = "it has no journal.sqlite" if run.exists() else "there is no such folder"
        raise StoreError(f"{run} is not a run folder: {what} (kitae runs lists them)")
    return Journal(path, read_only=True)
