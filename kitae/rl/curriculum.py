"""Which visits to a prompt are left out: those to prompts that were mastered the last time, by and large."""

import random
from collections.abc import Mapping
from statistics import fmean

from kitae.rl.config import PipelineConfig
from kitae.types import Group, Prompt


class Curriculum:
    """pass_rates: by prompt id, the group that asked it the last time, and the mean score of that group."""

    def __init__(self, config: PipelineConfig, seed: int, pass_rates: Mapping[str, tuple[int, float]]) -> None:
        self.config = config
        self._seed = seed
        self._rates = dict(pass_rates)

    def skips(self, group_id: int, prompt: Prompt) -> str:
        """Why this visit is left out, by a coin that knows only the seed and the visit; empty: it is not."""
        if not self.active(self.config):
            return ""
        _, rate = self._rates.get(prompt.id, (-1, float("-inf")))
        coin = random.Random(f"{self._seed}/{group_id}").random()
        return "mastered" if rate >= self.config.mastered and coin >= self.config.mastered_visits else ""

    def record(self, group: Group) -> None:
        """Remember the mean score of a visit, if it is the newest one to its prompt."""
        if not self.active(self.config) or not group.valid:
            return
        last, _ = self._rates.get(group.prompt.id, (-1, 0.0))
        if group.id >= last:
            self._rates[group.prompt.id] = (group.id, fmean(r.score.value for r in group.valid if r.score))

    @staticmethod
    def active(config: PipelineConfig) -> bool:
        return config.mastered_visits < 1
