"""The settings of an algorithm: a preset, what a recipe changes of it, and the combinations that are refused.

Imports no torch. A setting that no chosen function reads is refused when the recipe gives it, and unset when it comes
from the preset: a resolved config shows exactly what acts.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from kitae.algorithms.presets import PRESETS
from kitae.algorithms.requirements import Trait, traits_of
from kitae.algorithms.stages import STAGES, keyword_settings
from kitae.errors import ConfigError
from kitae.plugins import is_plugin, nearest
from kitae.section import Section

_SEQUENCE_CLIP = 0.05  # the largest clip that can still act on the geometric mean of a sequence's ratios


class AlgorithmConfig(Section):
    """A point in the eight-stage space. A preset fills in what is not given; see docs/algorithms.md."""

    preset: str = Field("grpo", description="A name that `kitae algorithms` lists.")
    params: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="Settings of your own stage functions, by the names of their keywords."
    )

    shaping: str | None = Field(None, description="S1: `standard`, or your own.")
    truncation: Literal["keep", "reward", "mask", "drop"] | None = Field(
        None,
        description="S1: responses that were cut off keep their score; get `truncation_reward`; count in the baseline "
        "only; or leave the group.",
    )
    truncation_reward: float | None = Field(None, description="S1: score of responses that were cut off.")
    overlong_buffer: int | None = Field(
        None, ge=0, description="S1: soft length penalty over the last so many tokens; 0: off."
    )
    length_penalty: float | None = Field(
        None, ge=0, description="S1: taken off the score, times the length over that of the group's longest; 0: off."
    )
    reward_bias: float | None = Field(None, description="S1: added to the score.")
    reward_scale: float | None = Field(None, gt=0, description="S1: factor after the bias.")
    reward_clip: float | None = Field(None, ge=0, description="S1: rewards are clipped to ± this; 0: off.")
    reward_norm: Literal["none", "batch", "running"] | None = Field(
        None, description="S1: z-score over the step, or over the run so far."
    )

    filter: str | None = Field(None, description="S2: which samples are trained on; several joined by +.")
    correct_above: float | None = Field(None, description="S2, S3: scores above this are correct.")

    advantage: str | None = Field(None, description="S3: what a reward is compared with.")
    advantage_ddof: Literal[0, 1] | None = Field(None, description="S3: 1: deviation of a sample, 0: of the whole.")
    advantage_epsilon: float | None = Field(None, ge=0, description="S3: added to the deviation.")
    whiten: Literal["none", "tokens", "samples", "scale"] | None = Field(
        None, description="S3: normalise over the step, by token, by sample, or by sample without centring."
    )
    reward_coef: float | None = Field(None, ge=0, description="S3: weight of the reward beside the reverse KL.")
    pass_k: int | None = Field(None, ge=1, description="S3: the k of pass-at-k.")
    gamma: float | None = Field(None, gt=0, le=1, description="S3: discount per token.")
    gae_lambda: float | None = Field(None, ge=0, le=1, description="S3: the λ of GAE.")
    critic_lr: float | None = Field(None, gt=0, description="S3: learning rate of the critic that GAE needs.")
    critic_clip: float | None = Field(None, ge=0, description="S3: values move at most this far a batch; 0: off.")
    critic_warmup: int | None = Field(None, ge=0, description="S3: steps in which only the critic learns.")

    ratio: str | None = Field(None, description="S4: level of the importance ratio.")
    anchor: Literal["old", "behaviour", "interpolated"] | None = Field(
        None,
        description="S4: the ratio's denominator: π_old; μ, which sampled; or π_old estimated from μ and the age of "
        "the token, which saves a forward pass.",
    )

    routing: Literal["own", "old", "engine"] | None = Field(
        None,
        description="S4: of a mixture of experts, who chooses them for the updates of a batch: own: each pass for "
        "itself; old: π_old for all of them (R2); engine: the engine, as it sampled, for π_old too (R3).",
    )

    gate: str | None = Field(None, description="S5: how the ratio is kept in bounds.")
    clip_low: float | None = Field(None, gt=0, lt=1, description="S5: ratios below 1 - clip_low are clipped.")
    clip_high: float | None = Field(None, gt=0, description="S5: ratios above 1 + clip_high are clipped.")
    dual_clip: float | None = Field(None, ge=0, description="S5: cap of the ratio for negative advantages; 0: off.")
    weight_floor: float | None = Field(None, ge=0, le=1, description="S5: smallest weight.")
    weight_cap: float | None = Field(None, gt=0, description="S5: largest weight, as a ratio (not as 1 + ε).")
    tau_positive: float | None = Field(None, gt=0, description="S5: sharpness of the sigmoid where A > 0.")
    tau_negative: float | None = Field(None, gt=0, description="S5: sharpness of the sigmoid where A < 0.")
    tv_limit: float | None = Field(None, gt=0, lt=1, description="S5: largest change of a token's probability.")
    reject_below: float | None = Field(None, ge=0, lt=1, description="S5: ratios below this get weight 0.")

    cov_share: float | None = Field(
        None, gt=0, le=1, description="S5: share of the step's tokens, those of highest covariance, that is held."
    )
    cov_coef: float | None = Field(None, ge=0, description="S5: weight of |log r| where kl-cov holds a token.")

    correction: str | None = Field(None, description="S6: weight for the engine–trainer gap; several joined by +.")
    correction_floor: float | None = Field(None, ge=0, le=1, description="S6: smallest weight.")
    correction_cap: float | None = Field(None, gt=0, description="S6: largest weight.")
    correction_low: float | None = Field(None, ge=0, description="S6: smaller weights become 0.")
    correction_high: float | None = Field(None, gt=0, description="S6: larger weights become 0.")
    geometric_low: float | None = Field(None, ge=0, description="S6: smallest accepted mean weight of a response.")
    geometric_high: float | None = Field(None, gt=0, description="S6: largest accepted mean weight of a response.")
    veto_low: float | None = Field(None, ge=0, description="S6: a smaller weight of one token drops its response.")
    veto_high: float | None = Field(None, gt=0, description="S6: a larger weight of one token drops its response.")
    drift_limit: float | None = Field(None, gt=0, description="S6: largest accepted mean k2 or k3 of a response.")
    entropy_share: float | None = Field(
        None, gt=0, le=1, description="S6: share of each response's tokens that is trained on, by entropy."
    )
    opsm_limit: float | None = Field(None, ge=0, description="S6: drift at which a wrong response is dropped.")
    age_limit: int | None = Field(None, ge=0, description="S6: versions; older tokens are dropped.")

    aggregation: str | None = Field(None, description="S7: how token losses are averaged.")
    constant_length: int | Literal["max_tokens"] | None = Field(
        None, description="S7: the L of constant-length; `max_tokens` is that of sampling."
    )

    kl: str | None = Field(None, description="S8: estimator of the KL term, or your own penalty per token.")
    kl_coef: float | None = Field(None, ge=0, description="S8: weight of the KL term; 0: no term, no reference.")
    kl_in: Literal["loss", "reward"] | None = Field(None, description="S8: where the KL term goes.")
    kl_target: float | None = Field(
        None, ge=0, description="S8: KL per response that kl_coef is steered to; 0: fixed coefficient."
    )
    kl_horizon: float | None = Field(None, gt=0, description="S8: responses over which kl_coef may move by 20 %.")
    reference: Literal["none", "frozen", "ema", "reset"] | None = Field(
        None, description="S8: the initial model; moved towards the policy; or replaced by it, every reference_every."
    )
    reference_every: int | None = Field(None, ge=1, description="S8: steps between two refreshes of the reference.")
    reference_mix: float | None = Field(None, gt=0, lt=1, description="S8: share of the policy in each refresh.")
    entropy_coef: float | None = Field(None, ge=0, description="S8: entropy bonus, or its start value.")
    entropy_target: float | None = Field(
        None,
        ge=0,
        description="S8: entropy per token that entropy_coef is steered to, off above it; 0: fixed coefficient.",
    )
    entropy_rate: float | None = Field(None, gt=0, description="S8: change of entropy_coef in a step.")
    sft_coef: float | None = Field(
        None, ge=0, description="S8: weight of −log π of responses whose score is above correct_above; 0: off."
    )
    router_z_coef: float | None = Field(
        None, ge=0, description="S8: of a mixture of experts, weight of the square of its routers' log-sum-exp; 0: off."
    )
    router_balance_coef: float | None = Field(
        None, ge=0, description="S8: of a mixture of experts, weight of the term that spreads the load; 0: off."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        name = values.get("preset", "grpo")
        if not isinstance(name, str) or name not in PRESETS:
            hint = nearest(str(name), PRESETS)
            raise ValueError(f"algorithm.preset must be one of {', '.join(PRESETS)}, got {name!r}{hint}")
        given = {key: value for key, value in values.items() if value is not None}
        filled = {**PRESETS[name].complete, **given}
        if not all(isinstance(filled[key], str) for key in STAGES):
            return filled  # pydantic says what is wrong
        for stage in STAGES.values():
            stage.check(filled[stage.key])
        read = _keys_read(filled)
        if read is None:
            return filled
        for key in given:
            if key in cls.model_fields and key not in read and (key, given[key]) != _NOTHING:
                raise ValueError(f"algorithm.{key} is set to {given[key]!r}, but nothing reads it{_readers(key)}")
        return {key: value for key, value in filled.items() if key in read or key not in cls.model_fields}

    @field_validator("constant_length", mode="before")
    @classmethod
    def _length(cls, value: Any) -> Any:
        number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not (number or value in (None, "max_tokens")):
            raise ValueError(f"algorithm.constant_length must be a number of tokens, or 'max_tokens', got {value!r}")
        return value

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        for problem in self._contradictions():
            raise ValueError(problem)
        return self

    def choices(self) -> dict[str, Any]:
        """The preset's name and what differs from it: a config that is built from this resolves to the same."""
        complete = PRESETS[self.preset].complete
        values = self.model_dump()
        return {k: v for k, v in values.items() if k == "preset" or (v is not None and v != complete.get(k))}

    def traits(self, stage: str) -> Trait:
        """What the functions of a stage declare, as far as that is known without executing a user's file."""
        return STAGES[stage].traits(getattr(self, stage))

    @property
    def of_mixtures(self) -> str:
        """What only a mixture of experts can do: `"algorithm.routing = 'engine'"`; empty: nothing of that is asked."""
        keys = ("routing", "router_z_coef", "router_balance_coef")
        return next((f"algorithm.{key} = {x!r}" for key in keys if (x := getattr(self, key)) and x != "own"), "")

    def _contradictions(self) -> Iterable[str]:
        advantage, ratio, gate = (self.traits(stage) for stage in ("advantage", "ratio", "gate"))
        if self.dual_clip and self.clip_high is not None and self.dual_clip <= 1 + self.clip_high:
            yield f"algorithm.dual_clip must exceed 1 + clip_high = {1 + self.clip_high:g}, got {self.dual_clip:g}"
        if Trait.MEAN in ratio and Trait.BAND in gate:
            for key in ("clip_low", "clip_high"):
                if (value := getattr(self, key)) > _SEQUENCE_CLIP:
                    yield (
                        f"algorithm.{key} must be at most {_SEQUENCE_CLIP} with ratio {self.ratio!r}, got {value:g}: "
                        "the mean ratio of a sequence is so close to 1 that a larger clip never acts (paper: 3e-4)"
                    )
        if self.weight_cap is not None and self.weight_cap < 1 and not is_plugin(str(self.gate)):
            yield (
                f"algorithm.weight_cap must be at least 1 with gate {self.gate!r}, got {self.weight_cap:g}: it is a "
                "ratio, and a smaller cap would shrink every update"
            )
        if Trait.SINGLE in gate and Trait.SEQUENCE in ratio:
            yield f"algorithm.ratio must be 'token' with gate {self.gate!r}, got {self.ratio!r}"
        product = Trait.SEQUENCE in ratio and Trait.MEAN not in ratio
        if product and Trait.SLOPE in gate and Trait.COUNTS_TOKENS in self.traits("aggregation"):
            yield (
                f"algorithm.aggregation must be 'seq-mean-token-mean' with ratio {self.ratio!r}, got "
                f"{self.aggregation!r}: it would count the one ratio of a response once for each of its tokens"
            )
        corrections = [STAGES["correction"].traits(name) for name in STAGES["correction"].names(str(self.correction))]
        weights = sum(Trait.MISMATCH in traits for traits in corrections)
        if self.anchor == "behaviour" and weights:
            yield (
                f"algorithm.correction must be 'none' with anchor 'behaviour', got {self.correction!r}: the ratio to μ "
                "already contains the mismatch"
            )
        live = any(Trait.LIVE in traits for traits in corrections)
        if live and Trait.UNWEIGHTED not in gate and not is_plugin(str(self.gate)):
            yield (
                f"algorithm.correction 'total' contains π_θ / π_old, and so does gate {self.gate!r}: use it with gate "
                "'mask' or 'likelihood'"
            )
        if weights and self.correction_cap is not None and self.correction_cap < 1:
            yield f"algorithm.correction_cap must be at least 1, got {self.correction_cap:g}: the weights lie around 1"
        if weights > 1:
            yield f"algorithm.correction may contain one importance weight, got {self.correction!r}"
        for key in ("filter", "correction"):
            if Trait.NEUTRAL in self.traits(key) and len(STAGES[key].names(str(getattr(self, key)))) > 1:
                yield f"algorithm.{key} 'none' cannot be combined, got {getattr(self, key)!r}"
        yield from self._empty_bands()
        if self.aggregation == "constant-length" and self.constant_length is None:
            yield (
                "algorithm.aggregation 'constant-length' needs algorithm.constant_length: a number of tokens, or "
                "'max_tokens'"
            )
        if self.whiten in ("samples", "scale") and Trait.TOKENS in advantage:
            yield (
                f"algorithm.whiten {self.whiten!r} needs one advantage per sample, but advantage {self.advantage!r} "
                "gives one per token: use 'tokens'"
            )
        if Trait.POSITIVE in advantage and (self.reward_bias or 0) < 0:
            yield (
                f"algorithm.reward_bias must not be negative with advantage {self.advantage!r}, got "
                f"{self.reward_bias:g}"
            )
        if Trait.POSITIVE in advantage and self.reward_norm != "none":
            yield f"algorithm.reward_norm must be 'none' with advantage {self.advantage!r}, got {self.reward_norm!r}"
        yield from self._kl_contradictions()

    def _empty_bands(self) -> Iterable[str]:
        """Where engine and trainer agree every weight is 1: a band without it would drop the tokens that are right."""
        for low, high in (
            ("correction_low", "correction_high"),
            ("geometric_low", "geometric_high"),
            ("veto_low", "veto_high"),
        ):
            a, b = getattr(self, low), getattr(self, high)
            if a is not None and b is not None and a >= b:
                yield f"algorithm.{low} must be below {high} = {b:g}, got {a:g}"
            for key, value, wrong, rule in ((low, a, 1, "at most"), (high, b, -1, "at least")):
                if value is not None and (value - 1) * wrong > 0:
                    yield (
                        f"algorithm.{key} must be {rule} 1, got {value:g}: where engine and trainer agree, the weight "
                        "is 1"
                    )
        if self.reject_below and self.weight_floor and self.reject_below >= self.weight_floor:
            yield (
                f"algorithm.reject_below must be below weight_floor = {self.weight_floor:g}, got "
                f"{self.reject_below:g}: the floor would never act"
            )

    def _kl_contradictions(self) -> Iterable[str]:
        if not self.kl_coef:
            return
        estimator = self.traits("kl")
        if Trait.IN_REWARD in estimator and self.kl_in == "loss":
            yield (
                f"algorithm.kl {self.kl!r} in the loss has an expected gradient of zero and regularises nothing: use "
                "'k2' or 'k1-ratio', or kl_in = 'reward'"
            )
        if self.kl_in == "reward" and Trait.IN_REWARD not in estimator:
            yield (
                f"algorithm.kl must be 'k1' with kl_in 'reward', got {self.kl!r}: through the reward the others do not "
                "give the gradient of the KL"
            )
        if self.kl_in == "reward" and Trait.BLIND in self.traits("advantage"):
            yield f"algorithm.kl_in 'reward' does nothing with advantage {self.advantage!r}, which reads no reward"
        if self.reference == "none" and self.kl_target:
            yield f"algorithm.kl_target is {self.kl_target:g}, but without a reference there is no KL to steer"
        if self.reference == "none" and Trait.REFERENCE in estimator:
            yield (
                f"algorithm.kl_coef is {self.kl_coef:g}, but algorithm.reference is 'none': a KL term needs a "
                "reference ('frozen', 'ema' or 'reset')"
            )


