"""Go through the stages of a chain, from wherever it stands.

Everything is checked before the first stage. A stage is begun on record, run, and finished on record; killed in
between, it goes on from its own last checkpoint or its own journal when the chain is run again.
"""

import gc
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kitae.chains.chain_file import ChainPlan, ChainStage, check_chain
from kitae.chains.chain_folder import Record, read_record, refuse_changes
from kitae.chains.chain_report import draw_curve, write_report
from kitae.clock import now
from kitae.config.root import RLConfig, reinforcement
from kitae.errors import DataError, Interrupted
from kitae.evaluation.run_suites import evaluate_own
from kitae.kernels.allocation import return_freed_memory
from kitae.models.load import check_model
from kitae.observe.observer import Audience
from kitae.observe.progress import peak_memory_gb
from kitae.offline.sampling import PartialFile, SampleWatcher
from kitae.run.sample_run import sample_file
from kitae.run.train_run import resume, train
from kitae.store.disk import private
from kitae.store.run_folder import is_run

_RESET_PEAK = Path("/proc/self/clear_refs")

Watching = Callable[[], AbstractContextManager[SampleWatcher]]


def inspect_chain(chain: ChainPlan) -> None:
    """Refuse what is wrong with the chain, and changes of stages that were begun. Nothing is written."""
    check_chain(chain)
    refuse_changes(chain, read_record(chain)[0])


def run_chain(chain: ChainPlan, audience: Audience, watching: Watching = lambda: nullcontext(SampleWatcher())) -> None:
    """Run the stages that are not finished, of a chain that was inspected. watching: shows how far a stage is that
    samples. Raises `Interrupted` where Ctrl-C stopped a stage, which then is saved."""
    for stage, model in chain.named_models():
        check_model(chain.config(stage).model.model_copy(update={"path": model}))
    with private(chain.config(chain.stages[0]).run.shared):
        _run_stages(chain, audience, watching)


def _run_stages(chain: ChainPlan, audience: Audience, watching: Watching) -> None:
    record = Record(chain)
    try:
        _evaluate(chain, record, 0, chain.first_model, audience)
        for stage in chain.stages:
            if not record.is_finished(stage):
                audience.note(f"stage {stage.label}, {stage.number} of {len(chain.stages)}")
                record.begin(stage)
                record.finish(stage, _measured(partial(_run, chain, stage, audience, watching)))
            if stage.order is None:
                _clean(chain, stage)
            if stage.trains:
                _evaluate(chain, record, stage.number, str(chain.run_folder(stage)), audience)
            write_report(chain, record.stages, record.evaluations)
        _point_at_model(chain)
        draw_curve(chain, record.evaluations)
    finally:
        record.close()


def _run(chain: ChainPlan, stage: ChainStage, audience: Audience, watching: Watching) -> dict[str, Any]:
    config = chain.config(stage)
    if stage.order is not None:
        with watching() as watcher:
            return _sample(chain, stage, reinforcement(config, "sample"), watcher)
    folder = chain.run_folder(stage)
    if folder.exists() and not is_run(folder):
        shutil.rmtree(folder)  # killed while it was made
    result = resume(folder, audience) if folder.exists() else train(config, audience)
    if result.stopped_by is not None:
        raise Interrupted(
            f"stopped in stage {stage.label} after step {result.step}; everything is saved, and the same command goes "
            "on from here",
            result.stopped_by,
        )
    return {}


def _sample(chain: ChainPlan, stage: ChainStage, config: RLConfig, watcher: SampleWatcher) -> dict[str, Any]:
    assert stage.order is not None
    file = chain.file(stage)
    if file.exists() and not PartialFile.folder_of(file).exists():  # complete, but killed before it was on record
        return {"sampled": {"rows": len(file.read_text("utf-8").splitlines())}}
    tally = sample_file(config, stage.order, file, watcher)
    if not tally.rows:
        raise DataError(
            f"stage {stage.label} kept none of {tally.answers} answers to {tally.prompts} prompts "
            f"(keep = {stage.order.select.keep!r}, {tally.truncated} cut off, {tally.errors} errors), so there is "
            "nothing to train on"
        )
    return {"sampled": tally.as_json()}


def _measured(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """seconds: of this process; what it did before it was killed is not in it."""
    free_memory()
    forget_peak()
    began = now()
    found = work()
    return {**found, "seconds": now() - began, "peak_gb": peak_memory_gb()}


def free_memory() -> None:
    """Give back what the stage before has left. Its models hold each other in circles, so only the garbage collector
    frees them; and freed memory stays with the process (`kitae.kernels.allocation`), in pieces of sizes that the next
    stage may not need."""
    gc.collect()
    return_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def forget_peak() -> None:
    """Count the peak of memory from here on. Where the system cannot, `peak_memory_gb` is that of the whole process."""
    with suppress(OSError):
        _RESET_PEAK.write_text("5")


def _evaluate(chain: ChainPlan, record: Record, after: int, model: str, audience: Audience) -> None:
    """Once for each model."""
    if chain.yardstick is None or after in record.evaluations:
        return
    config = chain.evaluation(model)
    audience.note(f"evaluating {config.model.path} on {config.eval.prompts} held-out prompts")
    free_memory()
    found = evaluate_own(config)
    record.evaluated(after, {"model": model, **found.row()})
    audience.note(f"held-out accuracy: {found.avg}")


def _clean(chain: ChainPlan, stage: ChainStage) -> None:
    if not chain.keep_checkpoints:
        shutil.rmtree(chain.run_folder(stage) / "checkpoints", ignore_errors=True)


def _point_at_model(chain: ChainPlan) -> None:
    trained = [stage for stage in chain.stages if stage.trains]
    link = chain.folder / "model"
    if trained and not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(Path(chain.run_folder(trained[-1]).name) / "model")
