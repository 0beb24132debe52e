"""Sample the prompts of a recipe: from its settings to verified answers, for `kitae sample`, chains and the API."""

from dataclasses import replace
from pathlib import Path

from kitae.config.recipe import override_config
from kitae.config.root import RLConfig
from kitae.errors import ConfigError
from kitae.offline import sampling
from kitae.offline.sampling import SampleOrder, SampleWatcher, Tally, check_output
from kitae.run.plan import RLPlan, make_plan
from kitae.run.services import RunServices
from kitae.types import Group


def sample_file(config: RLConfig, order: SampleOrder, output: Path, watcher: SampleWatcher | None = None) -> Tally:
    """Write the rows that the order asks for into `output`, which must not exist."""
    watcher = watcher or SampleWatcher()
    check_output(output)
    plan = _plan(config, watcher)
    if order.prompts is None:
        if plan.prompts.size is None:
            raise ConfigError(f"prompts must be given for data.task = {config.data.task!r}, which has no end; got none")
        order = replace(order, prompts=plan.prompts.size)
    with RunServices(plan, watcher.note, here=True) as services:
        assert services.pool is not None
        return services.run(
            sampling.sample_file(plan.config, plan.prompts, order, output, services.pool, services.world, watcher)
        )


def sample_groups(config: RLConfig, prompts: int, n: int, watcher: SampleWatcher | None = None) -> list[Group]:
    """All answers to the first prompts of a recipe, verified; nothing is written."""
    watcher = watcher or SampleWatcher()
    plan = _plan(config, watcher)
    asked = ((position, plan.prompts.at(position)) for position in range(prompts))
    with RunServices(plan, watcher.note, here=True) as services:
        assert services.pool is not None
        return services.run(
            sampling.sample_groups(plan.config, asked, prompts, n, services.pool, services.world, watcher)
        )


def _plan(config: RLConfig, watcher: SampleWatcher) -> RLPlan:
    plan = make_plan(override_config(config, ["eval.prompts=0"]), watcher.note)  # nothing is held out here
    assert isinstance(plan, RLPlan)
    return plan