_ALWAYS = {
    "preset", "params", "truncation", "filter", "advantage", "whiten", "gate", "correction", "aggregation", "kl_coef",
    "entropy_coef", "entropy_target", "sft_coef", "routing", "router_z_coef", "router_balance_coef",
}  # fmt: skip
_NOTHING = ("reference", "none")  # may be said anywhere
_CRITIC = {"critic_lr", "critic_clip", "critic_warmup"}


def refuse_unread(config: AlgorithmConfig, functions: Mapping[str, Mapping[str, Any]]) -> None:
    """With functions of the user's own, once they are loaded: refuse what was changed and is read by none."""
    if not any(is_plugin(str(getattr(config, key))) for key in STAGES):
        return
    own = {key: {k for f in found.values() for k in keyword_settings(f)} for key, found in functions.items()}
    declared = Trait(0)
    for function in (f for found in functions.values() for f in found.values()):
        declared |= traits_of(function)
    read = _keys_read(config.model_dump(), own, declared)
    for key, value in config.choices().items():
        if read is not None and key not in read and key != "reference":
            raise ConfigError(f"algorithm.{key} is set to {value!r}, but nothing reads it{_readers(key)}")


def _keys_read(
    values: Mapping[str, Any], own: Mapping[str, set[str]] | None = None, declared: Trait | None = None
) -> set[str] | None:
    """The keys that these choices read; None: a function of the user's own, not in `own`, may read any.

    declared: the traits of all functions, where they are loaded.
    """
    read = set(_ALWAYS)
    stages = [s for s in STAGES.values() if s.key != "kl" or values["kl_coef"]]
    if Trait.BLIND in STAGES["advantage"].traits(values["advantage"]):
        stages = [s for s in stages if s.key != "shaping"]
    else:
        read |= {"shaping", "reward_norm"}
    if Trait.RATIOLESS in STAGES["gate"].traits(values["gate"]):
        stages = [s for s in stages if s.key != "ratio"]
    else:
        read |= {"ratio", "anchor"}
    for stage in stages:
        settings = stage.settings(str(values[stage.key]))
        if settings is None and own is not None:
            settings = own.get(stage.key, set())
        if settings is None:
            return None
        read |= settings
    if values["truncation"] == "reward":
        read.add("truncation_reward")
    if values["whiten"] != "none":
        read.add("advantage_ddof")
    if Trait.VALUES in (STAGES["advantage"].traits(values["advantage"]) if declared is None else declared):
        read |= _CRITIC
    if values["kl_coef"]:
        read |= {"kl", "kl_in", "kl_target"}
        if values["kl_target"]:
            read.add("kl_horizon")
    if values["kl_coef"] or (declared is not None and Trait.REFERENCE in declared):
        read.add("reference")
        if values["reference"] in ("ema", "reset"):
            read.add("reference_every")
        if values["reference"] == "ema":
            read.add("reference_mix")
    if values["entropy_target"]:
        read.add("entropy_rate")
    if values["sft_coef"]:
        read.add("correct_above")
    return read


