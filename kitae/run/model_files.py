"""The files of the models that a run learns from: its own, and a teacher's."""

from kitae.config.root import DistilConfig, DistilFileConfig, Root
from kitae.models.fingerprint import fingerprint_files
from kitae.models.load import find_model


def model_files(config: Root) -> dict[str, str]:
    """Checksums of those that are on this machine."""
    paths = [config.model.path]
    if isinstance(config, DistilFileConfig) or (isinstance(config, DistilConfig) and config.method.teacher.path):
        paths.append(config.method.teacher.path)
    found = (find_model(path, download=False) for path in paths)
    return fingerprint_files({folder.resolve() for folder in found if folder is not None})
