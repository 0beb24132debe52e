"""OpenAI's own client and the Responses API of a server. Prints what it found."""

import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", timeout=120)


def main() -> None:
    model = client.models.list().data[0].id
    asked = {"model": model, "input": "Say hello.", "max_output_tokens": 24, "temperature": 0}
    whole = client.responses.create(**asked)
    chat = [{"role": "user", "content": "Say hello."}]
    same = client.chat.completions.create(model=model, messages=chat, max_tokens=24, temperature=0)
    found = {"model": model, "text": whole.output_text, "chat": same.choices[0].message.content}
    found["usage"] = whole.usage.total_tokens == same.usage.total_tokens
    events = list(client.responses.create(**asked, stream=True))
    found["deltas"] = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    found["events"] = [e.type for i, e in enumerate(events) if not i or e.type != events[i - 1].type]
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        ended = events[-1].type == "response.completed"  # the helper gives no answer that was cut off
        found["helper"] = stream.get_final_response().output_text if ended else whole.output_text
    again = client.responses.create(**asked | {"input": "Again."}, previous_response_id=whole.id)
    found["longer"] = again.usage.input_tokens > whole.usage.input_tokens
    found["kept"] = client.responses.retrieve(whole.id).output_text
    client.responses.delete(whole.id)
    errors = {}
    for name, options in {
        "previous": {"previous_response_id": whole.id},
        "tool": {"tools": [{"type": "web_search"}]},
    }.items():
        try:
            client.responses.create(**asked | options)
        except openai.APIStatusError as error:
            errors[name] = [type(error).__name__, error.param]
    print(json.dumps({**found, "errors": errors}))


main()
