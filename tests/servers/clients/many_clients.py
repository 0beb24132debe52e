"""Two hundred clients at once, half of them reading streams. Prints how they fared."""

import asyncio
import json
import sys
import time

import openai

COUNT, TOKENS = int(sys.argv[2]), 16


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=sys.argv[1], api_key="none", timeout=500, max_retries=50)
    model = (await client.models.list()).data[0].id

    async def one(number: int) -> tuple[int, int, str]:
        messages = [{"role": "user", "content": f"Tell me about the number {number % 20}."}]
        options = {"max_tokens": TOKENS, "seed": number % 20, "extra_body": {"ignore_eos": True}}
        if number % 2:
            done = await client.chat.completions.create(model=model, messages=messages, **options)
            return number % 20, done.usage.completion_tokens, done.choices[0].message.content
        text, tokens = "", 0
        stream = await client.chat.completions.create(
            model=model, messages=messages, stream=True, stream_options={"include_usage": True}, **options
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return number % 20, tokens, text

    began = time.monotonic()
    found = await asyncio.gather(*map(one, range(COUNT)))
    texts: dict[int, set[str]] = {}
    for question, _, text in found:
        texts.setdefault(question, set()).add(text)
    print(json.dumps({
        "answers": len(found),
        "tokens": sorted({tokens for _, tokens, _ in found}),
        "different": {str(question): len(told) for question, told in texts.items() if len(told) > 1},
        "seconds": time.monotonic() - began,
    }))  # fmt: skip


asyncio.run(main())
