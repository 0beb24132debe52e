"""The settings of a run as a whole: one root for each kind of run, made of the sections that lie beside their parts.

Importing this costs little (no torch). `recipe` reads recipes into a root; `rules` has what sections may not say
together.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import model_validator

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.preferences import preference_complaints
from kitae.config import rules
from kitae.data.config import EXAMPLE_SOURCES, SOURCES, DataConfig, ExamplesConfig, usual_verifier
from kitae.engines.config import EngineConfig, SamplingConfig
from kitae.envs.config import EnvConfig
from kitae.errors import ConfigError
from kitae.models.config import ModelConfig
from kitae.observe.config import ObserveConfig
from kitae.offline.config import (
    DistilFileMethod,
    DistilMethod,
    DPOMethod,
    KTOMethod,
    MethodConfig,
    RewardMethod,
    RLMethod,
    SFTMethod,
    StageEval,
    StageTraining,
)
from kitae.rl.config import EvalConfig, PipelineConfig
from kitae.section import Section
from kitae.store.config import CheckpointConfig, RunConfig
from kitae.trainer.config import LearningConfig, TrainingConfig
from kitae.verifiers.config import VerifierConfig
from kitae.workers.config import ClusterConfig


class Root(Section):
    """A frozen set of sections: a subclass has a field for each, and names the rules that hold between them.

    These are what every kind of run has.
    """

    run: RunConfig = RunConfig()
    method: MethodConfig
    model: ModelConfig = ModelConfig()
    training: LearningConfig
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()

    def contradictions(self) -> Iterator[str]:
        yield from ()

    @property
    def title(self) -> str:
        """What is trained, how, and on what: `"grpo on reverse with smollm2-135m"`."""
        raise NotImplementedError

    @property
    def measure(self) -> str:
        """What the column `avg` of an evaluation is."""
        raise NotImplementedError

    @property
    def files(self) -> dict[str, str]:
        """The files of data that must be on this machine, by the settings that name them."""
        return {}

    @property
    def engine_processes(self) -> int:
        """How many of Kitae's own engines run in processes of their own."""
        return 0

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if problems := list(self.contradictions()):
            raise ValueError("\n".join(problems))
        return self

    @classmethod
    def sources(cls) -> tuple[str, ...]:
        """The keys of `data` of which exactly one is given."""
        return ()

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values of a recipe with what follows from them."""
        return values

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)

    def flat(self) -> dict[str, Any]:
        """`{"training.lr": 1e-5, "algorithm.gate.clip_low": 0.2, …}`, for display and comparison."""
        return dict(self.leaves())

    def given(self) -> dict[str, Any]:
        """The nested values that this was resolved from, as far as they matter: what another may be built from."""
        return self.model_dump(mode="json")

    def changed(self) -> dict[str, Any]:
        """Like `flat`, only what differs from the defaults."""
        usual = dict(self.usual())
        return {key: value for key, value in self.flat().items() if value != usual.get(key)}


class RLConfig(Root):
    """All settings of a run of reinforcement learning."""

    method: RLMethod = RLMethod()
    data: DataConfig
    env: EnvConfig = EnvConfig()
    verifier: VerifierConfig = VerifierConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    pipeline: PipelineConfig = PipelineConfig()
    eval: EvalConfig = EvalConfig()

    def contradictions(self) -> Iterator[str]:
        yield from rules.groups(self.algorithm, self.training)
        yield from rules.turns(self.algorithm, self.env)
        yield from rules.sizes(self.algorithm, self.training, self.sampling)
        yield from rules.plain(self.model, self.engine)
        yield from rules.exact(self.model, self.engine)
        yield from rules.four_bits(self.model, self.cluster)
        yield from rules.four_bits_sampled(self.model, self.engine)
        yield from rules.reference(self.algorithm, self.model)
        yield from rules.routing(self.algorithm, self.training, self.cluster, self.engine)
        yield from rules.routers(self.algorithm, self.cluster)
        yield from rules.staleness(self.algorithm, self.pipeline)
        yield from rules.taught(self.algorithm, self.method)
        yield from rules.commanded(self.env)
        yield from rules.placed(self.cluster, self.engine, self.model, self.method)
        yield from rules.served(self.cluster, self.model, self.engine, self.pipeline, self.eval)
        yield from rules.truncated(self.sampling, self.engine, self.method)

    @property
    def title(self) -> str:
        d = self.data
        return f"{self.algorithm.preset} on {d.task or d.gym or d.path or d.hub} with {self.model.path}"

    @property
    def measure(self) -> str:
        return "accuracy"

    @property
    def engine_processes(self) -> int:
        return self.engine.count if self.engine.kind == "process" else 0

    @property
    def files(self) -> dict[str, str]:
        return self.data.paths

    @classmethod
    def sources(cls) -> tuple[str, ...]:
        return SOURCES

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Data knows its verifier, who has a command runs it, and several engines, or those of a cluster, are processes
        of their own. Where no file is held out, nothing is evaluated unless it is asked for."""
        env = values.get("env", {})
        if env.get("command") and "name" not in env:
            values = {**values, "env": {**env, "name": "command"}}
        engine, backend = values.get("engine", {}), values.get("cluster", {}).get("backend", "none")
        if backend != "none" or engine.get("count", 1) != 1:
            values = {**values, "engine": {"kind": "process", **engine}}
        verifier, data = values.get("verifier", {}), values.get("data", {})
        values = _without_evaluation(values, "prompts") if data.get("path") and not data.get("eval_path") else values
        name = usual_verifier(data)
        if name is None or "name" in verifier:
            return values
        return {**values, "verifier": {**verifier, "name": name}}

    def given(self) -> dict[str, Any]:
        """Of the algorithm only what differs from its preset, so that another choice takes the values that suit it."""
        return super().given() | {"algorithm": self.algorithm.choices()}

    def changed(self) -> dict[str, Any]:
        """Of the algorithm, the preset and what differs from it."""
        own = dict(_paths("algorithm", self.algorithm.choices()))
        others = {k: v for k, v in super().changed().items() if not k.startswith("algorithm.")}
        return {**others, **{k: v for k, v in own.items() if (k, v) != ("algorithm.preset", "grpo")}}


