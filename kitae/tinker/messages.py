"""What Tinker's clients send and get for passes and samples, in JSON and in protocol buffers.

Numbers of fields are those of the client's schema, package `tinker_public`. Tensors are flat numbers with a shape, or
rows of a sparse matrix, whose other entries are 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kitae.engines.base import SamplingParams
from kitae.errors import RequestError
from kitae.primitives.core import SampledAnswer
from kitae.primitives.datum import Datum
from kitae.primitives.passes import PassResult
from kitae.tinker import protobuf

Json = Mapping[str, Any]
Array = npt.NDArray[Any]

_DTYPES: dict[int, npt.DTypeLike] = {1: np.float32, 2: np.int64, 3: np.int32}
_NAMES: dict[str, npt.DTypeLike] = {"float32": np.float32, "int64": np.int64}
MOST_SAMPLES = 1024
_MASKED = -99999.0  # log-prob of a place without one
_TARGETS = "target_tokens"


@dataclass(frozen=True, slots=True)
class PassRequest:
    """`PassRequest("s:train:0", 3, data, "ppo", {"clip_low_threshold": 0.9}, forward_only=False)`."""

    model: str
    seq: int
    data: tuple[Datum, ...]
    loss: str
    settings: Mapping[str, float]
    forward_only: bool


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What `asample` asks for. last: how many of the last prompt tokens are scored; None: all."""

    prompt: tuple[int, ...]
    params: SamplingParams
    samples: int
    seed: int | None
    prompt_logprobs: bool
    top_prompt: int
    top_sampled: int
    last: int | None


def read_pass(body: bytes, kind: str) -> PassRequest:
    """kind: the content type."""
    return _pass_of_proto(body) if "protobuf" in kind else _pass_of_json(as_json(body), body)


def as_json(body: bytes) -> Json:
    import json

    try:
        found = json.loads(body)
    except ValueError as error:
        raise RequestError(f"the body must be JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError("the body must be a JSON object")
    return found


def whose_pass(body: bytes, kind: str) -> tuple[str, int]:
    """Model and number of a pass, without its data."""
    if "protobuf" in kind:
        fields = protobuf.read(body)
        return protobuf.text(fields.get(1, ())), protobuf.whole(fields.get(2, ()))
    found = as_json(body)
    return str(found.get("model_id", "")), int(found.get("seq_id") or 0)


def _pass_of_proto(body: bytes) -> PassRequest:
    fields = protobuf.read(body)
    settings: dict[str, Any] = {}
    for entry in protobuf.blobs(fields.get(5, ())):
        pair = protobuf.read(entry)
        settings[protobuf.text(pair.get(1, ()))] = pair.get(2, (0.0,))[-1]
    for entry in protobuf.blobs(fields.get(7, ())):
        pair = protobuf.read(entry)
        value = protobuf.read(protobuf.blob(pair.get(2, ())))
        settings[protobuf.text(pair.get(1, ()))] = protobuf.text(value[2]) if 2 in value else value.get(1, (0.0,))[-1]
    return PassRequest(
        protobuf.text(fields.get(1, ())),
        protobuf.whole(fields.get(2, ())),
        tuple(_datum_of_proto(part) for part in protobuf.blobs(fields.get(3, ()))),
        protobuf.text(fields.get(4, ())),
        _numbers(settings),
        bool(protobuf.whole(fields.get(6, ()))),
    )


def _datum_of_proto(message: bytes) -> Datum:
    fields = protobuf.read(message)
    tokens = []
    for part in protobuf.blobs(fields.get(1, ())):
        chunk = protobuf.read(part)
        if 1 not in chunk:
            raise RequestError("a model input must be text here, got an image or sound")
        tokens.append(np.frombuffer(protobuf.blob(protobuf.read(protobuf.blob(chunk[1])).get(1, ())), np.int32))
    inputs = {}
    for part in protobuf.blobs(fields.get(2, ())):
        pair = protobuf.read(part)
        inputs[protobuf.text(pair.get(1, ()))] = _tensor_of_proto(protobuf.blob(pair.get(2, ())))
    return _datum(np.concatenate(tokens) if tokens else np.zeros(0, np.int32), inputs)


def _tensor_of_proto(message: bytes) -> Array:
    fields = protobuf.read(message)
    dtype = _DTYPES.get(protobuf.whole(fields.get(3, ())))
    if dtype is None:
        raise RequestError("a tensor must be of float32, int64 or int32")
    shape = protobuf.packed(fields.get(4, ()))
    if 2 not in fields:
        return _shaped(np.frombuffer(protobuf.blob(fields.get(1, ())), dtype), shape)
    csr = protobuf.read(protobuf.blob(fields[2]))
    crow, col = (np.frombuffer(protobuf.blob(csr.get(n, ())), np.int64) for n in (2, 3))
    return _dense(np.frombuffer(protobuf.blob(csr.get(1, ())), dtype), crow, col, shape)


def _pass_of_json(found: Json, body: bytes) -> PassRequest:
    forward_only = "forward_input" in found
    asked = found.get("forward_input") or found.get("forward_backward_input")
    if not isinstance(asked, dict):
        raise RequestError("a pass must have a forward_backward_input")
    data = [_datum_of_json(datum) for datum in asked.get("data") or ()]
    settings = _numbers(asked.get("loss_fn_config") or {})
    model, seq = str(found.get("model_id", "")), int(found.get("seq_id") or 0)
    return PassRequest(model, seq, tuple(data), str(asked.get("loss_fn", "")), settings, forward_only)


def _datum_of_json(datum: Json) -> Datum:
    inputs = {name: tensor_of_json(name, value) for name, value in (datum.get("loss_fn_inputs") or {}).items()}
    return _datum(np.array(tokens_of(datum.get("model_input") or {}), np.int64), inputs)


def tokens_of(model_input: Json) -> list[int]:
    tokens: list[int] = []
    for chunk in model_input.get("chunks") or ():
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise RequestError(f"a model input must be text here, got a chunk of kind {chunk.get('type')!r}")
        tokens += chunk.get("tokens") or ()
    return tokens


def tensor_of_json(name: str, value: Any) -> Array:
    dtype = _NAMES.get(value.get("dtype", "")) if isinstance(value, dict) else None
    if dtype is None:
        raise RequestError(f"{name} must be a tensor with data and a dtype of float32 or int64")
    numbers = np.array(value.get("data") or (), dtype)
    if value.get("sparse_crow_indices") is not None:
        crow, col = (np.array(value.get(key) or (), np.int64) for key in ("sparse_crow_indices", "sparse_col_indices"))
        return _dense(numbers, crow, col, value.get("shape") or ())
    return _shaped(numbers, value.get("shape") or ())


def _shaped(numbers: Array, shape: Sequence[int]) -> Array:
    try:
        return numbers.reshape(tuple(shape)) if shape else numbers
    except ValueError:
        raise RequestError(f"a tensor of {numbers.size} numbers cannot have the shape {list(shape)}") from None


def _dense(values: Array, crow: Array, col: Array, shape: Sequence[int]) -> Array:
    if len(shape) != 2 or len(crow) != shape[0] + 1 or len(col) != len(values) or int(crow[-1]) != len(values):
        raise RequestError("a sparse tensor must have two dimensions, and as many rows and columns as numbers")
    if shape[0] * shape[1] > 2**28 or (len(col) and not 0 <= col.min() <= col.max() < shape[1]):
        raise RequestError(f"a sparse tensor must have its columns within its shape, got {list(shape)}")
    dense = np.zeros(tuple(shape), values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(crow)), col] = values
    return dense


