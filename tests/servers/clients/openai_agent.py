"""A loop with OpenAI's client: a tool, its result, an answer, one more question. Messages go back as they came."""

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def main() -> None:
    client, question = OpenAI(), json.load(sys.stdin)["question"]
    talk = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": question}]

    def ask():
        with client.chat.completions.stream(model="gpt-5", messages=talk, tools=[TOOL]) as stream:
            for _ in stream:
                pass
            return stream.get_final_completion().choices[0].message

    def answer():
        while True:
            message = ask()
            talk.append(message)
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                given = json.loads(call.function.arguments)
                result = str(given["a"] + given["b"])
                talk.append({"role": "tool", "tool_call_id": call.id, "content": result})

    answer()
    talk.append({"role": "user", "content": "Are you sure?"})
    answer()


main()