class DistilConfig(RLConfig):
    """All settings of a run in which a student learns from a teacher, on samples of its own."""

    method: DistilMethod
    algorithm: AlgorithmConfig = AlgorithmConfig(preset="distil")

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from rules.teacher(self.algorithm, self.method, self.sampling, self.verifier)

    @property
    def title(self) -> str:
        d, m = self.data, self.method
        return f"{m.teacher.path or m.teacher.model} into {self.model.path} on {d.task or d.gym or d.path or d.hub}"

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The loss has its preset. Nothing needs to be judged: where nobody says by whom, nothing is."""
        values = super().completed(values)
        method, algorithm, verifier = (values.get(name, {}) for name in ("method", "algorithm", "verifier"))
        preset = "gkd" if method.get("loss") == "jsd" else "distil"
        values = {**values, "algorithm": {"preset": preset, **algorithm}}
        return values if "name" in verifier else {**values, "verifier": {**verifier, "name": "none"}}


class StageConfig(Root):
    """What all kinds of run have in common that train on a file of examples."""

    data: ExamplesConfig
    training: StageTraining = StageTraining()
    eval: StageEval = StageEval()

    def contradictions(self) -> Iterator[str]:
        yield from rules.engineless(self.cluster, self.model)
        yield from rules.four_bits(self.model, self.cluster)

    @property
    def files(self) -> dict[str, str]:
        return self.data.paths

    @classmethod
    def sources(cls) -> tuple[str, ...]:
        return EXAMPLE_SOURCES

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Where nothing is held out, nothing is evaluated unless it is asked for."""
        data = values.get("data", {})
        held_out = data.get("eval_path") or (data.get("hub") and data.get("hub_eval_files"))
        return values if held_out else _without_evaluation(values, "examples")

    @property
    def title(self) -> str:
        return f"{self.method.kind} on {self.data.source} with {self.model.path}"

    @property
    def measure(self) -> str:
        return "accuracy"


class SFTConfig(StageConfig):
    """All settings of a run of supervised fine-tuning."""

    method: SFTMethod = SFTMethod()

    @property
    def measure(self) -> str:
        return "loss"


class DPOConfig(StageConfig):
    """All settings of a run of preference optimisation."""

    method: DPOMethod = DPOMethod()

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        given = {**self.method.settings, "sft_coef": self.method.sft_coef}
        yield from preference_complaints(self.method.loss, given, "method")


class KTOConfig(StageConfig):
    """All settings of a run of KTO."""

    method: KTOMethod = KTOMethod()

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.method.desirable and not self.method.undesirable:
            yield "method.desirable and method.undesirable must not both be 0: nothing would be trained"


class RewardConfig(StageConfig):
    """All settings of the training of a reward model."""

    method: RewardMethod = RewardMethod()


class DistilFileConfig(StageConfig):
    """All settings of a run in which a student learns from a teacher, on a file of demonstrations."""

    method: DistilFileMethod = DistilFileMethod()

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.cluster.ranks > 1:
            ranks = self.cluster.ranks
            yield f"method.kind = 'distil-file' needs cluster.ranks = 1, got {ranks}: a teacher is not sharded"
        if not self.method.teacher.path:
            yield "method.kind = 'distil-file' needs method.teacher, got none"

    @property
    def measure(self) -> str:
        return "divergence"


ROOTS: dict[str, type[Root]] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
    "reward": RewardConfig,
    "distil": DistilConfig,
    "distil-file": DistilFileConfig,
}
"""The root of each kind of run, by `method.kind`."""


def reinforcement(config: Root, what: str) -> RLConfig:
    """The config, if it is of the kind that `what` is for; else a complaint."""
    if not isinstance(config, RLConfig):
        raise ConfigError(f"{what} is for method.kind = 'rl' or 'distil', got a recipe of kind {config.method.kind!r}")
    return config


def _without_evaluation(values: Mapping[str, Any], count: str) -> Mapping[str, Any]:
    """The values with no evaluation, where they say nothing of how many are asked."""
    section = values.get("eval", {})
    return values if count in section else {**values, "eval": {**section, count: 0}}


def _paths(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values of nested tables by their paths: `("algorithm.gate.clip_high", 0.28)`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _paths(f"{path}.{key}", inner)
    else:
        yield path, value
