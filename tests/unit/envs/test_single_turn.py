import asyncio

from kitae.envs.base import Environment, Observation
from kitae.envs.single_turn import SingleTurn
from kitae.types import Message, Prompt


def test_one_question_one_answer():
    prompt = Prompt("x:1", (Message("system", "Answer only."), Message("user", "Reverse 12, 34")), "34, 12")

    async def episode():
        env: Environment = SingleTurn(prompt)
        try:
            return await env.start(), await env.step("34, 12")
        finally:
            await env.close()

    messages, observation = asyncio.run(episode())
    assert messages == prompt.messages
    assert observation == Observation(messages=(), done=True)
