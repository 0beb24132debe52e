"""Anthropic's own client at a server: messages, streams, tools, counts, errors. Prints what it found."""

import json
import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1].removesuffix("/v1"), api_key="none", timeout=120)
HELLO = [{"role": "user", "content": "Say hello."}]
NUMBER = {"type": "integer"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOL = {"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}


def main() -> None:
    model = client.models.list().data[0].id
    asked = {"model": model, "max_tokens": 24, "messages": HELLO, "temperature": 0}
    whole = client.messages.create(**asked)
    found = {"version": anthropic.__version__, "model": model, "text": whole.content[0].text}
    found["usage"], found["stop"] = whole.usage.model_dump(include={"input_tokens", "output_tokens"}), whole.stop_reason
    counted = client.messages.count_tokens(model=model, messages=HELLO).input_tokens
    found["counted"] = counted == whole.usage.input_tokens
    events = [event.type for event in client.messages.create(**asked, stream=True)]
    found["events"] = [kind for i, kind in enumerate(events) if not i or kind != events[i - 1]]
    with client.messages.stream(**asked) as stream:
        found["streamed"] = "".join(stream.text_stream)
        found["same"] = [block.text for block in stream.get_final_message().content] == [found["text"]]
    begun = client.messages.create(**asked | {"messages": [*HELLO, {"role": "assistant", "content": "Hel"}]})
    found["begun"] = begun.usage.input_tokens - counted
    said = client.messages.create(**asked, tools=[TOOL], tool_choice={"type": "auto"})
    found["tools"] = said.stop_reason
    errors = {}
    for name, options in {
        "model": {"model": "other"},
        "image": {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048},
    }.items():
        try:
            client.messages.create(**asked | options)
        except anthropic.APIStatusError as error:
            errors[name] = [type(error).__name__, error.body["error"]["type"]]
    print(json.dumps({**found, "errors": errors}))


main()
