"""What travels between an engine's process and its owner: requests and sampled tokens, as headers and arrays of frames.

Sampled tokens travel as numbers, or as the place where they lie (`kitae.store.columns`).
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kitae.engines.base import Request, Sampled, SamplingParams
from kitae.engines.constraint import Constraint
from kitae.kept_sets import KeptSets
from kitae.store.columns import LazyColumn, Stretch, column_files, record_of, stretches_of
from kitae.types import ExpertArray, Runs
from kitae.workers.frames import Array, Frame

Wire = tuple[dict[str, Any], dict[str, Array]]  # header and arrays


def sampled_to_wire(sampled: Sampled, experts: ExpertArray | None = None) -> Wire:
    """Experts and kept sets travel as numbers in any case."""
    header, arrays = _parts(sampled)
    if sampled.kept is not None:
        arrays = arrays | sampled.kept.to_arrays()
    return header, arrays if experts is None else {**arrays, "experts": experts}


def filed(folder: Path, stretches: tuple[Stretch, ...], versions: Runs, kept: KeptSets | None) -> Sampled:
    """What lies in a folder, unread."""
    return Sampled(*column_files(folder).lazy(stretches), versions, kept)


def request_to_wire(request: Request) -> Wire:
    names = {"id": request.id, "share": request.share, "session": request.session}
    sampling = {
        "seed": request.seed,
        "sampling": asdict(request.sampling),
        "experts_from": request.experts_from,
        "keeps": request.keeps,
    }
    place, arrays = sampled_to_wire(request.prior, request.prior_experts)
    return {**names, **sampling, **place}, {"prompt": np.asarray(request.prompt_tokens, np.int64), **arrays}


def sampled_of(frame: Frame) -> Sampled:
    kept = KeptSets.of_arrays(frame.arrays)
    if "folder" in frame.header:
        header = frame.header
        return filed(Path(header["folder"]), stretches_of(header["stretches"]), Runs(header["versions"]), kept)
    tokens, logprobs, versions = (tuple(frame.arrays[n].tolist()) for n in ("tokens", "logprobs", "versions"))
    return Sampled(tokens, logprobs, versions, kept)


def experts_of(frame: Frame) -> ExpertArray | None:
    return frame.arrays.get("experts")


def request_of(frame: Frame) -> Request:
    return Request(
        id=frame.header["id"],
        prompt_tokens=tuple(frame.arrays["prompt"].tolist()),
        sampling=sampling_of(frame.header["sampling"]),
        seed=frame.header["seed"],
        share=frame.header["share"],
        session=frame.header["session"],
        prior=sampled_of(frame),
        experts_from=frame.header["experts_from"],
        prior_experts=experts_of(frame),
        keeps=frame.header["keeps"],
    )


def sampling_of(given: Mapping[str, Any]) -> SamplingParams:
    """From what `asdict` and JSON have made of it."""
    plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    constraint = None if given["constraint"] is None else Constraint(**given["constraint"])
    bias = tuple((int(token), float(added)) for token, added in given["logit_bias"])
    return SamplingParams(**(plain | {"constraint": constraint, "logit_bias": bias}))


def _parts(sampled: Sampled) -> Wire:
    if isinstance(sampled.tokens, LazyColumn):
        folder, stretches = str(sampled.tokens.files.folder), record_of(sampled.tokens.stretches)
        return {"folder": folder, "stretches": stretches, "versions": Runs.of(sampled.versions).runs}, {}
    return {}, _arrays(sampled)


def _arrays(sampled: Sampled) -> dict[str, Array]:
    """Of Python's own numbers: exact."""
    return {
        "tokens": np.asarray(sampled.tokens, np.int64),
        "logprobs": np.asarray(sampled.logprobs, np.float64),
        "versions": np.asarray(sampled.versions, np.int64),
    }
