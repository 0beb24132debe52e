"""What goes over the wire comes back as it was."""

import asyncio
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kitae.engines.base import Request, Sampled, SamplingParams
from kitae.engines.constraint import Constraint
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
    got = read(pack_frame(*engine_frames.request_to_wire(request)))
    assert got is not None and engine_frames.request_of(got) == request
    done = read(pack_frame(*engine_frames.sampled_to_wire(prior)))
    assert done is not None and engine_frames.sampled_of(done) == prior


def test_known_experts_travel() -> None:
    told = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    known = Request("a", (4, 5), SamplingParams(), 1, experts_from=0, prior_experts=told)
    got = read(pack_frame(*engine_frames.request_to_wire(known)))
    assert got is not None
    experts = engine_frames.request_of(got).prior_experts
    assert experts is not None and experts.dtype == np.uint8 and np.array_equal(experts, told)
    plain = read(pack_frame(*engine_frames.request_to_wire(replace(known, prior_experts=None))))
    assert plain is not None and engine_frames.request_of(plain).prior_experts is None


def test_what_shapes_an_answer_travels() -> None:
    shaped = SamplingParams(constraint=Constraint.choice(["yes", "no"]), logit_bias=((5, -2.5), (7, 1.0)))
    told = replace(shaped, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=-0.25, top_p=0.9)
    for sampling in (shaped, told):
        got = read(pack_frame(*engine_frames.request_to_wire(Request("a", (4, 5), sampling, 1))))
        assert got is not None and engine_frames.request_of(got).sampling == sampling


def test_half_a_frame_is_none() -> None:
    whole = pack_frame({"tick": True}, {"tokens": np.arange(3)})
    assert all(read(whole[:end]) is None for end in range(len(whole))) and read(whole) is not None
