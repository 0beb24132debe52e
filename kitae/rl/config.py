"""Settings of the loops and of evaluation."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from kitae.section import Section, Table


class RefillConfig(Table):
    """New prompts in place of dropped groups; `refill = 3.0` is short for `refill.most`."""

    main = "most"

    most: float = Field(
        0.0, ge=0, description="Most replacements in a step, as a multiple of prompts_per_step; 0: none."
    )
    oversample: float = Field(1.0, ge=1, le=16, description="Prompts asked at once for each that is to be trained on.")

    @model_validator(mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(
                "pipeline.refill must be a number, the most replacements as a multiple of prompts_per_step (3.0 is "
                f"what true was), got {value}"
            )
        return value

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.oversample > 1 and not self.most:
            raise ValueError(
                f"pipeline.refill.oversample = {self.oversample:g} needs pipeline.refill.most above 0, or none is "
                "replaced by another"
            )
        return self


class PipelineConfig(Section):
    """How far generation may run ahead of training."""

    max_staleness: int = Field(
        0, ge=0, le=64, description="Policy versions a sample may be old when it is trained on; 0 is on-policy."
    )
    in_flight: Literal["keep", "recompute"] = Field(
        "keep", description="At a weight update, sequences in flight keep their cache, or compute it anew."
    )
    overdue: Literal["wait", "drop"] = Field(
        "wait", description="A batch waits for groups that would become too old, or goes on without them."
    )
    mastered: float = Field(1.0, description="Mean score at which a prompt counts as mastered.")
    mastered_visits: float = Field(
        1.0, gt=0, le=1, description="How often a prompt that was mastered the last time is asked again, as a share."
    )
    stall_limit: float = Field(1800.0, gt=0, description="Seconds without any movement after which a run ends.")
    refill: RefillConfig = RefillConfig()


class EvalConfig(Section):
    """Held-out evaluation before, during and after training."""

    prompts: int = Field(64, ge=0, description="Held-out prompts; 0: no evaluation.")
    samples: int = Field(1, ge=1, description="Samples of each prompt.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    top_k: int = Field(0, ge=0, description="Keep only the k likeliest tokens; 0: all.")
    min_p: float = Field(0.0, ge=0, lt=1, description="Drop tokens less likely than this share of the likeliest.")
    every: int = Field(0, ge=0, description="Steps between evaluations; 0: only before and after.")
    max_tokens: int = Field(0, ge=0, description="Most tokens in an answer; 0: as in training, or as the suite says.")
    suites: tuple[str, ...] = Field((), description="Other suites that are asked too (kitae suites): gsm8k, svamp …")
    data: str | None = Field(
        None, description="Folder with the data of suites, e.g. DIR/gsm8k/test.jsonl; not set: the hub."
    )

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(f"eval.samples must be 1 when eval.temperature is 0 (greedy), got {self.samples}")
        return self
