"""Functions and classes of the user's own as tools."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kitae.envs.tools.own_tools import load_tool, schema_of
from kitae.envs.tools.tool_world import Tools
from kitae.errors import ConfigError
from kitae.types import Message, Prompt, ToolCall, Turn

FILE = '''
import asyncio
from typing import Literal

def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict:
    """The weather of the next days.

    Args:
        city: The name of the place,
            as people write it.
        days (int): How many.
        unit: Of the temperature.

    Returns:
        A mapping.
    """
    if city == "nowhere":
        raise ValueError("there is no such place")
    return {"city": city, "days": days}

async def slow(text: str) -> str:
    """Waits, and says it again."""
    await asyncio.sleep(0.01)
    return text

def bare(x):
    """No hints."""

def silent(x: int) -> int:
    return x

class Counter:
    """Counts."""

    def __init__(self):
        self.count = 0

    def reset(self, start=0, **columns):
        self.count = start
        return f" (from {start})"

    def add(self, by: int) -> int:
        """Adds to the count."""
        self.count += by
        return self.count

    def _hidden(self) -> None:
        """No tool."""

    async def get_reward(self) -> float:
        return self.count / 10
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def turn(*calls: ToolCall, text: str = "") -> Turn:
    return Turn(text, calls=calls)


def prompt(**context: Any) -> Prompt:
    return Prompt("p/0", (Message("user", "Count"),), "", {"question": "Count", **context})


def test_the_schema_is_made_of_hints_and_docstring(file: str) -> None:
    inside = schema_of(load_tool(f"{file}:weather"), "mine.py")["function"]
    assert inside["name"] == "weather" and inside["description"] == "The weather of the next days."
    parameters = inside["parameters"]
    assert parameters["required"] == ["city"]
    assert parameters["properties"]["city"] == {
        "type": "string", "description": "The name of the place, as people write it."
    }  # fmt: skip
    assert parameters["properties"]["days"]["type"] == "integer"
    assert parameters["properties"]["unit"]["enum"] == ["C", "F"]


def test_calls_of_functions(file: str) -> None:
    world = Tools({"tools": [f"{file}:weather", f"{file}:slow", "calculator"]})
    episode = world.make(prompt())

    async def go() -> list[str]:
        opening = await episode.start()
        assert [tool["function"]["name"] for tool in opening.tools] == ["weather", "slow", "calculator"]
        calls = (
            ToolCall("weather", {"city": "Ulm", "days": 2}, "a"),
            ToolCall("slow", {"text": "yes"}, "b"),
            ToolCall("weather", {"city": "nowhere"}, "c"),
        )
        seen = await episode.step(turn(*calls))
        assert (await episode.step(turn(text="done"))).done
        return [m.content for m in seen.messages]

    assert asyncio.run(go()) == [
        '{"city": "Ulm", "days": 2}', "yes", "Error: ValueError: there is no such place"
    ]  # fmt: skip


def test_each_episode_has_its_instance_of_a_class(file: str) -> None:
    world = Tools({"tools": [f"{file}:Counter"]})

    async def play(start: int) -> tuple[str, str, float | None]:
        episode = world.make(prompt(start=start))
        opening = await episode.start()
        assert [tool["function"]["name"] for tool in opening.tools] == ["add"]
        seen = await episode.step(turn(ToolCall("add", {"by": 3}, "a")))
        end = await episode.step(turn(text="done"))
        return opening.messages[-1].content, seen.messages[0].content, end.reward

    assert asyncio.run(play(1)) == ("Count (from 1)", "4", 0.4)
    assert asyncio.run(play(5)) == ("Count (from 5)", "8", 0.8)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("bare", "the argument 'x' of the tool 'bare' .* must have a type hint"),
        ("silent", "must have a docstring"),
        ("nothing", "needs a function 'nothing'"),
    ],
)
def test_tools_that_a_model_could_not_use_are_refused(file: str, name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Tools({"tools": [f"{file}:{name}"]})


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'python'"):
        Tools({"tools": ["pyhton"]})
