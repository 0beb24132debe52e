"""The verifier and the environment of a run: started once, tried on reference answers, then used by the run itself.

They live in an event loop that all of the run shares, so that they outlast a trainer that is lost and started again.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

from kitae.config.root import RLConfig
from kitae.envs.base import World
from kitae.envs.environment_registry import open_world
from kitae.envs.episode_context import ResponseVerifier
from kitae.errors import VerifierError
from kitae.evaluation.suites import own_suite
from kitae.run.doubts import doubts_of_lengths
from kitae.run.plan import Note, Plan, RLPlan, fetch_model
from kitae.types import Prompt
from kitae.verifiers.pool import VerifierPool, validate, validate_wrong
from kitae.verifiers.remote_pool import HostedPool
from kitae.workers.base import Cluster

T = TypeVar("T")

_GOLD_CHECKS = 16  # reference answers that the verifier is tried on
_WRONG_CHECKS = 4  # wrong ones


class RunServices:
    """`with RunServices(plan, note) as services: services.run(work())`.

    When the block begins, the verifier scores reference answers, and the model is here. An offline run has neither
    verifier nor environment, and gets the event loop alone. note: where the verifier's own messages go; whoever watches
    the run sets another once there is a run to watch. here: the verifier stays on this machine, whatever the settings
    of the cluster say.
    """

    world: World

    def __init__(self, plan: Plan, note: Note, *, here: bool = False) -> None:
        self.plan = plan
        self.note = note
        self.pool: VerifierPool | None = None  # None: a pool on the cluster takes its place, when that is open
        self._here = here
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._work: asyncio.Task[Any] | None = None

    def __enter__(self) -> Self:
        try:
            if isinstance(self.plan, RLPlan):
                self._runner.run(self._start(self.plan))
                fetch_model(self.plan.config, self.note)
                for text in doubts_of_lengths(self.plan.config, self.plan.prompts):
                    self.note(f"warning: {text}")
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._runner:
            self._runner.run(self._close())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns or raises, in the event loop of the services. It is interrupted like `asyncio.run`."""

        async def known() -> T:
            self._work = asyncio.current_task()
            return await work

        return self._runner.run(known())

    async def verifier(self, stack: AsyncExitStack, cluster: Cluster | None) -> ResponseVerifier:
        """The verifier: the pool that was tried, or one on `cluster.verifiers` worker processes of the cluster, which
        ends with the stack."""
        if self.pool is not None:
            return self.pool
        assert isinstance(self.plan, RLPlan) and cluster is not None
        c = self.plan.config
        hosted = HostedPool(c.verifier, cluster, c.cluster.verifiers, 10 * c.cluster.patience, self._tell)
        return await stack.enter_async_context(hosted)

    async def _start(self, plan: RLPlan) -> None:
        config, task = plan.config, own_suite(plan.config)
        hidden = [Path(config.run.dir), *config.data.files, *(f for suite, _ in plan.suites for f in suite.data.files)]
        self.world = await self._stack.enter_async_context(open_world(config.env, hidden))
        if _is_hosted(config) and not self._here:
            async with task.pool(self._tell, workers=1) as tried:
                await self._try(tried, plan)
        else:
            self.pool = await self._stack.enter_async_context(task.pool(self._tell))
            await self._try(self.pool, plan)
        for suite, _ in plan.suites:
            async with suite.pool(self._tell, workers=1):
                pass

    async def _try(self, pool: VerifierPool, plan: RLPlan) -> None:
        if plan.config.verifier.check_gold:
            await self._check_gold(pool, [plan.prompts.at(i) for i in range(_GOLD_CHECKS)])
            await self._check_wrong(pool, [plan.prompts.at(i) for i in range(_WRONG_CHECKS)])

    async def _check_gold(self, pool: VerifierPool, prompts: Sequence[Prompt]) -> None:
        """Reference answers must score 1, and references must be readable: anything else would teach nonsense."""
        bad = await validate(pool, prompts)
        if not bad:
            return
        prompt, score = bad[0]
        verdict = f"{score.value:g} {score.detail}".strip() if score.valid else f"not judged: {score.detail}"
        message = (
            f"{len(bad)} of {len(prompts)} reference answers do not score 1 under this verifier; the first: "
            f"{prompt.id} with reference {str(prompt.reference)[:80]!r} → {verdict}"
        )
        if len(bad) == len(prompts):
            raise VerifierError(f"{message}. If references are no answers, set verifier.check_gold=false")
        self.note(message)

    async def _check_wrong(self, pool: VerifierPool, prompts: Sequence[Prompt]) -> None:
        """Wrong answers must have scores, or a policy that is often wrong would learn nothing."""
        bad = await validate_wrong(pool, prompts)
        if not bad:
            return
        prompt, answer, score = bad[0]
        message = (
            f"{len(bad)} of {len(prompts)} wrong answers are not judged by this verifier (a wrong answer is a 0); the "
            f"first: {prompt.id} with the answer {answer[:80]!r} → {score.detail}"
        )
        if len(bad) == len(prompts):
            raise VerifierError(f"{message}. To train all the same, set verifier.check_gold=false")
        self.note(message)

    def _tell(self, text: str) -> None:
        self.note(text)

    async def _close(self) -> None:
        """A second Ctrl-C leaves the work where it was: it ends before what it uses does."""
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        await self._stack.aclose()


def _is_hosted(config: RLConfig) -> bool:
    return config.cluster.backend != "none" and config.cluster.verifiers > 0
