"""The functions of one algorithm, ready to call: settings filled in, a user's own loaded, what they need known."""

from kitae.algorithms.config import AlgorithmConfig, refuse_unread
from kitae.algorithms.requirements import Trait, traits_of
from kitae.algorithms.stages import Function, resolve_stages


class Functions:
    """`Functions(config, max_tokens=64)`; executes a user's files and refuses what is wrong with them."""

    def __init__(self, config: AlgorithmConfig, max_tokens: int) -> None:
        settings = config.model_dump()
        if config.constant_length == "max_tokens":
            settings["constant_length"] = max_tokens
        found = resolve_stages(settings)
        self._stages = {key: functions for key, functions in found.items() if key != "kl" or config.kl_coef}
        refuse_unread(config, self._stages)
        self.traits = Trait(0)
        for function in (f for found in self._stages.values() for f in found.values()):
            self.traits |= traits_of(function)

    def several(self, stage: str) -> dict[str, Function]:
        """Those of a stage that may combine some, by name."""
        return self._stages[stage]

    def one(self, stage: str) -> Function:
        (function,) = self._stages[stage].values()
        return function

    def of(self, stage: str) -> Trait:
        """What the functions of a stage declare."""
        found = Trait(0)
        for function in self._stages.get(stage, {}).values():
            found |= traits_of(function)
        return found
