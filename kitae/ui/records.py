"""The records that the API of the pages returns; `ui/records.py` writes the same records as TypeScript.

All of them are frozen and hold plain JSON values: no NaN, which JSON does not have; a value that is not known is null.
"""

import json
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class HeldOut:
    """An evaluation on held-out prompts: `HeldOut(step=15, mean=0.98, low=0.94, high=1.0)`."""

    step: int
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A line of the list of runs: `RunSummary("quickstart-001", …, status="running", step=3, steps=15, eta=61.0)`.

    key: how the other addresses name this run. metric: what `value` and `recent` are, "reward" or "loss". speed: tokens
    sampled in a second, or trained where nothing is sampled. eta: seconds until the end, of a running run. alike: the
    same for runs that differ in nothing but their seed. tags, note: what readers wrote.
    """

    key: str
    name: str
    folder: str
    title: str
    status: str
    step: int
    steps: int | None
    metric: str
    value: float | None
    recent: list[float | None]
    before: HeldOut | None
    after: HeldOut | None
    step_seconds: float | None
    speed: float | None
    eta: float | None
    changed: float
    size: int
    problem: str
    alike: str
    tags: list[str]
    note: str


@dataclass(frozen=True, slots=True)
class Setting:
    """`Setting("training.lr", 2e-05, changed=True)`; changed: not the default."""

    key: str
    value: Any
    changed: bool


@dataclass(frozen=True, slots=True)
class Event:
    """`Event(1763251200.0, "start", "step 0")`."""

    time: float
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class RunDetail:
    """One run: what there is to choose from.

    metrics: names of columns of metrics.jsonl; evaluations: the same of its held-out lines. phases: the columns that
    add up to `step_seconds`. rollouts: how many samples the journal has.
    """

    summary: RunSummary
    metrics: list[str]
    evaluations: list[str]
    phases: list[str]
    settings: list[Setting]
    events: list[Event]
    rollouts: int


@dataclass(frozen=True, slots=True)
class Series:
    """Columns of metrics.jsonl over steps: `Series([1, 2], {"reward": [0.1, 0.2]}, [0], {"avg": [0.5], …})`."""

    steps: list[int]
    columns: dict[str, list[float | None]]
    evaluation_steps: list[int]
    evaluations: dict[str, list[float | None]]


@dataclass(frozen=True, slots=True)
class Brief:
    """A rollout in a list. length: tokens of the model; fate: "trained", "dropped", "skipped", or "" while pending."""

    group: int
    sample: int
    step: int | None
    fate: str
    reason: str
    value: float | None
    outcome: str
    finish: str
    status: str
    length: int
    prompt_id: str
    question: str
    reference: str
    text: str
    detail: str


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """at: how many come before these. next: the cursor to go on from; None: there is no more. total: how many pass all
    filters but the text. searched: how many of those were looked through for the text so far."""

    rows: list[Brief]
    at: int
    next: str | None
    total: int
    searched: int


@dataclass(frozen=True, slots=True)
class TurnView:
    """Who said what: `TurnView("tool", "42", calls=[], name="python", pictures=[])`; calls: `["python(code='6 * 7')"]`;
    pictures: as data: URLs."""

    role: str
    text: str
    calls: list[str]
    name: str
    pictures: list[str]


@dataclass(frozen=True, slots=True)
class SampleView:
    """A rollout of a group, without its tokens. rewards: those of turns, where the environment gave any."""

    sample: int
    value: float | None
    outcome: str
    detail: str
    components: dict[str, float]
    finish: str
    status: str
    length: int
    turns: int
    versions: list[int]
    rewards: list[float]
    text: str
    transcript: list[TurnView]


@dataclass(frozen=True, slots=True)
class GroupView:
    """A prompt and all that was sampled for it. previous, next: the neighbours in the journal that have rollouts."""

    group: int
    prompt_id: str
    messages: list[TurnView]
    reference: str
    context: str
    step: int | None
    fate: str
    reason: str
    version: int
    samples: list[SampleView]
    suspended: int
    previous: int | None
    next: int | None


@dataclass(frozen=True, slots=True)
class ChainTokens:
    """Tokens of one context, with a value for each in every column; null where a column says nothing of a token.

    `ChainTokens(prompt=["<s>", "Hi"], tokens=[42, 7], pieces=["He", "llo"], by_model=[True, True],
    columns={"logprob": [-0.1, -0.7], "version": [3, 3]})`
    """

    prompt: list[str]
    tokens: list[int]
    pieces: list[str]
    by_model: list[bool]
    columns: dict[str, list[float | None]]


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """readable: the run's tokenizer was found; else the pieces are numbers."""

    group: int
    sample: int
    readable: bool
    chains: list[ChainTokens]


@dataclass(frozen=True, slots=True)
class Visit:
    """A prompt asked once: `Visit(group=17, step=3, rate=0.5)`; rate: its mean score."""

    group: int
    step: int | None
    rate: float


@dataclass(frozen=True, slots=True)
class PromptHistory:
    """kind: "mastered" (all right the last time), "dead" (never a point), "flipping" (up and down), or "learning"."""

    prompt_id: str
    question: str
    kind: str
    visits: list[Visit]


