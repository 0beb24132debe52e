"""smolagents' agent that calls tools: `add`, then its own `final_answer`."""

import json
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def main() -> None:
    agent = ToolCallingAgent(tools=[add], model=OpenAIModel("gpt-4o"), max_steps=4)
    agent.run(json.load(sys.stdin)["question"])


main()
