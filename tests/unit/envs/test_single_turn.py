import asyncio

from kitae.envs.base import Environment, Observation, Opening, SingleTurn
from kitae.types import Message, Prompt, Turn


def test_one_question_one_answer():
    prompt = Prompt("x:1", (Message("system", "Answer only."), Message("user", "Reverse 12, 34")), "34, 12")

    async def episode():
        env: Environment = SingleTurn(prompt)
        try:
            return await env.start(), await env.step(Turn("34, 12"))
        finally:
            await env.close()

    opening, observation = asyncio.run(episode())
    assert opening == Opening(prompt.messages)
    assert observation == Observation(messages=(), done=True)
