"""Settings of the verifier."""

from pydantic import Field, JsonValue

from kitae.section import Section


class VerifierConfig(Section):
    """Who judges the answers, and for how long."""

    name: str = Field(
        "exact",
        description="See `kitae verifiers`, or your own: file.py:function; by default that of the task or format.",
    )
    params: dict[str, JsonValue] = Field(default_factory=dict, description="Options of the verifier.")
    timeout: float = Field(10.0, gt=0, description="Seconds of its own time that checking one answer may take.")
    workers: int = Field(2, ge=1, le=256, description="Worker processes.")
    check_gold: bool = Field(True, description="Before training, check that reference answers score 1.")
    max_error_share: float = Field(
        0.5, ge=0, le=1, description="Stop when more than this share of a step's answers could not be judged."
    )
