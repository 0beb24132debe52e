"""The settings of an algorithm: a preset, what a recipe changes of it, and the combinations that are refused.

Imports no torch. A setting that the chosen functions do not read is refused when the recipe gives it, and unset when it
comes from the preset: a resolved config shows exactly what acts.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from kitae.algorithms.presets import PRESETS
from kitae.algorithms.requirements import Trait
from kitae.algorithms.stages import (
    STAGES,
    AdvantageConfig,
    AggregationConfig,
    ChoiceConfig,
    CorrectionConfig,
    FilterConfig,
    GateConfig,
    KLConfig,
    RatioConfig,
    ShapingConfig,
)
from kitae.plugins import is_plugin, nearest
from kitae.section import Section, Table

_SEQUENCE_CLIP = 0.05  # the largest clip that can still act on the geometric mean of a sequence's ratios
_TRUNCATION = "a number, which is the score of responses that were cut off, or 'keep', 'mask' or 'drop'"


class CriticConfig(Table):
    """S3: the critic of an advantage that needs values."""

    lr: float | None = Field(1e-5, gt=0, description="Learning rate of the critic.")
    clip: float | None = Field(0.5, ge=0, description="Values move at most this far in a batch; 0: off.")
    warmup: int | None = Field(0, ge=0, description="Steps in which only the critic learns.")


class ReferenceConfig(Table):
    """S8: the policy that a KL term, or a function of your own, compares with."""

    main = "name"

    name: Literal["none", "frozen", "ema", "reset"] | None = Field(
        "none", description="The initial model; moved towards the policy; or replaced by the policy."
    )
    every: int | None = Field(400, ge=1, description="Steps between two refreshes of the reference.")
    mix: float | None = Field(0.6, gt=0, lt=1, description="Share of the policy in each refresh.")


class EntropyConfig(Table):
    """S8: the entropy bonus."""

    coef: float = Field(0.0, ge=0, description="Weight of the bonus, or its start value.")
    target: float = Field(
        0.0, ge=0, description="Entropy per token that coef is steered to, off above it; 0: coef is fixed."
    )
    rate: float | None = Field(0.005, gt=0, description="Change of coef in a step.")


class LikelihoodConfig(Table):
    """S8: the likelihood of correct responses, beside the policy loss."""

    coef: float = Field(0.0, ge=0, description="Weight of −log π of correct responses; 0: off.")
    correct_above: float | None = Field(0.5, description="Scores above this are correct.")


class ExpertsConfig(Table):
    """What only a mixture of experts can do."""

    routing: Literal["own", "old", "engine"] = Field(
        "own",
        description="Who chooses the experts for the updates of a batch: own: each pass for itself; old: π_old for all "
        "of them (R2); engine: the engine, as it sampled, for π_old too (R3).",
    )
    z_coef: float = Field(0.0, ge=0, description="Weight of the square of the routers' log-sum-exp; 0: off.")
    balance_coef: float = Field(0.0, ge=0, description="Weight of the term that spreads the load; 0: off.")


class AlgorithmConfig(Section):
    """A point in the eight-stage space. A preset fills in what is not given; see docs/algorithms.md."""

    preset: str = Field("grpo", description="A name that `kitae algorithms` lists.")
    truncation: Literal["keep", "mask", "drop"] | float = Field(
        "keep",
        description="S1: responses that were cut off keep their score; count in the baseline only (mask); leave the "
        "group (drop); or get this number as their score.",
    )
    roles: tuple[str, ...] = Field((), description="Of episodes with several roles: those that are trained; none: all.")
    shaping: SerializeAsAny[ShapingConfig] = ShapingConfig()
    filter: SerializeAsAny[FilterConfig] = FilterConfig()
    advantage: SerializeAsAny[AdvantageConfig] = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    ratio: SerializeAsAny[RatioConfig] = RatioConfig()
    gate: SerializeAsAny[GateConfig] = GateConfig()
    correction: SerializeAsAny[CorrectionConfig] = CorrectionConfig()
    aggregation: SerializeAsAny[AggregationConfig] = AggregationConfig()
    kl: SerializeAsAny[KLConfig] = KLConfig()
    reference: ReferenceConfig = ReferenceConfig()
    entropy: EntropyConfig = EntropyConfig()
    sft: LikelihoodConfig = LikelihoodConfig()
    experts: ExpertsConfig = ExpertsConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        """What is given, completed by the preset; None stands for a setting that is not given."""
        if not isinstance(values, Mapping):
            return values
        name = values.get("preset", "grpo")
        if not isinstance(name, str) or name not in PRESETS:
            hint = nearest(str(name), PRESETS)
            raise ValueError(f"algorithm.preset must be one of {', '.join(PRESETS)}, got {name!r}{hint}")
        preset = PRESETS[name].complete
        given = {
            "truncation": preset["truncation"],
            **{key: value for key, value in values.items() if value is not None},
        }
        tables = {key: _as_table(kind, given.pop(key, {})) for key, kind in cls.tables().items()}
        filled = {key: _completed(key, table, preset.get(key, {})) for key, table in tables.items()}
        if not all(isinstance(table, Mapping) and isinstance(table.get("name", ""), str) for table in filled.values()):
            return {**given, **filled}  # pydantic says what is wrong
        for key, stage in STAGES.items():
            stage.check(filled[key]["name"])
            if problems := list(stage.unknown({**tables[key], "name": filled[key]["name"]})):
                raise ValueError("\n".join(problems))
        for key, names, reader in _idle(cls.tables(), filled):
            for setting in tables[key]:
                if setting in names and (key, tables[key]) != ("reference", {"name": "none"}):
                    raise ValueError(
                        f"algorithm.{key}.{setting} is set to {tables[key][setting]!r}, but nothing reads it; it "
                        f"belongs to {reader}"
                    )
            kept = {setting: value for setting, value in filled[key].items() if setting not in names}
            filled[key] = {**kept, **{s: None for s in names if s in cls.tables()[key].model_fields}}
        return {**given, **filled}

    @field_validator("truncation", mode="before")
    @classmethod
    def _score_or_rule(cls, value: Any) -> Any:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number and value not in ("keep", "mask", "drop"):
            raise ValueError(f"algorithm.truncation must be {_TRUNCATION}, got {value!r}")
        return value

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        for problem in self._contradictions():
            raise ValueError(problem)
        return self

    def choices(self) -> dict[str, Any]:
        """The preset's name and what differs from it, nested: a config that is built from this resolves to the same."""
        preset, found = PRESETS[self.preset].complete, dict[str, Any]()
        for key, kind in self.tables().items():
            table = {k: v for k, v in getattr(self, key).model_dump(mode="json").items() if v is not None}
            usual = dict(_completed(key, {k: v for k, v in table.items() if k == "name"}, preset.get(key, {})))
            fields = STAGES[key].table(table["name"]).model_fields if key in STAGES and "name" in table else None
            for setting, info in (fields or kind.model_fields).items():
                usual.setdefault(setting, info.default)
            usual["name"] = preset.get(key, {}).get("name")
            if own := {k: v for k, v in table.items() if k not in usual or v != usual[k]}:
                found[key] = own
        truncation = {} if self.truncation == preset["truncation"] else {"truncation": self.truncation}
        roles = {"roles": list(self.roles)} if self.roles else {}
        return {"preset": self.preset, **truncation, **roles, **found}

    def choice(self, stage: str) -> ChoiceConfig:
        found: ChoiceConfig = getattr(self, stage)
        return found

    def traits(self, stage: str) -> Trait:
        """What the functions of a stage declare, as far as that is known without executing a user's file."""
        return STAGES[stage].traits(self.choice(stage).name)

    @property
    def has_own_functions(self) -> bool:
        """Whether a stage is a user's own function, of which nothing is known before its file is executed."""
        return any(is_plugin(str(self.choice(key).name)) for key in STAGES)

    @property
    def of_mixtures(self) -> str:
        """A setting that only a mixture of experts can follow: `"algorithm.experts.routing = 'old'"`; empty: none."""
        return next((f"algorithm.experts.{key} = {x!r}" for key, x in self.experts if x and x != "own"), "")

    def _contradictions(self) -> Iterable[str]:
        advantage, ratio, gate = (self.traits(stage) for stage in ("advantage", "ratio", "gate"))
        if Trait.MEAN in ratio and Trait.BAND in gate:
            for key in ("clip_low", "clip_high"):
                if (value := self.gate.setting(key)) > _SEQUENCE_CLIP:
                    yield (
                        f"algorithm.gate.{key} must be at most {_SEQUENCE_CLIP} with ratio {self.ratio.name!r}, got "
                        f"{value:g}: the mean ratio of a sequence is so close to 1 that a larger clip never acts "
                        "(paper: 3e-4)"
                    )
        if Trait.SINGLE in gate and Trait.SEQUENCE in ratio:
            yield f"algorithm.ratio must be 'token' with gate {self.gate.name!r}, got {self.ratio.name!r}"
        product = Trait.SEQUENCE in ratio and Trait.MEAN not in ratio
        if product and Trait.SLOPE in gate and Trait.COUNTS_TOKENS in self.traits("aggregation"):
            yield (
                f"algorithm.aggregation must be 'seq-mean-token-mean' with ratio {self.ratio.name!r}, got "
                f"{self.aggregation.name!r}: it would count the one ratio of a response once for each of its tokens"
            )
        yield from self._correction_contradictions()
        finer = "token" if Trait.TOKENS in advantage else "turn" if Trait.TURNS in advantage else ""
        if self.advantage.whiten in ("samples", "scale", "successes") and finer:
            yield (
                f"algorithm.advantage.whiten {self.advantage.whiten!r} needs one advantage per sample, but advantage "
                f"{self.advantage.name!r} gives one per {finer}: use 'tokens'"
            )
        for key, traits in (("ratio", ratio), ("gate", gate)):
            if Trait.TURNS in advantage and Trait.SHARED in traits:
                yield (
                    f"algorithm.{key} must judge tokens, as {'token' if key == 'ratio' else 'clip'!r} does, with "
                    f"advantage {self.advantage.name!r}, got {self.choice(key).name!r}, which mixes turns"
                )
        if Trait.POSITIVE in advantage and (bias := self.shaping.setting("bias") or 0) < 0:
            yield (f"algorithm.shaping.bias must not be negative with advantage {self.advantage.name!r}, got {bias:g}")
        if Trait.POSITIVE in advantage and self.shaping.norm != "none":
            yield (
                f"algorithm.shaping.norm must be 'none' with advantage {self.advantage.name!r}, got "
                f"{self.shaping.norm!r}"
            )
        if self.kl.coef:
            yield from self._kl_contradictions()

    def _correction_contradictions(self) -> Iterable[str]:
        correction, gate = STAGES["correction"], self.traits("gate")
        traits = [correction.traits(name) for name in correction.names(str(self.correction.name))]
        weights = sum(Trait.MISMATCH in found for found in traits)
        if self.ratio.anchor == "behaviour" and weights:
            yield (
                f"algorithm.correction must be 'none' with anchor 'behaviour', got {self.correction.name!r}: the ratio "
                "to μ already contains the mismatch"
            )
        live = any(Trait.LIVE in found for found in traits)
        if live and Trait.UNWEIGHTED not in gate and not is_plugin(str(self.gate.name)):
            yield (
                f"algorithm.correction 'total' contains π_θ / π_old, and so does gate {self.gate.name!r}: use it with "
                "gate 'mask' or 'likelihood'"
            )
        if weights > 1:
            yield f"algorithm.correction may contain one importance weight, got {self.correction.name!r}"
        for key in ("filter", "correction"):
            name = str(self.choice(key).name)
            if Trait.NEUTRAL in self.traits(key) and len(STAGES[key].names(name)) > 1:
                yield f"algorithm.{key} 'none' cannot be combined, got {name!r}"

    def _kl_contradictions(self) -> Iterable[str]:
        estimator = self.traits("kl")
        if Trait.IN_REWARD in estimator and self.kl.into == "loss":
            yield (
                f"algorithm.kl {self.kl.name!r} in the loss has an expected gradient of zero and regularises nothing: "
                "use 'k2' or 'k1-ratio', or kl.into = 'reward'"
            )
        if self.kl.into == "reward" and Trait.IN_REWARD not in estimator:
            yield (
                f"algorithm.kl must be 'k1' with kl.into 'reward', got {self.kl.name!r}: through the reward the others "
                "do not give the gradient of the KL"
            )
        if self.kl.into == "reward" and Trait.BLIND in self.traits("advantage"):
            yield (
                f"algorithm.kl.into 'reward' does nothing with advantage {self.advantage.name!r}, which reads no reward"
            )
        if self.reference.name == "none" and self.kl.target:
            yield f"algorithm.kl.target is {self.kl.target:g}, but without a reference there is no KL to steer"
        if self.reference.name == "none" and Trait.REFERENCE in estimator:
            yield (
                f"algorithm.kl.coef is {self.kl.coef:g}, but algorithm.reference is 'none': a KL term needs a "
                "reference ('frozen', 'ema' or 'reset')"
            )


