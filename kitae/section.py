"""The base of every section of the settings, and of the tables within sections."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A frozen set of settings. Unknown keys, infinities, NaN, and true or false as a number are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    checks_keys: ClassVar[bool] = False
    """Whether the section itself refuses keys that it has not, since they depend on what else it says."""

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        values = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(v, bool) for v in values) and is_number(cls.model_fields[info.field_name].annotation):
            raise PydanticCustomError("number", "must be a number")
        return value

    def leaves(self, path: str = "") -> Iterator[tuple[str, Any]]:
        """Each setting with its path, tables within tables included, with values as JSON has them.

        `("training.lr", 1e-5)`, `("algorithm.gate.clip_low", 0.2)`.
        """
        dumped = self.model_dump(mode="json")
        for key, value in self:
            if isinstance(value, Section):
                yield from value.leaves(f"{path}{key}.")
            else:
                yield f"{path}{key}", dumped[key]

    @classmethod
    def tables(cls) -> dict[str, "type[Section]"]:
        """The fields that are sections themselves."""
        kinds = {name: info.annotation for name, info in cls.model_fields.items()}
        return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}

    @classmethod
    def known_keys(cls) -> list[str]:
        """Every key that the section may have."""
        return list(cls.model_fields)

    @classmethod
    def usual(cls, path: str = "") -> Iterator[tuple[str, Any]]:
        """Like `leaves`, with the default of each setting; None for a setting without one."""
        tables = cls.tables()
        for key, info in cls.model_fields.items():
            if key in tables:
                yield from tables[key].usual(f"{path}{key}.")
            else:
                default = info.get_default(call_default_factory=True)
                yield f"{path}{key}", list(default) if isinstance(default, tuple) else default


class Table(Section):
    """A section within a section. One value stands for a table that has only its `main` setting.

    Where `main` is "name", `gate = "clip"` is short for `gate = { name = "clip" }`. Without `main` there is no short
    form.
    """

    main: ClassVar[str] = ""

    @classmethod
    def spelled(cls, value: Any) -> Any:
        """The table that a short form stands for; everything else as it is."""
        return value if not cls.main or isinstance(value, Mapping | Table) else {cls.main: value}

    @model_validator(mode="before")
    @classmethod
    def _spell(cls, value: Any) -> Any:
        return cls.spelled(value)


def is_number(annotation: Any) -> bool:
    """Whether a setting with this annotation takes numbers, and neither true nor false."""
    kinds = _kinds(annotation)
    return bool(kinds & {int, float}) and bool not in kinds


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is made of, those of a Literal's values included."""
    parts = get_args(annotation)
    found = {annotation} if isinstance(annotation, type) else {type(annotation)} if not parts else set()
    return found.union(*map(_kinds, parts))
