"""An agent built with OpenAI's SDK, not changed for training: it answers, looks at its answer once more, and is done.

    kitae train examples/openai_agent.toml

OPENAI_BASE_URL and OPENAI_API_KEY, which the SDK reads, point to the policy that is being trained; the question is the
first argument. Nothing here knows of Kitae.
"""

import sys

from openai import OpenAI


def main(question: str) -> None:
    client = OpenAI()
    talk = [{"role": "system", "content": "Answer only."}]
    for asked in (f"{question}", "Check it. Write the right list only."):
        talk.append({"role": "user", "content": asked})
        answer = client.chat.completions.create(model="policy", messages=talk)
        talk.append({"role": "assistant", "content": answer.choices[0].message.content})
    print(talk[-1]["content"])


main(sys.argv[1])
