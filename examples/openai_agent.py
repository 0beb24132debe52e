"""An agent built with OpenAI's SDK, not changed for training: it answers, then is asked once more, and is done.

    kitae train examples/openai_agent.toml

OPENAI_BASE_URL and OPENAI_API_KEY, which the SDK reads, point to the policy that is being trained; the question is the
first argument. Nothing here knows of Kitae.
"""

import sys

from openai import OpenAI

SHOWN = {"Reverse 43, 14, 53": "53, 14, 43", "Reverse 31, 67, 59": "59, 67, 31"}


def main(question: str) -> None:
    client = OpenAI()
    talk = [{"role": "system", "content": "Answer only."}]
    for asked, answer in SHOWN.items():
        talk += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    for asked in (question, f"Once more. {question}"):
        talk.append({"role": "user", "content": asked})
        said = client.chat.completions.create(model="policy", messages=talk, max_tokens=16)
        talk.append({"role": "assistant", "content": said.choices[0].message.content})
    print(talk[-1]["content"])


main(sys.argv[1])
