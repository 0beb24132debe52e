"""A loop with OpenAI's client and its Responses API: a tool, its result, an answer, one more question.

env.command = "python examples/agents/responses_agent.py"
"""

import json
import sys

import openai
from openai import OpenAI
from pydantic import BaseModel


class add(BaseModel):
    """Adds two numbers."""

    a: int
    b: int


def main() -> None:
    client, news = OpenAI(), [{"role": "user", "content": json.load(sys.stdin)["question"]}]
    tools, last = [openai.pydantic_function_tool(add)["function"] | {"type": "function"}], None
    for question in (None, "Are you sure?"):
        news = [{"role": "user", "content": question}] if question else news
        while news:
            told = client.responses.create(
                model="policy", instructions="Use the tool.", input=news, tools=tools, previous_response_id=last
            )
            calls = [item for item in told.output if item.type == "function_call"]
            results = [(call.call_id, add.model_validate_json(call.arguments)) for call in calls]
            news = [{"type": "function_call_output", "call_id": i, "output": str(x.a + x.b)} for i, x in results]
            last = told.id


main()
