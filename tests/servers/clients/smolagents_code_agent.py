"""smolagents' agent that writes code."""

import json
import sys

from smolagents import CodeAgent, OpenAIModel


def main() -> None:
    agent = CodeAgent(tools=[], model=OpenAIModel("gpt-4o"), max_steps=4)
    agent.run(json.load(sys.stdin)["question"])


main()