def _datum(tokens: Array, inputs: Mapping[str, Array]) -> Datum:
    if _TARGETS not in inputs:
        raise RequestError(f"each datum needs {_TARGETS} among its loss_fn_inputs")
    rest = {name: values for name, values in inputs.items() if name != _TARGETS}
    return Datum(tokens, inputs[_TARGETS], rest)


def _numbers(settings: Mapping[str, Any]) -> dict[str, float]:
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"the setting {name!r} of a loss must be a number, got {value!r}")
    return {name: float(value) for name, value in settings.items()}


def read_sample(found: Json, context: int, stop_tokens: tuple[int, ...]) -> SampleRequest:
    """stop_tokens: those that end an answer where the request does not say which."""
    prompt = tuple(tokens_of(found.get("prompt") or {}))
    asked = found.get("sampling_params") or {}
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
        if found.get(name):
            raise RequestError(f"{name} is not computed by this server")
    stop = asked.get("stop")
    stop = [stop] if isinstance(stop, str) else stop
    if not 1 <= int(found.get("num_samples") or 1) <= MOST_SAMPLES:
        raise RequestError(f"num_samples must be in 1…{MOST_SAMPLES}, got {found.get('num_samples')}")
    texts = tuple(s for s in stop or () if isinstance(s, str))
    ids = tuple(int(s) for s in stop or () if not isinstance(s, str))
    most = asked.get("max_tokens")
    params = SamplingParams(
        temperature=float(asked.get("temperature", 1.0)),
        max_tokens=int(context - len(prompt) if most is None else most),
        top_p=float(asked.get("top_p", 1.0)),
        top_k=max(0, int(asked.get("top_k", -1))),
        stop_tokens=stop_tokens if stop is None else ids,
        stop_strings=texts,
    )
    if params.temperature < 0 or not 0 < params.top_p <= 1:
        raise RequestError("temperature must be at least 0 and top_p in (0, 1]")
    return SampleRequest(
        prompt,
        params,
        int(found.get("num_samples") or 1),
        asked.get("seed"),
        bool(found.get("prompt_logprobs")),
        int(found.get("topk_prompt_logprobs") or 0),
        int(found.get("topk_sample_logprobs") or 0),
        found.get("prompt_logprobs_last_n"),
    )


