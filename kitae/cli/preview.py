"""`kitae train --dry-run`: what would happen, with which settings, in what time and memory."""

from typing import TYPE_CHECKING

from kitae.cli.text import as_size, as_time, table
from kitae.config.root import RLConfig, Root, StageConfig
from kitae.errors import ConfigError
from kitae.trainer.config import LearningConfig
from kitae.verifiers.config import VerifierConfig

if TYPE_CHECKING:
    from kitae.study.memory_estimate import Footprint
    from kitae.study.time_estimate import Estimate, Range


def preview(config: Root, full: bool) -> None:
    if isinstance(config, RLConfig):
        from kitae.study.time_estimate import estimate

        print(summary(config))
        found = estimate(config)
        print(describe(config, found))
        if found.memory is not None and not found.memory.fits:
            raise ConfigError(shortage(found.memory))
    elif isinstance(config, StageConfig):
        print(stage_summary(config))
    if full:
        print(f"\nall settings:\n{config.to_json()}")
    else:
        changed = [[f"  {key}", repr(value)] for key, value in config.changed().items()]
        print(f"\nsettings that differ from the defaults (--full: all of them):\n{table(changed, left=2)}")
    print("\nnothing was loaded or written; without --dry-run this would train")


def shortage(needs: "Footprint") -> str:
    """What is missing, and what would help."""
    remedy = f"it would with {' '.join(needs.relief)}" if needs.relief else "no setting that was tried would be enough"
    return (
        f"the run must fit into memory: it takes about {as_size(needs.total)}, {as_size(needs.room)} are free; {remedy}"
    )


def _memory(needs: "Footprint | None") -> str:
    if needs is None:
        return "is not worked out for a cluster"
    parts = sorted(needs.parts.items(), key=lambda part: -part[1])
    return f"about {as_size(needs.total)}: " + ", ".join(f"{as_size(s)} {name}" for name, s in parts if s >= 5e7)


def summary(config: RLConfig) -> str:
    t, data, e = config.training, config.data, config.eval
    held_out = f"{e.prompts} prompts before and after" + (f", and every {e.every} steps" if e.every else "")
    if e.suites:
        held_out += f"; as many of {', '.join(e.suites)}"
    return "\n".join(
        [
            f"method     {config.algorithm.preset}, learning rate {t.lr:g}",
            f"data       {data.task or data.gym or data.path or data.hub}, judged by {_judge(config.verifier)}",
            f"steps      {t.steps}, each of {t.prompts_per_step} prompts × {t.group_size} samples of up to "
            f"{config.sampling.max_tokens} tokens{_limit(t)}",
            f"held out   {held_out if e.prompts else 'none (eval.prompts = 0)'}",
            f"run folder {config.run.dir}/{config.run.name}-NNN",
        ]
    )


def stage_summary(config: StageConfig) -> str:
    t, e = config.training, config.eval
    held_out = f"{e.examples} examples before and after" + (f", and every {e.every} steps" if e.every else "")
    length = f"{t.steps} steps" if t.steps else f"{t.epochs:g} passes over the data"
    return "\n".join(
        [
            f"method     {config.method.kind}, learning rate {t.lr:g}",
            f"data       {config.data.source}",
            f"length     {length}, {t.batch} examples a step{_limit(t)}",
            f"held out   {held_out if e.examples else 'none (eval.examples = 0)'}",
            f"run folder {config.run.dir}/{config.run.name}-NNN",
        ]
    )


def _limit(training: LearningConfig) -> str:
    return f"; as many as {training.minutes:g} minutes allow" if training.minutes else ""


def describe(config: RLConfig, found: "Estimate") -> str:
    lines = [f"device     {found.device}, {str(found.dtype).removeprefix('torch.')}"]
    if found.model is None:
        unknown = "is not here yet: it will be made or downloaded, its size is not known"
        return "\n".join([*lines, f"model      {config.model.path} {unknown}"])
    lines += [
        f"model      {config.model.path}, {found.model.parameters / 1e6:.0f} M parameters",
        f"memory     {_memory(found.memory)}",
        f"a step     {_span(found.generation)} of sampling and {_span(found.training)} of training",
        f"the run    {_span(found.run)}, of which evaluations {_span(found.evaluations)}",
        "           (if answers are half to fully as long as they may be, and nothing else uses this machine)",
    ]
    return "\n".join(lines)


def _span(seconds: "Range") -> str:
    """`"3–6 s"`."""
    low, high = (as_time(s) if s >= 2 else f"{s:.1f} s" for s in (seconds.low, seconds.high))
    if low == high:
        return low
    return f"{low.partition(' ')[0]}–{high}" if low.split()[1] == high.split()[1] else f"{low} to {high}"


def _judge(verifier: VerifierConfig) -> str:
    """Its name; of another trainer's function, that of the function and whose way of calling it has."""
    if verifier.style == "kitae":
        return verifier.name
    return f"{verifier.params['function']}, called as {verifier.style} calls it"
