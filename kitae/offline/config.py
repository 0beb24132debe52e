"""Settings of the kinds of run, and of those that train on a file of examples."""

from collections.abc import Iterator
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from kitae.algorithms.preferences import PREFERENCE_LOSSES
from kitae.section import Section, Table
from kitae.trainer.config import LearningConfig


class MethodConfig(Section):
    """What kind of run this is; each kind has settings of its own."""

    kind: str


class RLMethod(MethodConfig):
    """Reinforcement learning with verifiable rewards: the kind of run that a recipe is unless it says otherwise."""

    kind: Literal["rl"] = Field("rl", description="The kind of run.")


class SFTMethod(MethodConfig):
    """Supervised fine-tuning: the likelihood of demonstrations."""

    kind: Literal["sft"] = Field("sft", description="The kind of run.")
    loss: Literal["likelihood", "dft"] = Field(
        "likelihood",
        description="dft weighs each token by its probability, so that what the model finds unlikely pulls less.",
    )


class DPOMethod(MethodConfig):
    """Preference optimisation on pairs of answers: the DPO family."""

    kind: Literal["dpo"] = Field("dpo", description="The kind of run.")
    loss: str = Field(
        "sigmoid", description=f"{', '.join(PREFERENCE_LOSSES)}; `kitae algorithms dpo` has the formulas."
    )
    beta: float | None = Field(None, gt=0, description="Strength of the preference; null: what is usual for the loss.")
    label_smoothing: float | None = Field(
        None, ge=0, lt=1, description="Share of pairs thought to be labelled the wrong way: of 'smoothed' and 'robust'."
    )
    target_margin: float | None = Field(None, ge=0, description="γ of 'simpo': by how much the better answer must win.")
    sft_coef: float = Field(0.0, ge=0, description="Coefficient of the likelihood of chosen answers, a mean per token.")

    @property
    def settings(self) -> dict[str, float | None]:
        """What a loss may read; None: not given."""
        return self.model_dump(include={"beta", "label_smoothing", "target_margin"})


class KTOMethod(MethodConfig):
    """Kahneman–Tversky optimisation: single answers, each good or bad."""

    kind: Literal["kto"] = Field("kto", description="The kind of run.")
    beta: float = Field(0.1, gt=0, description="How fast gains and losses saturate.")
    desirable: float = Field(1.0, ge=0, description="Weight of good answers.")
    undesirable: float = Field(1.0, ge=0, description="Weight of bad answers.")


class RewardMethod(MethodConfig):
    """A reward model: a score that is higher for the preferred answer of a pair."""

    kind: Literal["reward"] = Field("reward", description="The kind of run.")
    centring: float = Field(0.0, ge=0, description="Coefficient of the squared sum of both scores: keeps them near 0.")
    margin_coef: float = Field(
        0.0, ge=0, description="Times the margin of a row: by how much its scores must differ. A row without one has 0."
    )


class JSD(NamedTuple):
    """Which divergence it is: `JSD(beta=0.5, temperature=1.0)`."""

    beta: float
    temperature: float


class FileTeacherConfig(Table):
    """The teacher; `teacher = "PATH"` is short for `teacher.path`."""

    main = "path"

    path: str = Field("", description="The teacher: a folder, a hub id, a finished run, or a short name.")


class TeacherConfig(FileTeacherConfig):
    """The teacher, and where it runs; `teacher = "PATH"` is short for `teacher.path`."""

    place: Literal["trainer", "process"] = Field(
        "trainer",
        description="Where it runs: in the process of the trainer, or in one of its own, replaced when it dies.",
    )
    device: str = Field("", description="Device of its own process: cpu, cuda:1 …; empty: model.device.")
    threads: int = Field(0, ge=0, description="Threads of its own process, on a CPU; 0: as many as the trainer has.")
    url: str = Field("", description="Or a server with /v1/completions: `http://localhost:8000/v1`.")
    model: str = Field("", description="Its name on that server.")
    key_env: str = Field("", description="Environment variable with the key of that server; empty: none.")
    concurrency: int = Field(16, ge=1, description="Requests to that server at once.")
    cache: str = Field("", description="A folder that keeps the answers of that server; empty: none.")


