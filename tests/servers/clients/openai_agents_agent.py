"""An agent of openai-agents with one tool, then a second question in the same conversation.

Its default is the Responses API; `set_default_openai_api` is its own switch to chats.
"""

import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions")
set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def main() -> None:
    agent = Agent(name="Adder", instructions="Use the tool.", tools=[add], model="gpt-5")
    first = Runner.run_sync(agent, json.load(sys.stdin)["question"])
    Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": "Are you sure?"}])


main()
