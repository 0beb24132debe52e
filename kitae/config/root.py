"""The settings of a run as a whole: one root for each kind of run, made of the sections that lie beside their parts.

Importing this costs little (no torch). `load` reads recipes into a root; `rules` has what sections may not say
together.
"""

from collections.abc import Iterator
from typing import Any, Self

from pydantic import model_validator

from kitae.algorithms.config import AlgorithmConfig
from kitae.config import rules
from kitae.data.config import DataConfig
from kitae.engines.config import EngineConfig, SamplingConfig
from kitae.models.config import ModelConfig
from kitae.observe.config import ObserveConfig
from kitae.pipeline.config import EvalConfig, PipelineConfig
from kitae.section import Section
from kitae.store.config import CheckpointConfig, RunConfig
from kitae.trainer.config import TrainingConfig
from kitae.verifiers.config import VerifierConfig


class Root(Section):
    """A frozen set of sections: a subclass has a field for each, and names the rules that hold between them."""

    def contradictions(self) -> Iterator[str]:
        yield from ()

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if problems := list(self.contradictions()):
            raise ValueError("\n".join(problems))
        return self

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        kinds = {name: info.annotation for name, info in cls.model_fields.items()}
        return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)

    def flat(self) -> dict[str, Any]:
        """`{"training.lr": 1e-5, …}`, for display and comparison."""
        dumped = self.model_dump(mode="json")
        return {f"{section}.{key}": value for section, keys in dumped.items() for key, value in keys.items()}

    def given(self) -> dict[str, Any]:
        """The nested values that this was resolved from, as far as they matter: what another may be built from."""
        return self.model_dump(mode="json")

    def changed(self) -> dict[str, Any]:
        """Like `flat`, only what differs from the defaults."""
        usual = {
            f"{name}.{key}": info.get_default(call_default_factory=True)
            for name, section in self.sections().items()
            for key, info in section.model_fields.items()
        }
        return {key: value for key, value in self.flat().items() if value != _as_json(usual[key])}


class RLConfig(Root):
    """All settings of a run of reinforcement learning."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig
    verifier: VerifierConfig = VerifierConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    pipeline: PipelineConfig = PipelineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    observe: ObserveConfig = ObserveConfig()

    def contradictions(self) -> Iterator[str]:
        yield from rules.groups(self.algorithm, self.training)
        yield from rules.sizes(self.algorithm, self.training, self.sampling)
        yield from rules.exact(self.model, self.engine)
        yield from rules.reference(self.algorithm, self.model)
        yield from rules.staleness(self.algorithm, self.pipeline)

    def given(self) -> dict[str, Any]:
        """What the preset of the algorithm filled in may go with the choice that read it."""
        return super().given() | {"algorithm": self.algorithm.choices()}

    def changed(self) -> dict[str, Any]:
        """Of the algorithm, what differs from its preset."""
        own = {f"algorithm.{key}" for key in self.algorithm.choices()}
        return {k: v for k, v in super().changed().items() if k in own or not k.startswith("algorithm.")}


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
