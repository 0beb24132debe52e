"""OpenAI's own client at a server: chats, streams, tools, log-probs, completions, errors. Prints what it found."""

import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", timeout=120)
MODEL = client.models.list().data[0].id
HELLO = [{"role": "user", "content": "Say hello."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def chat(**options):
    return client.chat.completions.create(model=MODEL, messages=options.pop("messages", HELLO), **options)


def main() -> None:
    found = {"version": openai.__version__, "model": MODEL}
    whole = chat(max_tokens=24, temperature=0, logprobs=True, seed=1)
    found["text"] = whole.choices[0].message.content
    found["tokens"] = len(whole.choices[0].logprobs.content)
    found["usage"] = whole.usage.model_dump()

    text, finish, usage = "", None, None
    for chunk in chat(max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
        usage = chunk.usage or usage
    found["streamed"], found["finish"], found["streamed_usage"] = text, finish, usage.model_dump()

    with client.chat.completions.stream(model=MODEL, messages=HELLO, max_tokens=24, temperature=0) as stream:
        found["helper"] = "".join(event.delta for event in stream if event.type == "content.delta")

    top = chat(max_tokens=3, temperature=0, logprobs=True, top_logprobs=2)
    found["top"] = [len(entry.top_logprobs) for entry in top.choices[0].logprobs.content]

    done = client.completions.create(model=MODEL, prompt=["The sky is", "Two and two"], max_tokens=4, n=2, seed=3)
    found["completions"] = [choice.index for choice in done.choices]
    ids = client.completions.create(
        model=MODEL,
        prompt=[[504, 6376, 314]],
        max_tokens=1,
        echo=True,
        logprobs=1,
        extra_body={"return_token_ids": True},
    )
    found["echo"] = ids.choices[0].logprobs.token_logprobs
    found["echoed_ids"] = ids.choices[0].model_extra["prompt_token_ids"]

    try:
        called = chat(tools=[TOOL], tool_choice="required", max_tokens=64, temperature=0.7, seed=5)
        found["required"] = called.choices[0].finish_reason
    except openai.UnprocessableEntityError as error:
        found["required"] = error.code
    plain = chat(tools=[TOOL], max_tokens=16, seed=5)
    found["auto"] = plain.choices[0].finish_reason

    errors = {}
    for name, options in {
        "unknown": {"extra_body": {"frobnicate": 1}},
        "schema": {"response_format": {"type": "json_object"}},
    }.items():
        try:
            chat(**options)
        except openai.BadRequestError as error:
            errors[name] = error.param
    try:
        client.chat.completions.create(model="other", messages=HELLO)
    except openai.NotFoundError as error:
        errors["model"] = error.code
    print(json.dumps({**found, "errors": errors}))


main()
