"""The bodies of requests as models: the fields that OpenAI's clients send, and what each of them may be.

A field is honoured, or the request is refused with a sentence that names the field: nothing that a client asks for is
quietly left out. `only` marks a field that this server cannot honour: it may come with a neutral value alone. Fields of
type `Ignored` have no effect on an answer. null means the same as an absent field, as OpenAI's clients have it.
"""

import json
import json.decoder
import json.scanner
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from kitae.data.data_files import clip
from kitae.plugins import nearest
from kitae.serving.refusals import Refused

MOST_TOP = 20
"""The largest number of likeliest tokens at a position that a client may ask for."""

_MOST_CHOICES = 128
_MOST_STOPS, _LONGEST_STOP = 64, 256  # each is looked for after each token
_MOST_FIELDS = 100
_SHOWN = 20  # entries of a value that a message repeats
_LONGEST_NAME = 100  # characters of a field whose likeness is looked for
_MOST_STOP_TOKENS = 1024
_AT_ONCE = 2 * 2**20  # bytes that the compiled parser takes; while it works, no other thread does
MOST_DETOKENIZED = 2**18
HIGHEST_TOKEN = 2**31 - 1
"""Of token ids that can be asked about at all; a model has fewer, and says so."""
_UNCONSTRAINED = "tokens are drawn from the model as it is"
_MOST_BIASES = 1024
_LARGEST_BIAS = 100
_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}

Ignored = Any
Json = dict[str, Any]


class RequestBody(BaseModel):
    """`RewardBody.read({"reward": 1.0})` raises `Refused` for the first field that is wrong or unknown."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, Mapping) else body

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        if len(body) > _MOST_FIELDS:
            raise Refused(f"a request must have at most {_MOST_FIELDS} fields, got {len(body)}")
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise _refusal(error.errors(include_url=False)[0], cls) from None


def _refusal(problem: Any, kind: type[RequestBody]) -> Refused:
    name, bounds = ".".join(map(str, problem["loc"])), problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            hint = nearest(name, sorted(kind.model_fields)) if len(name) < _LONGEST_NAME else ""
            return Refused(f"unknown field {clip(repr(name))}{hint}", param=name, code="unknown_field")
        case "missing" | "union_tag_not_found":
            return Refused(f"{name} {_tag(bounds)}is needed", param=name)
        case "union_tag_invalid":
            message = f"{name} {_tag(bounds)}must be one of {bounds['expected_tags']}, got {clip(repr(bounds['tag']))}"
            return Refused(message, param=name)
        case "literal_error":
            wanted = bounds["expected"]
        case "greater_than_equal":
            wanted = f"at least {bounds['ge']:g}"
        case "less_than_equal":
            wanted = f"at most {bounds['le']:g}"
        case "less_than":
            wanted = f"below {bounds['lt']:g}"
        case other:
            wanted = _KINDS.get(other, other)
    return Refused(f"{name} must be {wanted}, got {clip(repr(problem['input']))}", param=name)


def _tag(bounds: Mapping[str, Any]) -> str:
    """The field by which one of several kinds is told: `type `; nothing, where there are not several."""
    return f"{bounds['discriminator'].strip(chr(39))} " if "discriminator" in bounds else ""


@dataclass(frozen=True, slots=True)
class ReadingLimits:
    """`ReadingLimits(body_bytes=2**20)`.

    body_bytes: of one body. all_bytes: of all large bodies that have come, or are coming, and are not read yet.
    seconds: in which a body must have come. brackets: opening ones in a body, each of which may be an object in memory.
    """

    body_bytes: int = 8 * 2**20
    all_bytes: int = 64 * 2**20
    seconds: float = 60.0
    brackets: int = 200_000


READING = ReadingLimits()


class _PatientDecoder(json.JSONDecoder):
    """Written in Python, so that other threads go on meanwhile, and ten times slower where there are many values."""

    def __init__(self) -> None:
        super().__init__()
        self.parse_object, self.parse_array = json.decoder.JSONObject, json.decoder.JSONArray  # type: ignore[attr-defined]
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def read_json(body: bytes, limits: ReadingLimits = READING) -> dict[str, Any]:
    brackets = body.count(b"[") + body.count(b"{")
    if brackets > limits.brackets:
        raise Refused(f"a body must have at most {limits.brackets} opening brackets, got {brackets}", 413)
    try:
        decode = json.loads if len(body) <= _AT_ONCE else _PatientDecoder().decode
        found = decode(body.decode("utf-8-sig"))
    except RecursionError:
        raise Refused("the body must be JSON: it is nested too deeply") from None
    except ValueError as error:
        raise Refused(f"the body must be JSON: {clip(str(error))}") from None
    if not isinstance(found, dict):
        raise Refused(f"the body must be a JSON object, got {clip(repr(found))}")
    return found


def only(neutral: Sequence[Any], why: str) -> AfterValidator:
    """Marks a field that may come only with a value that asks for nothing."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value not in neutral:
            shown = f", only {json.dumps(neutral[0])}" if neutral else ""
            name, many = str(info.field_name), isinstance(value, dict | list) and len(value) > _SHOWN
            got = f"{len(value)} entries" if many else clip(json.dumps(value))
            raise Refused(f"{name} is not supported{shown}: {why}; got {got}", param=name)
        return value

    return AfterValidator(check)


