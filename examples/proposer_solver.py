"""Two roles of one model: a proposer writes sums, a solver answers each four times. A sum that is answered right half
of the time is worth most to the proposer, a right answer to the solver:

    kitae train examples/proposer_solver.toml
"""

import asyncio
import re

from kitae.envs.base import Outcome
from kitae.serving.base import Ask, Model
from kitae.types import Message, Prompt


class ProposerSolver:
    def __init__(self, prompt: Prompt, tries: int = 4) -> None:
        self.tries = tries

    async def enter(self) -> None: ...
    async def close(self) -> None: ...

    async def run(self, model: Model) -> Outcome:
        wanted = Message("user", "Write one sum of two whole numbers, such as 47 + 8. Say nothing else.")
        said = (await model.ask(Ask("sum", (wanted,), role="proposer"))).turn.text
        found = re.fullmatch(r"\s*(\d{1,4}) \+ (\d{1,4})\s*", said)
        if found is None:
            return Outcome(roles={"proposer": -1.0}, detail="no sum")
        question = (Message("user", f"{found[0].strip()} = ? Answer with the number only."),)
        asked = [model.ask(Ask(f"try {n}", question, role="solver")) for n in range(self.tries)]
        answers = [answer.turn.text.strip() for answer in await asyncio.gather(*asked)]
        rate = answers.count(str(int(found[1]) + int(found[2]))) / self.tries
        return Outcome(roles={"proposer": 1 - abs(2 * rate - 1), "solver": rate}, detail=said.strip())
