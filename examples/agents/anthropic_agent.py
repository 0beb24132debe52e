"""A loop with Anthropic's client: a tool, its results, an answer, one more question. Blocks go back as they came.

env.command = "python examples/agents/anthropic_agent.py"
"""

import json
import sys

from anthropic import Anthropic

NUMBER = {"type": "integer"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOL = {"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}


def main() -> None:
    client, talk = Anthropic(), []
    for question in (json.load(sys.stdin)["question"], "Are you sure?"):
        talk.append({"role": "user", "content": question})
        while talk[-1]["role"] == "user":
            with client.messages.stream(
                model="policy", max_tokens=1024, system="Use the tool.", messages=talk, tools=[TOOL]
            ) as stream:
                said = stream.get_final_message()
            talk.append({"role": "assistant", "content": said.content})
            calls = [block for block in said.content if block.type == "tool_use"]
            results = [(call.id, str(call.input["a"] + call.input["b"])) for call in calls]
            if results:
                told = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results]
                talk.append({"role": "user", "content": told})


main()
