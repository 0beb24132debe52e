"""What goes over the wire comes back as it was."""

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kitae.engines.base import Request, Sampled, SamplingParams
from kitae.engines.process import engine_frames
from kitae.workers.frames import Frame, pack_frame, read_frame

tokens = st.lists(st.tuples(st.integers(0, 2**40), st.floats(allow_nan=False), st.integers(0, 2**40)), max_size=9)


def read(data: bytes) -> Frame | None:
    async def body() -> Frame | None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader)

    return asyncio.run(body())


@given(st.text(), tokens, tokens, st.floats(0, 2), st.lists(st.text(), max_size=3), st.integers(0, 2**63 - 1))
def test_requests_and_results_travel_exactly(
    name: str, prompt: list[tuple[int, float, int]], sampled: list[tuple[int, float, int]], temperature: float,
    stops: list[str], seed: int,
) -> None:  # fmt: skip
    prior = Sampled(*map(tuple, zip(*sampled, strict=True))) if sampled else Sampled()
    sampling = SamplingParams(temperature=temperature, stop_tokens=(2, 3), stop_strings=tuple(stops))
    request = Request(name, tuple(t for t, _, _ in prompt), sampling, seed, share=name, prior=prior)
    got = read(engine_frames.pack_request(7, request))
    assert got is not None and got.header["generate"] == 7 and engine_frames.request_of(got) == request
    done = read(engine_frames.pack_sampled({"done": 7, "finish": "stop"}, prior))
    assert done is not None and done.header == {"done": 7, "finish": "stop"} and engine_frames.sampled_of(done) == prior


def test_known_experts_travel() -> None:
    told = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    got = read(
        engine_frames.pack_request(7, Request("a", (4, 5), SamplingParams(), 1, experts_from=0, prior_experts=told))
    )
    assert got is not None
    request = engine_frames.request_of(got)
    assert (
        request.prior_experts is not None
        and request.prior_experts.dtype == np.uint8
        and np.array_equal(request.prior_experts, told)
    )
    plain = read(engine_frames.pack_request(7, Request("a", (4, 5), SamplingParams(), 1, experts_from=0)))
    assert plain is not None and engine_frames.request_of(plain).prior_experts is None


def test_half_a_frame_is_none() -> None:
    whole = pack_frame({"tick": True}, {"tokens": np.arange(3)})
    assert all(read(whole[:end]) is None for end in range(len(whole))) and read(whole) is not None
