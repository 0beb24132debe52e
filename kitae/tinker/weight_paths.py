"""Paths of saved weights, `tinker://MODEL/weights/NAME`, and the folders that hold them.

weights             to train further from, with the optimizer
sampler_weights     to sample from; names with "~" are the server's own, of which the last few of a model are kept
external_weights    to download
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from kitae.errors import RequestError

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_OWN = "~"
_SCHEME = "tinker://"


@dataclass(frozen=True, slots=True)
class WeightPath:
    """`WeightPath("s1:train:0", "weights", "step-10")`."""

    model: str
    segment: str
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.model}/{self.segment}/{self.name}"

    @property
    def kind(self) -> str:
        return KINDS[self.segment]

    @property
    def own(self) -> bool:
        """Whether the server made up the name."""
        return self.name.startswith(_OWN)

    def folder(self, root: Path) -> Path:
        return root / "weights" / quote(self.model, safe="") / self.segment / self.name

    def remove(self, root: Path) -> None:
        shutil.rmtree(self.folder(root), ignore_errors=True)


def named(model: str, segment: str, name: str | None) -> WeightPath:
    """Of weights that a client calls so."""
    if not name or not _NAME.fullmatch(name) or name.strip(".") == "":
        rule = "at most 128 letters, digits, dots, hyphens and underscores"
        raise RequestError(f"saved weights must have a name of {rule}, got {name!r}")
    return WeightPath(model, segment, name)


def own(model: str, number: int) -> WeightPath:
    """Of weights to sample from that nobody called anything."""
    return WeightPath(model, "sampler_weights", f"{_OWN}{number}")


def parse(path: str) -> WeightPath:
    parts = path.removeprefix(_SCHEME).split("/") if path.startswith(_SCHEME) else []
    if len(parts) != 3 or parts[1] not in KINDS or not _NAME.fullmatch(parts[2].removeprefix(_OWN)):
        raise RequestError(f"a path of weights must be tinker://MODEL/weights/NAME, or sampler_weights, got {path!r}")
    if parts[2].strip(".") == "" or not parts[0] or parts[0].strip(".") == "":
        raise RequestError(f"a path of weights must name a model and weights, got {path!r}")
    return WeightPath(*parts)
