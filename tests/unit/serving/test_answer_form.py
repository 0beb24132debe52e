"""A schema means the same whichever field it came by; what is no form of an answer is refused by the field's name."""

import json
from typing import Any

import pytest

from kitae.engines.constraint import Constraint
from kitae.serving.answer_form import of_guide, of_response_format
from kitae.serving.refusals import Refused

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_a_schema_is_the_same_by_each_field() -> None:
    wanted = Constraint("json_schema", json.dumps(SCHEMA))
    assert of_response_format({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}) == wanted
    assert of_response_format({"type": "json_schema", "name": "x", "schema": SCHEMA}, "text.format") == wanted
    assert of_guide("guided_json", SCHEMA) == of_guide("guided_json", json.dumps(SCHEMA)) == wanted
    assert of_response_format({"type": "json_object"}) == Constraint.schema({"type": "object"})
    assert of_response_format({"type": "text"}) is None and of_guide("guided_regex", None) is None
    assert of_guide("guided_choice", ["yes", "no"]) == Constraint("choice", '["yes", "no"]')
    assert of_guide("guided_regex", "a+") == Constraint("regex", "a+")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema"}), ("response_format", {"type": "yaml"}),
        ("guided_json", "{"), ("guided_json", "3"), ("guided_choice", []), ("guided_choice", [3]),
        ("guided_regex", 3), ("guided_grammar", ["a"]),
    ],
)  # fmt: skip
def test_what_is_no_form_is_refused(field: str, value: Any) -> None:
    with pytest.raises(Refused, match=field):
        of_response_format(value) if field == "response_format" else of_guide(field, value)
