"""What a run trains on, in a few checksums: its data, and the files of the models that it learns from."""

from pathlib import Path

from kitae.config.root import DistilConfig, DistilFileConfig, Root
from kitae.models.fingerprint import fingerprint_files
from kitae.models.load import find_model
from kitae.run.plan import Plan
from kitae.store.provenance import TrainedOn


def trained_on(plan: Plan) -> TrainedOn:
    return TrainedOn(plan.fingerprint(), fingerprint_files(_model_folders(plan.config)))


def _model_folders(config: Root) -> set[Path]:
    """Those on this machine: of the run's own model, and of a teacher."""
    paths = [config.model.path]
    if isinstance(config, DistilFileConfig) or (isinstance(config, DistilConfig) and config.method.teacher.path):
        paths.append(config.method.teacher.path)
    found = (find_model(path, download=False) for path in paths)
    return {folder.resolve() for folder in found if folder is not None}
