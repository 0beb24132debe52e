"""The folder of a chain: what was begun with which settings, what it took, how the models do.

chain.json          all of this
NN-NAME-001/        the run of a stage that trains
NN-NAME.jsonl       what a stage sampled
report.md, .json    the results so far; curve.png: the evaluations
model               the last stage's model, once all are finished
"""

import json
from collections.abc import Mapping
from typing import Any

from kitae.chains.chain_file import ChainPlan, ChainStage
from kitae.errors import ConfigChangedError, StoreError
from kitae.store.disk import write_whole
from kitae.store.run_folder import lock


class Record:
    """chain.json, open for writing by one process at a time; each change is on the disk when it returns."""

    def __init__(self, chain: ChainPlan) -> None:
        self._path = chain.folder / "chain.json"
        try:
            chain.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make the folder {chain.folder}: {error}") from error
        self._lock = lock(chain.folder)
        try:
            self.stages, self.evaluations = read_record(chain)
            refuse_changes(chain, self.stages)
        except BaseException:
            self._lock.close()
            raise

    def begin(self, stage: ChainStage) -> None:
        """Before anything of it is done."""
        self.stages.setdefault(stage.label, {"settings": stage.given()})
        self._write()

    def finish(self, stage: ChainStage, found: Mapping[str, Any]) -> None:
        """found: what there is to say of it: seconds, peak_gb, and what it sampled."""
        self.stages[stage.label] |= {**found, "finished": True}
        self._write()

    def is_finished(self, stage: ChainStage) -> bool:
        return is_finished(self.stages, stage)

    def evaluated(self, after: int, row: Mapping[str, Any]) -> None:
        """after: the number of the stage whose model it was; 0: before the first."""
        self.evaluations[after] = {key: None if value != value else value for key, value in row.items()}  # no NaN
        self._write()

    def _write(self) -> None:
        evaluations = {str(after): row for after, row in self.evaluations.items()}
        write_whole(self._path, json.dumps({"stages": self.stages, "evaluations": evaluations}, indent=1))

    def close(self) -> None:
        self._lock.close()


Stages = dict[str, dict[str, Any]]
Evaluations = dict[int, dict[str, Any]]


def read_record(chain: ChainPlan) -> tuple[Stages, Evaluations]:
    """What is on record: stages by label, evaluations by the stage they came after."""
    path = chain.folder / "chain.json"
    if not path.exists():
        return {}, {}
    try:
        values = json.loads(path.read_text("utf-8"))
        return values["stages"], {int(after): row for after, row in values["evaluations"].items()}
    except (ValueError, KeyError) as error:
        raise StoreError(f"{path} is not the record of a chain: {error!r}") from None


def is_finished(stages: Stages, stage: ChainStage) -> bool:
    return bool(stages.get(stage.label, {}).get("finished"))


def refuse_changes(chain: ChainPlan, recorded: Stages) -> None:
    """Stages that were begun stay as they are; those to come may change."""
    changes, known = [], {stage.label: json.loads(json.dumps(stage.given())) for stage in chain.stages}
    for label, entry in recorded.items():
        if label not in known:
            changes.append(f"stage {label} is gone")
            continue
        before, now = entry["settings"], known[label]
        changes += [
            f"stage {label}: {key}: was {before.get(key)!r}, is {now.get(key)!r}"
            for key in {**before, **now}
            if before.get(key) != now.get(key)
        ]
    if changes:
        raise ConfigChangedError(
            f"the chain in {chain.folder} was begun with other settings:\n  " + "\n  ".join(changes) + "\nStages that "
            "were begun keep theirs. Undo the change, or begin another chain with --output FOLDER"
        )