def _as_table(kind: type[Section], value: Any) -> Any:
    """What is given of a table; None stands for a setting that is not given."""
    value = kind.spelled(value) if issubclass(kind, Table) else value
    if isinstance(value, Section):
        value = value.model_dump()
    return {key: x for key, x in value.items() if x is not None} if isinstance(value, Mapping) else value


def _completed(key: str, given: Any, preset: Mapping[str, Any]) -> Any:
    """A table with what the preset says of it, as far as the chosen functions have such settings."""
    if not isinstance(given, Mapping):
        return given
    filled = {**preset, **given}
    name = filled.get("name")
    if key not in STAGES or not isinstance(name, str) or not _is_known(key, name):
        return filled
    kept = STAGES[key].base if is_plugin(name) else STAGES[key].table(name)
    return {k: v for k, v in filled.items() if k in given or k in kept.model_fields}


def _is_known(key: str, name: str) -> bool:
    return all(is_plugin(x) or x in STAGES[key].choices for x in STAGES[key].names(name))


def _idle(
    kinds: Mapping[str, type[Section]], tables: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, set[str], str]]:
    """`("entropy", {"rate"}, "entropy.target above 0")`: settings that nothing reads, and what would read them."""

    def all_of(key: str, *but: str) -> set[str]:
        return {*kinds[key].model_fields, *tables[key]} - {*but}

    traits = {key: stage.traits(tables[key]["name"]) for key, stage in STAGES.items()}
    own = any(is_plugin(tables[key]["name"]) for key in STAGES)  # such a function may need anything
    if Trait.BLIND in traits["advantage"]:
        yield "shaping", all_of("shaping"), "advantages that read rewards"
    if tables["shaping"].get("norm") != "batch":
        yield "shaping", {"norm_ddof", "norm_epsilon"}, "shaping.norm 'batch'"
    if tables["advantage"].get("whiten", "none") in ("none", "successes"):
        yield "advantage", {"whiten_epsilon"}, "advantage.whiten 'tokens', 'samples' or 'scale'"
    if Trait.RATIOLESS in traits["gate"]:
        yield "ratio", all_of("ratio"), "gates that read a ratio, which 'likelihood' and 'divergence' do not"
    if Trait.VALUES not in traits["advantage"] and not own:
        yield "critic", all_of("critic"), "advantages 'gae' and 'turn-gae', or one of your own that needs values"
    if not tables["kl"].get("coef"):
        yield "kl", all_of("kl", "coef"), "kl.coef above 0"
    elif not tables["kl"].get("target"):
        yield "kl", {"horizon"}, "kl.target above 0"
    if not tables["kl"].get("coef") and not own:
        yield "reference", all_of("reference"), "kl.coef above 0, or a function of your own that needs it"
    elif tables["reference"]["name"] != "ema":
        yield "reference", {"mix"}, "reference 'ema'"
        if tables["reference"]["name"] != "reset":
            yield "reference", {"every"}, "reference 'ema' or 'reset'"
    if not tables["entropy"].get("target"):
        yield "entropy", {"rate"}, "entropy.target above 0"
    if not tables["sft"].get("coef"):
        yield "sft", {"correct_above"}, "sft.coef above 0"


def needs_group(config: AlgorithmConfig) -> bool:
    """Whether the advantage compares samples of one prompt with each other."""
    return Trait.PEERS in config.traits("advantage")


def may_need_group(advantage: object) -> bool:
    """The same of an advantage by its name; true of a name that is not known, as that of a user's own function."""
    stage = STAGES["advantage"]
    return advantage not in stage.choices or Trait.PEERS in stage.traits(str(advantage))
