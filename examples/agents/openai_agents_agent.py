"""An agent of openai-agents with one tool, then a second question in the same talk; it speaks the Responses API.

env.command = "python examples/agents/openai_agents_agent.py"
"""

import json
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def main() -> None:
    agent = Agent(name="Adder", instructions="Use the tool.", tools=[add], model="policy")
    first = Runner.run_sync(agent, json.load(sys.stdin)["question"])
    Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": "Are you sure?"}])


main()