_CONDITIONS = {
    "shaping": "advantages that read rewards",
    "reward_norm": "advantages that read rewards",
    "ratio": "gates other than 'likelihood' and 'divergence'",
    "anchor": "gates other than 'likelihood' and 'divergence'",
    "truncation_reward": "truncation = 'reward'",
    "kl": "kl_coef above 0",
    "kl_in": "kl_coef above 0",
    "kl_target": "kl_coef above 0",
    "reference": "kl_coef above 0",
    "kl_horizon": "kl_target above 0",
    "reference_every": "reference = 'ema' or 'reset'",
    "reference_mix": "reference = 'ema'",
    "entropy_rate": "entropy_target above 0",
    "correct_above": "sft_coef above 0",
    **dict.fromkeys(_CRITIC, "advantage = 'gae', or one of your own that needs values"),
}


def _readers(key: str) -> str:
    """Who would read the setting."""
    found = [
        f"{stage.key} {name!r}"
        for stage in STAGES.values()
        for name in stage.choices
        if key in (stage.settings(name) or ())
    ]
    found += [f"{_CONDITIONS[key]}"] if key in _CONDITIONS else []
    return f"; it belongs to {', '.join(found)}" if found else ""


def needs_group(config: AlgorithmConfig) -> bool:
    """Whether the advantage compares samples of one prompt with each other."""
    return Trait.PEERS in config.traits("advantage")