class DistilMethod(RLMethod):
    """Distillation on the student's own samples: a teacher says how likely their tokens are."""

    kind: Literal["distil"] = Field("distil", description="The kind of run.")  # type: ignore[assignment]
    loss: Literal["reverse-kl", "jsd"] = Field(
        "reverse-kl",
        description="reverse-kl: a policy gradient, from the log-prob of each sampled token. jsd: the gradient of a "
        "divergence over the whole vocabulary, from the teacher's logits.",
    )
    beta: float | None = Field(
        None, ge=0, le=1, description="Of jsd: 0 is the forward KL, 1 the reverse KL; not set: 0.5."
    )
    temperature: float | None = Field(
        None, gt=0, description="Of jsd: what both logits are divided by; not set: 1. reverse-kl has that of sampling."
    )
    teacher: TeacherConfig = TeacherConfig()

    @property
    def divergence(self) -> JSD | None:
        if self.loss != "jsd":
            return None
        return JSD(0.5 if self.beta is None else self.beta, self.temperature or 1.0)

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if problems := list(self._contradictions()):
            raise ValueError("\n".join(problems))
        return self

    def _contradictions(self) -> Iterator[str]:
        t = self.teacher
        if bool(t.path) == bool(t.url):
            got = "both" if t.path else "none"
            yield f"method.kind = 'distil' needs exactly one of method.teacher.path and method.teacher.url, got {got}"
        if t.url and not t.model:
            yield "method.teacher.url needs method.teacher.model, the name of the teacher on that server, got none"
        if t.url and self.loss == "jsd":
            yield (
                "method.loss = 'jsd' needs method.teacher.path, which gives all logits, got method.teacher.url, which "
                "gives log-probs of single tokens"
            )
        for key in ("beta", "temperature"):
            if self.loss != "jsd" and getattr(self, key) is not None:
                yield f"method.{key} belongs to method.loss = 'jsd', got {getattr(self, key):g} with {self.loss!r}"
        if t.place == "process" and t.url:
            yield (
                "method.teacher.place = 'process' is for method.teacher.path, got method.teacher.url, which runs "
                "already"
            )
        if t.place == "process" and self.loss == "jsd":
            yield (
                "method.loss = 'jsd' needs method.teacher.place = 'trainer', which gives all logits, got 'process', "
                "which gives log-probs of single tokens"
            )
        for key in ("device", "threads"):
            if (value := getattr(t, key)) and t.place != "process":
                yield f"method.teacher.{key} belongs to method.teacher.place = 'process', got {value!r}"
        for key in ("model", "key_env", "cache"):
            if (value := getattr(t, key)) and not t.url:
                yield f"method.teacher.{key} belongs to method.teacher.url, which is not set, got {value!r}"


class DistilFileMethod(MethodConfig):
    """Distillation on demonstrations: the divergence from a teacher at each of their tokens."""

    kind: Literal["distil-file"] = Field("distil-file", description="The kind of run.")
    teacher: FileTeacherConfig = FileTeacherConfig()
    beta: float = Field(0.5, ge=0, le=1, description="0 is the forward KL, 1 the reverse KL.")
    temperature: float = Field(1.0, gt=0, description="What both logits are divided by.")


class StageTraining(LearningConfig):
    """The optimizer, and how much of the data it sees."""

    steps: int = Field(0, ge=0, description="Steps to train: one batch each; 0: as many as `epochs` take.")
    epochs: float = Field(1.0, gt=0, description="Passes over the examples, where `steps` is 0.")
    batch: int = Field(32, ge=1, description="Examples in a batch.")


class StageEval(Section):
    """Evaluation on held-out examples before, during and after training."""

    examples: int = Field(64, ge=0, description="Held-out examples; 0: no evaluation.")
    every: int = Field(0, ge=0, description="Steps between evaluations; 0: only before and after.")
