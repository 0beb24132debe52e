"""The base of every section of the settings."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen; unknown keys, infinities and NaN are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)
