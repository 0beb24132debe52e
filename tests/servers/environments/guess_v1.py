"""An environment of verifiers.v1: three guesses at a number, told each time whether it is higher or lower.

Its harness runs in this process, as the package allows, so that nothing has to be installed for it.
"""

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["GuessHarness", "GuessTaskset"]


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.secret) in trace.branches[-1].messages[-1].content)

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.branches[-1].messages) < 6)


class GuessConfig(vf.TasksetConfig):
    count: int = 20


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        for n in range(self.config.count):
            yield GuessTask(GuessData(prompt=f"Guess number {n}.", system_prompt="Guess.", secret=n), self.config.task)


class GuessHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        system, prompt = self.resolve_prompt(data)
        talk = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        for _ in range(3):
            done = await client.chat.completions.create(model=ctx.model, messages=talk)
            said = done.choices[0].message.content
            talk.append({"role": "assistant", "content": said})
            if str(data.secret) in said:
                break
            talk.append({"role": "user", "content": "Higher or lower."})
        return vf.ProgramResult(0, "", "")
