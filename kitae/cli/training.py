"""`kitae train` and `kitae resume`."""

import signal
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitae.cli.locate import find_recipe
from kitae.cli.text import as_size
from kitae.config.load import load_config
from kitae.config.root import Root
from kitae.errors import Interrupted, KitaeError, StoreError
from kitae.observe.console import Console

if TYPE_CHECKING:
    from kitae.stages.start import Start
    from kitae.store.run import RunStore

Evaluated = dict[str, Any] | None


def train(recipe: str, overrides: list[str], dry_run: bool, full: bool) -> None:
    from kitae.stages.start import check

    config = load_config(find_recipe(recipe), overrides)
    check(config)
    if dry_run:
        from kitae.cli.preview import preview

        preview(config, full)
        return
    console = Console()
    from kitae.stages.start import prepare
    from kitae.store.run import RunStore

    config, start = prepare(config, console.say)

    _run(RunStore.create(config), start, console)


def resume(run: Path, overrides: list[str], checkpoint: str | None, forget: bool) -> None:
    from kitae.stages.start import prepare
    from kitae.store.run import RunStore

    console = Console()
    store = RunStore.open(run, overrides)
    try:
        if checkpoint is None and _is_finished(run, store.config):
            store.close()
            return
        _, start = prepare(store.config, console.say)
    except BaseException:
        store.close()
        raise
    _run(store, start, console, checkpoint, forget)


def _is_finished(run: Path, config: Root) -> bool:
    """Whether nothing is left to do, which is said; what cannot go on is refused."""
    from kitae.store.look import look

    seen = look(run)
    if not (seen.is_finished and seen.has_model):
        return False
    if seen.step == config.training.steps:
        print(f"{run} is finished: {seen.step} of {config.training.steps} steps; its model is {run / 'model'}")
        print(f"train it further with: kitae resume {run} training.steps={2 * seen.step}")
        return True
    if not seen.checkpoints:
        raise StoreError(
            f"{run} cannot go on: its checkpoints were removed. Start a new run from its model with: kitae train "
            f"RECIPE model.path={run} (or train all of its steps again, from its journal, with --from start)"
        )
    return False


def _run(
    store: "RunStore", start: "Start", console: Console, checkpoint: str | None = None, forget: bool = False
) -> None:
    from kitae.observe.progress import make_progress

    folder, config = store.folder, store.config
    with console.attached(folder):
        try:
            with make_progress(config, folder, console.log) as progress:
                result = start(store, progress, checkpoint, forget)
        except KitaeError as error:
            console.log(f"error: {error}")
            raise type(error)(f"{error}\nthe run folder is {folder}; go on with: kitae resume {folder}") from error
        except KeyboardInterrupt:
            console.log("interrupted")
            raise Interrupted(f"interrupted; go on with: kitae resume {folder}", signal.SIGINT) from None
        except BaseException:
            console.log(traceback.format_exc())
            raise
        if result.stopped_by is not None:
            message = f"stopped after step {result.step}; everything is saved. Go on with:\n    kitae resume {folder}"
            console.log(message)
            raise Interrupted(message, result.stopped_by)
        _report(folder, config.measure, result.before, result.after, console)


def _report(folder: Path, measure: str, before: Evaluated, after: Evaluated, console: Console) -> None:
    from kitae.observe.progress import peak_memory_gb
    from kitae.store.look import look, size_of

    try:
        from kitae.observe.plots import plot_run

        picture = str(plot_run(folder))
    except ImportError:
        picture = "needs matplotlib: pip install 'kitae[plots]'"
    lines = []
    if before and after and None not in (before["avg"], after["avg"]):
        rise = after["avg"] - before["avg"]
        of, count = ("prompts", after["prompts"]) if "prompts" in after else ("examples", after["examples"])
        what = "score" if before.get("partial") or after.get("partial") else measure
        lines.append(
            f"{f'held-out {what}':18} {before['avg']:.3f} → {after['avg']:.3f}  ({rise:+.3f}; "
            f"{int(count)} {of}, 95 % interval {after['avg_low']:.3f}–{after['avg_high']:.3f})"
        )
    lines += [
        f"peak memory        {peak_memory_gb():.1f} GB",
        f"disk               {as_size(look(folder).size)}, {as_size(size_of(folder / 'checkpoints'))} of it "
        f"checkpoints (kitae clean {folder})",
        f"run folder         {folder}",
        f"curves             {picture}",
        f"trained model      {folder / 'model'}",
    ]
    if (look(folder).steps or [{}])[-1].get("reward") is not None:
        lines.append(f"next               kitae show {folder} --worst     (what it still gets wrong)")
    print()
    console.say("\n".join(lines))
