"""What the command line shows of a run, and keeps in RUN/console.log."""

import signal
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kitae.cli.text import as_size
from kitae.config.root import Root
from kitae.errors import Interrupted, KitaeError
from kitae.observe.observer import Observer
from kitae.observe.run_log import Console

if TYPE_CHECKING:
    from kitae.store.run_folder import Result


class Screen:
    """What the user sees of a run; what was seen is kept in RUN/console.log. `with Screen() as screen: …`

    again: the command that goes on with it after a failure, where it is not `kitae resume RUN`.
    """

    def __init__(self, again: str | None = None) -> None:
        self._again = again
        self.config: Root | None = None
        self._console = Console()
        self._attached = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Interrupted):
            self._console.log(str(error))
        self._attached.close()

    def note(self, text: str) -> None:
        self._console.say(text)

    @contextmanager
    def watch(self, config: Root, folder: Path) -> Iterator[Observer]:
        from kitae.observe.progress import make_progress

        self.config = config
        self._attached.close()
        self._attached.enter_context(self._console.attached(folder))
        log, again = self._console.log, self._again or f"kitae resume {folder}"
        try:
            with make_progress(config, folder, log) as progress:
                yield progress
        except KitaeError as error:
            log(f"error: {error}")
            raise type(error)(f"{error}\nthe run folder is {folder}; go on with: {again}") from error
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; go on with: {again}", signal.SIGINT) from None
        except BaseException:
            log(traceback.format_exc())
            raise

    def report(self, result: "Result") -> None:
        assert self.config is not None
        print()
        self.note("\n".join(_report(result, self.config)))


def _report(result: "Result", config: Root) -> list[str]:
    from kitae.observe.diagnosis import diagnose
    from kitae.observe.progress import peak_memory_gb
    from kitae.store.run_summary import look, size_of

    folder, before, after = result.folder, result.before, result.after
    try:
        from kitae.observe.plots import plot_run

        picture = str(plot_run(folder))
    except ImportError:
        picture = "needs matplotlib: pip install 'kitae[plots]'"
    lines = []
    if before and after and None not in (before["avg"], after["avg"]):
        rise = after["avg"] - before["avg"]
        of, count = ("prompts", after["prompts"]) if "prompts" in after else ("examples", after["examples"])
        what = "score" if before.get("partial") or after.get("partial") else config.measure
        lines.append(
            f"{f'held-out {what}':18} {before['avg']:.3f} → {after['avg']:.3f}  ({rise:+.3f}; "
            f"{int(count)} {of}, 95 % interval {after['avg_low']:.3f}–{after['avg_high']:.3f})"
        )
    own = "" if config.cluster.backend == "none" else " (the controller; worker processes are not counted)"
    if result.stopped_by is None and result.step < config.training.steps:
        lines.append(
            f"ended              {config.training.ended_at(result.step)} (kitae resume {folder} "
            f"{config.training.beyond(result.step)})"
        )
    lines += [
        f"peak memory        {peak_memory_gb():.1f} GB{own}",
        f"disk               {as_size(look(folder).size)}, {as_size(size_of(folder / 'checkpoints'))} of it "
        f"checkpoints (kitae clean {folder})",
        f"run folder         {folder}",
        f"curves             {picture}",
        f"trained model      {result.model}",
    ]
    if found := diagnose(folder):
        titles = "; ".join(finding.title for finding in found)
        lines.append(f"diagnosis          {titles} (kitae diagnose {folder})")
    if (look(folder).steps or [{}])[-1].get("reward") is not None:
        lines.append(f"next               kitae show {folder} --worst     (what it still gets wrong)")
    return lines
