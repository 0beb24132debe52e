"""An environment of verifiers 0.1: three guesses at a number."""

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    @vf.stop
    async def guessed(self, state: vf.State) -> bool:
        return bool(state["trajectory"]) and state["answer"] in state["trajectory"][-1]["completion"][-1].content

    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="Higher or lower.")]


def right(completion, answer, **kwargs) -> float:
    return float(answer in completion[-1].content)


def load_environment(count: int = 20) -> vf.Environment:
    rows = [{"question": f"Guess number {n}.", "answer": str(n)} for n in range(count)]
    rubric = vf.Rubric(funcs=[right])
    return Guess(dataset=Dataset.from_list(rows), system_prompt="Guess.", rubric=rubric, max_turns=3)
