"""Generated requests: every instruction can be followed, and is read by the verifier as it is asked for."""

import json
import random
from typing import Any

import pytest

from kitae.data.instructions import FAMILIES, draw_instructions
from kitae.data.tasks import TASKS
from kitae.verifiers.instructions.instruction_verifier import KINDS, instructions

BUILDERS = [build for family in FAMILIES for build in family]


def follow(id: str, arguments: dict[str, Any]) -> tuple[str, str]:
    """A response that follows the instruction, and one that does not."""
    n = next((v for v in arguments.values() if isinstance(v, int)), 0)
    few, many = ("One. ", "One two. " * 200)
    match id.split(":")[1]:
        case "english_lowercase":
            return "all of this is lower case text in english", "Not This Text in English"
        case "english_capital":
            return "ALL OF THIS IS TEXT IN CAPITALS", "not this"
        case "number_words" | "number_sentences":
            return (many, few) if arguments["relation"] == "at least" else (few, many)
        case "no_comma":
            return "none here", "one, here"
        case "number_bullet_lists":
            return "* point\n" * n, "* point\n" * (n + 1)
        case "multiple_sections":
            return "".join(f"SECTION {i + 1}\ntext\n" for i in range(n)), "SECTION 1\ntext"
        case "number_highlighted_sections":
            return " ".join(f"*part {i}*" for i in range(n)), "plain"
        case "title":
            return "<<A title>>\ntext", "A title\ntext"
        case "number_placeholders":
            return "[name] " * n, "name"
        case "existence":
            return " ".join(arguments["keywords"]), "nothing"
        case "frequency":
            return f"{arguments['keyword']} " * n, arguments["keyword"]
        case "forbidden_words":
            return "nothing", f"say {arguments['forbidden_words'][0]} again"
        case "letter_frequency":
            return arguments["letter"] * n, arguments["letter"] * (n - 1) + "!"
        case "end_checker":
            return f"Text. {arguments['end_phrase']}", f"{arguments['end_phrase']} More text."
        case "postscript":
            return f"Text.\n{arguments['postscript_marker']} more", "Text."
        case "quotation":
            return '"All of it"', "None of it"
    raise AssertionError(id)


@pytest.mark.parametrize("build", BUILDERS)
def test_each_instruction_can_be_followed_and_broken(build: Any) -> None:
    for seed in range(20):
        id, arguments, asked = build(random.Random(seed))
        assert id in KINDS and asked.strip()
        good, bad = follow(id, arguments)
        reference = {"instructions": [{"id": id, "kwargs": arguments}]}
        assert instructions(good, reference, {}).value == 1, (asked, good)
        assert instructions(bad, reference, {}).value == 0, (asked, bad)


def test_requests_ask_for_different_things_and_say_all_of_them() -> None:
    task = TASKS["instructions"]
    counts = set()
    for index in range(200):
        messages, answer = task.problem(0, "train", {"constraints": 5}, index)
        found = json.loads(answer)["instructions"]
        counts.add(len(found))
        assert len({entry["id"] for entry in found}) == len(found)
        for entry in found:
            for value in entry["kwargs"].values():
                for part in value if isinstance(value, list) else [value]:
                    assert str(part) in messages[-1].content
    assert counts == {1, 2, 3, 4, 5}
    assert draw_instructions(random.Random(1), {"constraints": 1}) == draw_instructions(
        random.Random(1), {"constraints": 1}
    )
