"""The base of every section of the settings."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Frozen; unknown keys, infinities, NaN, and true or false as a number are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        kinds = _kinds(cls.model_fields[info.field_name].annotation)
        values = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(v, bool) for v in values) and kinds & {int, float} and bool not in kinds:
            raise PydanticCustomError("number", "must be a number")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is made of, those of a Literal's values included."""
    parts = get_args(annotation)
    found = {annotation} if isinstance(annotation, type) else {type(annotation)} if not parts else set()
    return found.union(*map(_kinds, parts))
