"""An agent program for the toy recipe, with nothing but the standard library: two turns, then a branch.

What it asks depends on what it heard alone, so a run that is interrupted asks the same as one that is not.
"""

import json
import os
import sys
import urllib.error
import urllib.request


def say(*messages: dict[str, str]) -> dict[str, str]:
    """By chat completions, or with the argument `messages` by Anthropic's API."""
    path = "messages" if "messages" in sys.argv else "chat/completions"
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 8}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/{path}", body, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        told = json.load(reply)
    if path == "messages":
        return {"role": "assistant", "content": told["content"][0]["text"]}
    return {name: told["choices"][0]["message"][name] for name in ("role", "content")}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def main() -> None:
    question = json.load(sys.stdin)["question"]
    first = say(user(question))
    if len(first["content"]) % 5 == 1:
        raise ValueError(f"I do not like {first['content']!r}")
    say(user(question), first, user("Again."))
    say(user(f"In short: {question}"))


main()
