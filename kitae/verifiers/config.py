"""Settings of the verifier."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, JsonValue, model_validator

from kitae.plugins import is_plugin
from kitae.section import Section


class VerifierConfig(Section):
    """Who judges the answers, and for how long."""

    name: str = Field(
        "exact",
        description="See `kitae verifiers`, or your own: file.py:function; by default that of the task or format.",
    )
    style: Literal["kitae", "trl", "verl", "openrlhf"] = Field(
        "kitae",
        description="How `name` wants to be called, where it is a reward function that was written for another "
        "trainer.",
    )
    params: dict[str, JsonValue] = Field(default_factory=dict, description="Options of the verifier.")
    timeout: float = Field(10.0, gt=0, description="Seconds of its own time that checking one answer may take.")
    workers: int = Field(2, ge=1, le=256, description="Worker processes.")
    check_gold: bool = Field(True, description="Before training, check that reference answers score 1.")
    max_error_share: float = Field(
        0.5, ge=0, le=1, description="Stop when more than this share of a step's answers could not be judged."
    )

    @model_validator(mode="before")
    @classmethod
    def _styled(cls, values: Any) -> Any:
        """A function of another trainer's style is an option of the verifier that calls it so."""
        if not isinstance(values, Mapping) or (style := values.get("style", "kitae")) == "kitae":
            return values
        name, params = values.get("name"), values.get("params") or {}
        if name == style:
            return values
        if not isinstance(name, str) or not (is_plugin(name) or (style == "openrlhf" and name.startswith("http"))):
            raise ValueError(
                f"verifier.style {style!r} is of a reward function, verifier.name = 'file.py:f', got {name!r}"
            )
        return {**values, "name": style, "params": {"function": name, **params}}