@dataclass(frozen=True, slots=True)
class PromptPage:
    """counts: how many prompts are of each kind."""

    rows: list[PromptHistory]
    at: int
    total: int
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Answers not judged for one reason, whatever numbers and quotations it holds; the last of them as examples."""

    detail: str
    count: int
    first_step: int | None
    last_step: int | None
    examples: list[Brief]


@dataclass(frozen=True, slots=True)
class ErrorList:
    total: int
    kinds: list[ErrorKind]


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """A bar of the timeline: `LaneSpan("train", step=3, lane=0, start=12.1, end=14.0)`."""

    part: str
    step: int
    lane: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class LaneView:
    """Who worked when in steps `first` to `last`. busy: the share of that time in which each part was at work."""

    first: int
    last: int
    of: int
    start: float
    end: float
    lanes: dict[str, int]
    busy: dict[str, float]
    spans: list[LaneSpan]
    left_out: int


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """`SettingDifference("training.lr", [1e-5, 2e-5])`: one value for each run; null where it has no such setting."""

    key: str
    values: list[Any]


@dataclass(frozen=True, slots=True)
class Pairing:
    """Prompts that both runs were asked, each by its last visit: mean rates, and the mean of differences with its 95 %
    interval. `Pairing("b", prompts=120, first=0.61, second=0.72, difference=0.11, low=0.05, high=0.17)`"""

    key: str
    prompts: int
    first: float
    second: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class HeldOutPairing:
    """The last evaluations of two runs on the held-out prompts of both: means, their difference with its 95 % interval,
    and the chance p of one at least so large by luck alone. Null, with a reason, where they cannot be compared.

    `HeldOutPairing("b", prompts=128, first=0.52, second=0.98, difference=0.46, low=0.37, high=0.55, p=0.01, reason="")`
    """

    key: str
    prompts: int
    first: float | None
    second: float | None
    difference: float | None
    low: float | None
    high: float | None
    p: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class RunComparison:
    """runs: the first is what the others are compared with. pairings: by what was trained on; held_out: by what was
    not."""

    runs: list[RunSummary]
    metrics: list[str]
    settings: list[SettingDifference]
    pairings: list[Pairing]
    held_out: list[HeldOutPairing]


@dataclass(frozen=True, slots=True)
class ConsoleEnd:
    """The end of console.log. complete: nothing is missing at the beginning."""

    text: str
    complete: bool


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """`Diagnosed("entropy-collapse", "bad", "The entropy has collapsed", "0.310 → 0.010", "raise …")`."""

    rule: str
    severity: str
    title: str
    evidence: str
    advice: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """rules: how many there are to find something by."""

    findings: list[Diagnosed]
    rules: int


@dataclass(frozen=True, slots=True)
class ReportCard:
    """A prompt with some of its answers: `ReportCard("step 3 · reverse/17", "Reverse 1, 2", "2, 1", [sample])`."""

    title: str
    question: str
    reference: str
    samples: list[SampleView]


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """The same prompt at two times: `AnswerPair("Reverse 1, 2", "2, 1", "step 0", "1, 2", 0.0, "step 15", …)`."""

    question: str
    reference: str
    first_at: str
    first: str
    first_value: float | None
    last_at: str
    last: str
    last_value: float | None


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a report says of a run beside the answers that the pages of a run get.

    made: a sentence on when and by what the report was made. measure: what evaluations measure, "accuracy" or "loss".
    first, last: reward or loss of the first and the last step. machine: lines about the hardware and the versions.
    seconds: how long the run worked. paired: the last evaluation against the first, prompt by prompt. moved: how many
    held-out prompts became better, worse, …; empty where their answers were not kept. phases: seconds of all steps by
    phase. busy: the share of the whole time in which each part was at work. every: one of so many steps is in the
    curves. evaluations: how many there were.
    """

    made: str
    measure: str
    first: float | None
    last: float | None
    machine: list[str]
    seconds: float
    paired: HeldOutPairing
    moved: dict[str, int]
    before_after: list[AnswerPair]
    best: list[ReportCard]
    worst: list[ReportCard]
    groups: list[ReportCard]
    phases: dict[str, float]
    busy: dict[str, float]
    every: int
    evaluations: int


RECORDS = (
    HeldOut,
    RunSummary,
    Setting,
    Event,
    RunDetail,
    Series,
    Brief,
    RolloutPage,
    TurnView,
    SampleView,
    GroupView,
    ChainTokens,
    SampleTokens,
    Visit,
    PromptHistory,
    PromptPage,
    ErrorKind,
    ErrorList,
    LaneSpan,
    LaneView,
    SettingDifference,
    Pairing,
    HeldOutPairing,
    RunComparison,
    ConsoleEnd,
    Diagnosed,
    Diagnosis,
    ReportCard,
    AnswerPair,
    RunReport,
)
"""In the order in which they use each other."""


def as_json(body: Any) -> str:
    """A record, or a list or dict of records, as JSON text."""
    return json.dumps(body, default=_plain, allow_nan=False, separators=(",", ":"))


def _plain(record: Any) -> dict[str, Any]:
    if not is_dataclass(record):
        raise TypeError(f"{type(record).__name__} is not a record of the API")
    return {field.name: getattr(record, field.name) for field in fields(record)}