Top = Sequence[Sequence[tuple[int, float]]]


def write_sample(
    answers: Sequence[SampledAnswer], prompt: Sequence[float] | None, top_prompt: Top | None, tops: Sequence[Top] | None
) -> bytes:
    """A `SampleResponse`. prompt: a log-prob of each prompt token, NaN where there is none."""
    fields: list[tuple[int, protobuf.Value | str]] = []
    for i, answer in enumerate(answers):
        own: list[tuple[int, protobuf.Value | str]] = [
            (1, 1 if answer.finish == "length" else 0),
            (2, np.array(answer.tokens, np.int32).tobytes()),
            (3, np.array(answer.logprobs, np.float32).tobytes()),
        ]
        fields.append((1, protobuf.write(own + ([(4, _top(tops[i]))] if tops else []))))
    if prompt is not None:
        fields.append((2, np.array(prompt, np.float32).tobytes()))
    if top_prompt is not None:
        fields.append((3, _top(top_prompt)))
    return protobuf.write(fields)


def _top(found: Top) -> bytes:
    width = max(map(len, found), default=0)
    ids, logprobs = np.zeros((len(found), width), np.int32), np.full((len(found), width), _MASKED, np.float32)
    for i, row in enumerate(found):
        for j, (token, logprob) in enumerate(row):
            ids[i, j], logprobs[i, j] = token, logprob
    return protobuf.write([(1, ids.tobytes()), (2, logprobs.tobytes()), (3, width), (4, len(found))])


def write_pass(result: PassResult, loss: str) -> bytes:
    """A `ForwardBackwardOutput`: log-probs of the targets, and for cross-entropy the loss of each."""
    outputs = {"logprobs": result.logprobs} | ({"elementwise_loss": result.losses} if loss == "cross_entropy" else {})
    records = []
    for i in range(len(result.logprobs)):
        named = ((1, protobuf.write([(1, name), (2, _batched(values[i]))])) for name, values in outputs.items())
        records.append((2, protobuf.write([(1, "ArrayRecord"), *((2, v) for _, v in named), (3, 1)])))
    metric = protobuf.write([(1, "loss:sum"), (2, result.loss)])
    return protobuf.write([(1, "ArrayRecord"), *records, (3, metric)])


def _batched(values: Array) -> bytes:
    data = np.ascontiguousarray(values, np.float32)
    offsets = np.array([0, data.nbytes], np.int64)
    sizes: list[tuple[int, protobuf.Value | str]] = [(4, size) for size in data.shape[1:]]
    return protobuf.write([(1, data.tobytes()), (2, offsets.tobytes()), (3, 1), *sizes])


def json_of_pass(message: bytes) -> dict[str, Any]:
    """The same for a client that reads JSON."""
    fields = protobuf.read(message)
    outputs = []
    for record in protobuf.blobs(fields.get(2, ())):
        datum = {}
        for entry in protobuf.blobs(protobuf.read(record).get(2, ())):
            pair = protobuf.read(entry)
            tensor = protobuf.read(protobuf.blob(pair[2]))
            values = np.frombuffer(protobuf.blob(tensor.get(1, ())), np.float32)
            shape = [-1, *protobuf.packed(tensor.get(4, ()))]
            shaped = values.reshape(shape)
            datum[protobuf.text(pair[1])] = {
                "data": values.tolist(), "dtype": "float32", "shape": list(shaped.shape),
            }  # fmt: skip
        outputs.append(datum)
    metrics = {}
    for entry in protobuf.blobs(fields.get(3, ())):
        pair = protobuf.read(entry)
        metrics[protobuf.text(pair[1])] = pair[2][-1]
    return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": metrics}


def json_of_sample(message: bytes) -> dict[str, Any]:
    fields = protobuf.read(message)
    sequences = []
    for part in protobuf.blobs(fields.get(1, ())):
        own = protobuf.read(part)
        sequences.append(
            {
                "stop_reason": "length" if protobuf.whole(own.get(1, ())) else "stop",
                "tokens": np.frombuffer(protobuf.blob(own.get(2, ())), np.int32).tolist(),
                "logprobs": np.frombuffer(protobuf.blob(own.get(3, ())), np.float32).tolist(),
            }
        )
    scored = None
    if 2 in fields:
        numbers = np.frombuffer(protobuf.blob(fields[2]), np.float32).tolist()
        scored = [None if number != number else number for number in numbers]
    return {"sequences": sequences, "prompt_logprobs": scored, "type": "sample"}