def _texts(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    """One text or a list of them, none of them empty."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        name = str(info.field_name)
        message = f"{name} must be a text or a list of texts, none of them empty, got {clip(repr(value))}"
        raise Refused(message, param=name)
    return tuple(found)


def _stops(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    found = _texts(value, info)
    longest = max(map(len, found), default=0)
    if len(found) > _MOST_STOPS or longest > _LONGEST_STOP:
        most = f"at most {_MOST_STOPS} texts of at most {_LONGEST_STOP} characters"
        raise Refused(f"stop must be {most}, got {len(found)}, the longest with {longest}", param="stop")
    return found


def _biases(value: Any, info: ValidationInfo) -> tuple[tuple[int, float], ...]:
    """JSON has token ids as texts."""
    given = value if isinstance(value, Mapping) else {} if value is None else {"": value}
    if len(given) > _MOST_BIASES:
        message = f"logit_bias must have at most {_MOST_BIASES} entries, got {len(given)} entries"
        raise Refused(message, param="logit_bias")
    for token, bias in given.items():
        number = isinstance(bias, int | float) and not isinstance(bias, bool) and abs(bias) <= _LARGEST_BIAS
        if not (str(token).isdecimal() and len(str(token)) < 10 and number):
            rule = f"token ids, each with a number within ± {_LARGEST_BIAS}"
            raise Refused(f"logit_bias must be {rule}, got {clip(repr({token: bias}))}", param="logit_bias")
    return tuple(sorted((int(token), float(bias)) for token, bias in given.items()))


def _at_most(count: int) -> AfterValidator:
    def check(value: Any, info: ValidationInfo) -> Any:
        if len(value) > count:
            raise Refused(
                f"{info.field_name} must have at most {count} entries, got {len(value)}", param=info.field_name
            )
        return value

    return AfterValidator(check)


TokenId = Annotated[int, Field(ge=0, le=HIGHEST_TOKEN)]


class StreamOptions(RequestBody):
    include_usage: bool = False
    include_obfuscation: Ignored = None


class AnswerBody(RequestBody):
    """The fields that chats and completions share."""

    model: str = ""
    n: int = Field(1, ge=1, le=_MOST_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=2**31 - 1)
    min_p: float = Field(0.0, ge=0, le=1)
    stop: Annotated[Any, AfterValidator(_stops)] = ()
    stop_token_ids: Annotated[list[TokenId], _at_most(_MOST_STOP_TOKENS)] = []
    ignore_eos: bool = False
    control_tokens: bool | None = None
    user: Ignored = None
    metadata: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    service_tier: Ignored = None
    store: Annotated[Any, only([False], "answers are not kept")] = None
    logit_bias: Annotated[Any, AfterValidator(_biases)] = ()
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    min_tokens: Annotated[Any, only([0], _UNCONSTRAINED)] = None


_ONLY_TEXT = "the model only writes text"
_RENAMED = "it has become tools and tool_choice"


class ChatBody(AnswerBody):
    """The body of `POST /v1/chat/completions`. `kitae.serving.requests` reads messages and tools."""

    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP)
    response_format: Any = None
    modalities: Annotated[Any, only([["text"]], "the model writes text")] = None
    reasoning_effort: Annotated[Any, only(["none"], "the model decides how long it thinks")] = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Annotated[Any, only([{}], "the chat template is used as it is")] = None
    functions: Annotated[Any, only([], _RENAMED)] = None
    function_call: Annotated[Any, only([], _RENAMED)] = None
    audio: Annotated[Any, only([], _ONLY_TEXT)] = None
    prediction: Annotated[Any, only([], _ONLY_TEXT)] = None
    web_search_options: Annotated[Any, only([], _ONLY_TEXT)] = None
    verbosity: Annotated[Any, only([], _ONLY_TEXT)] = None


class CompletionBody(AnswerBody):
    """The body of `POST /v1/completions`. `kitae.serving.requests` reads the prompt."""

    prompt: Any = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    suffix: Annotated[Any, only([""], "the model writes from left to right")] = None
    best_of: int | None = None


class TokenizeBody(RequestBody):
    """The body of `POST /tokenize`: a prompt, or messages with tools."""

    model: Ignored = None
    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    add_special_tokens: bool = True
    control_tokens: bool | None = None


class DetokenizeBody(RequestBody):
    """The body of `POST /detokenize`."""

    model: Ignored = None
    tokens: Annotated[list[TokenId], _at_most(MOST_DETOKENIZED)]
