"""What travels between an engine's process and its owner: requests and sampled tokens in frames."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from kitae.engines.base import Request, Sampled, SamplingParams
from kitae.processes.frames import Array, Frame, pack_frame


def pack_sampled(header: Mapping[str, Any], sampled: Sampled) -> bytes:
    return pack_frame(header, _arrays(sampled))


def pack_request(number: int, request: Request) -> bytes:
    names = {"id": request.id, "share": request.share, "thread": request.thread}
    header = {"generate": number, **names, "seed": request.seed, "sampling": asdict(request.sampling)}
    return pack_frame(header, {"prompt": np.asarray(request.prompt_tokens, np.int64), **_arrays(request.prior)})


def sampled_of(frame: Frame) -> Sampled:
    tokens, logprobs, versions = (tuple(frame.arrays[n].tolist()) for n in ("tokens", "logprobs", "versions"))
    return Sampled(tokens, logprobs, versions)


def request_of(frame: Frame) -> Request:
    given = frame.header["sampling"].items()
    sampling: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given}
    return Request(
        id=frame.header["id"],
        prompt_tokens=tuple(frame.arrays["prompt"].tolist()),
        sampling=SamplingParams(**sampling),
        seed=frame.header["seed"],
        share=frame.header["share"],
        thread=frame.header["thread"],
        prior=sampled_of(frame),
    )


def _arrays(sampled: Sampled) -> dict[str, Array]:
    """Of Python's own numbers: exact."""
    return {
        "tokens": np.asarray(sampled.tokens, np.int64),
        "logprobs": np.asarray(sampled.logprobs, np.float64),
        "versions": np.asarray(sampled.versions, np.int64),
    }
