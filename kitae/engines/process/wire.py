"""Frames between an engine's process and its owner: a JSON header, then arrays of numbers as they lie in memory.

    8 bytes: lengths of header and body │ {"done": 7, "finish": "stop", "arrays": [["tokens", "<i8", 12], …]} │ body

Nothing in a frame is code, so neither side can be made to run what the other sent.
"""

import asyncio
import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kitae.engines.base import Request, Sampled, SamplingParams

_LENGTHS = struct.Struct("<II")
_DTYPES = {"prompt": "<i8", "tokens": "<i8", "versions": "<i8", "logprobs": "<f8"}  # of Python's own numbers: exact


@dataclass(frozen=True, slots=True)
class Frame:
    """`Frame({"done": 7, "finish": "stop"}, {"tokens": array([4, 2]), …})`."""

    header: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]

    @property
    def sampled(self) -> Sampled:
        tokens, logprobs, versions = (tuple(self.arrays[n].tolist()) for n in ("tokens", "logprobs", "versions"))
        return Sampled(tokens, logprobs, versions)

    @property
    def request(self) -> Request:
        given = self.header["sampling"].items()
        sampling: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given}
        return Request(
            id=self.header["id"],
            prompt_tokens=tuple(self.arrays["prompt"].tolist()),
            sampling=SamplingParams(**sampling),
            seed=self.header["seed"],
            share=self.header["share"],
            thread=self.header["thread"],
            prior=self.sampled,
        )


def pack(header: dict[str, Any], **arrays: tuple[int, ...] | tuple[float, ...]) -> bytes:
    numbers = {name: np.asarray(values, dtype=_DTYPES[name]) for name, values in arrays.items()}
    listed = [[name, values.dtype.str, values.size] for name, values in numbers.items()]
    head = json.dumps({**header, "arrays": listed}).encode()
    body = b"".join(values.tobytes() for values in numbers.values())
    return _LENGTHS.pack(len(head), len(body)) + head + body


def pack_sampled(header: dict[str, Any], sampled: Sampled) -> bytes:
    return pack(header, tokens=sampled.tokens, logprobs=sampled.logprobs, versions=sampled.versions)


def pack_request(number: int, request: Request) -> bytes:
    names = {"id": request.id, "share": request.share, "thread": request.thread}
    prior = request.prior
    return pack(
        {"generate": number, **names, "seed": request.seed, "sampling": asdict(request.sampling)},
        prompt=request.prompt_tokens,
        tokens=prior.tokens,
        logprobs=prior.logprobs,
        versions=prior.versions,
    )


async def read(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None when the other side has closed the connection, or died in the middle of one."""
    try:
        head, body = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        header = json.loads(await reader.readexactly(head))
        data = await reader.readexactly(body)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    arrays, offset = {}, 0
    for name, dtype, count in header.pop("arrays"):
        arrays[name] = np.frombuffer(data, dtype, count, offset)
        offset += arrays[name].nbytes
    return Frame(header, arrays)
