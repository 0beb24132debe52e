"""Settings of a run: TOML recipe + `section.key=value` overrides → one frozen, fully resolved `Config`.

Importing this module is cheap (no torch), and everything that can be refused is refused here, before a model loads:
unknown keys get a hint (`hints`), contradictions name both sides. The resolved config is saved with the run.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from kitae.algorithms.config import AlgorithmConfig, needs_group
from kitae.data.formats import FORMATS
from kitae.data.tasks import TASKS
from kitae.errors import ConfigError
from kitae.hints import hint
from kitae.plugins import nearest
from kitae.section import Section


class RunConfig(Section):
    """Where the run lives and what makes it repeatable."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]+$", description="Name of the run folder; a number is appended.")
    dir: str = Field("runs", description="Folder that holds the run folders.")
    seed: int = Field(0, ge=0, description="Seed of prompts, sampling and initialisation.")


class ModelConfig(Section):
    """The policy."""

    path: str = Field(
        "smollm2-135m",
        min_length=1,
        description="A folder, a hub id, or a short name: smollm2-135m (real), tiny (made on the spot, for tests).",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="auto: bfloat16 where the hardware computes in it."
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1 …")
    fuse: bool = Field(True, description="Run norms and gated MLPs through compiled kernels where they can be built.")
    exact: bool = Field(
        False,
        description="Make every log-prob the same to the last bit in the engine and the trainer, in any batch; slower.",
    )
    lora_rank: int = Field(0, ge=0, description="0 trains all weights; more trains LoRA adapters of this rank.")
    lora_alpha: float = Field(32.0, gt=0, description="LoRA scale numerator.")
    lora_targets: str = Field("all-linear", description="all-linear, or names of modules separated by commas.")


_SOURCES = ("task", "gym", "path", "hub")


class DataConfig(Section):
    """Where prompts come from: exactly one of task, gym, path or hub."""

    task: str | None = Field(None, description=f"A generated task: {', '.join(TASKS)}.")
    gym: str | None = Field(None, description="Data sets of reasoning-gym, separated by commas; they take turns.")
    params: dict[str, JsonValue] = Field(
        default_factory=dict, description="Difficulty and options of the task, or the config of the gym's data sets."
    )
    path: str | None = Field(None, description="A .jsonl, .json or .parquet file of training prompts.")
    eval_path: str | None = Field(None, description="A file of held-out prompts.")
    hub: str | None = Field(None, description="A data set on the hub, e.g. openai/gsm8k.")
    hub_files: str = Field("main/train-*.parquet", description="Files of the hub data set to train on.")
    hub_eval_files: str | None = Field("main/test-*.parquet", description="Files of the hub data set to evaluate on.")
    format: str | None = Field(
        None, description="Read rows as math, mbpp, humaneval or ifeval have them, or by your own file.py:function."
    )
    prompt_key: str = Field("question", description="Column with the question, or with a list of chat messages.")
    answer_key: str = Field("answer", description="Column with the reference answer.")
    answer_after: str | None = Field(None, description="Keep only the reference text after this mark, e.g. '####'.")
    system: str | None = Field(None, description="System message put before each question.")
    instruction: str = Field("{question}", description="Template of the user turn; {question} is replaced.")
    skip_bad_rows: bool = Field(False, description="Leave out rows that cannot be read, instead of refusing the file.")
    shuffle: bool = Field(True, description="Visit the prompts in a seeded random order, a new one each epoch.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"data needs exactly one of {', '.join(_SOURCES)}, got {' and '.join(given) or 'none'}")
        if "{question}" not in self.instruction:
            raise ValueError(f"data.instruction must contain {{question}}, got {self.instruction!r}")
        if self.params and self.task is None and self.gym is None:
            raise ValueError("data.params belongs to a generated task, but neither data.task nor data.gym is set")
        if self.format is not None and not (self.path or self.hub or self.eval_path):
            raise ValueError("data.format reads the rows of a file, but none of data.path, hub and eval_path is set")
        if self.format is not None and self.answer_after is not None:
            raise ValueError(f"data.format = {self.format!r} finds the reference itself: remove data.answer_after")
        return self


class VerifierConfig(Section):
    """Who judges the answers, and for how long."""

    name: str = Field(
        "exact",
        description="See `kitae verifiers`, or your own: file.py:function; by default that of the task or format.",
    )
    params: dict[str, JsonValue] = Field(default_factory=dict, description="Options of the verifier.")
    timeout: float = Field(10.0, gt=0, description="Seconds of its own time that checking one answer may take.")
    workers: int = Field(2, ge=1, le=256, description="Worker processes.")
    check_gold: bool = Field(True, description="Before training, check that reference answers score 1.")
    max_error_share: float = Field(
        0.5, ge=0, le=1, description="Stop when more than this share of a step's answers could not be judged."
    )


class SamplingConfig(Section):
    """How training rollouts are sampled."""

    temperature: float = Field(1.0, gt=0, description="Log-probs of engine and trainer are both taken at it.")
    max_tokens: int = Field(64, ge=1, description="Most tokens in one response.")
    stop: tuple[str, ...] = Field((), description="Strings that end a response.")


class EngineConfig(Section):
    """The rollout engine."""

    memory_gb: float = Field(1.0, gt=0, description="Memory of the key-value cache.")
    max_batch: int = Field(256, ge=1, description="Most sequences decoded together.")
    prefill_tokens: int = Field(2048, ge=16, description="Most prompt tokens computed in one step.")
    page_size: int = Field(16, ge=1, le=256, description="Tokens in one page of the cache.")
    keep_cache: bool = Field(
        True, description="false: free the cache while the trainer works; what is in flight is computed again."
    )
    fast: bool = Field(True, description="Use compiled kernels where they can be built; false: plain torch.")


class TrainingConfig(Section):
    """The optimizer and the size of a step."""

    steps: int = Field(100, ge=1, description="Policy versions to train: one batch of rollouts each.")
    prompts_per_step: int = Field(8, ge=1, description="Groups in a batch.")
    group_size: int = Field(8, ge=1, description="Samples of each prompt.")
    minibatches: int = Field(1, ge=1, description="Optimizer steps a batch is cut into, by whole groups.")
    epochs: int = Field(1, ge=1, description="Passes over each batch.")
    lr: float = Field(1e-5, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="What follows the warm-up.")
    betas: tuple[float, float] = Field((0.9, 0.99), description="AdamW momenta.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    clip_norm: float = Field(1.0, gt=0, description="Largest gradient norm.")
    token_budget: int = Field(
        0, ge=0, description="Most tokens in a packed micro-batch; 0: 2,048 on a CPU, 8,192 on a GPU."
    )
    logit_chunk: int = Field(1024, ge=1, description="Rows of logits held at a time.")
    share_prompts: bool = Field(True, description="Compute each group's prompt once in training too.")
    checkpoint_activations: bool = Field(False, description="Recompute activations in the backward pass: less memory.")


class PipelineConfig(Section):
    """How far generation may run ahead of training."""

    max_staleness: int = Field(
        0, ge=0, le=64, description="Policy versions a sample may be old when it is trained on; 0 is on-policy."
    )
    placement: Literal["shared", "process"] = Field(
        "shared",
        description="shared: engine and trainer use the same weights; process: the engine has a process and weights of "
        "its own.",
    )
    engines: int = Field(
        1, ge=1, le=256, description="Engines, each in a process of its own; more than 1 needs placement = process."
    )
    engine_threads: int = Field(
        0,
        ge=0,
        description="Processor cores of each engine in its own process, the trainer has the others; 0: half for all.",
    )
    sync: Literal["full", "delta"] = Field(
        "full", description="What an engine in its own process is sent: all weights, or those that changed."
    )
    in_flight: Literal["keep", "recompute"] = Field(
        "keep", description="At a weight update, sequences in flight keep their cache, or compute it anew."
    )
    overdue: Literal["wait", "drop"] = Field(
        "wait", description="A batch waits for groups that would become too old, or goes on without them."
    )
    mastered: float = Field(1.0, description="Mean score at which a prompt counts as mastered.")
    mastered_visits: float = Field(
        1.0, gt=0, le=1, description="How often a prompt that was mastered the last time is asked again, as a share."
    )
    stall_limit: float = Field(1800.0, gt=0, description="Seconds without any movement after which a run ends.")
    snapshot_seconds: float = Field(
        30.0, gt=0, description="Seconds between copies of unfinished responses in the journal."
    )
    refill: bool = Field(False, description="Replace dropped groups by new prompts until the batch is full.")
    max_refill: float = Field(3.0, ge=0, description="Most replacements, as a multiple of prompts_per_step.")

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.engines > 1 and self.placement != "process":
            raise ValueError(
                f"pipeline.engines must be 1 with pipeline.placement = {self.placement!r}, got {self.engines}: several "
                "engines cannot use the trainer's own weights"
            )
        return self


class CheckpointConfig(Section):
    """When the whole frontier is saved."""

    every: int = Field(10, ge=1, description="Steps between checkpoints.")
    keep: int = Field(2, ge=1, description="Checkpoints kept.")


class EvalConfig(Section):
    """Held-out evaluation before, during and after training."""

    prompts: int = Field(64, ge=0, description="Held-out prompts; 0: no evaluation.")
    samples: int = Field(1, ge=1, description="Samples of each prompt.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    top_k: int = Field(0, ge=0, description="Keep only the k likeliest tokens; 0: all.")
    min_p: float = Field(0.0, ge=0, lt=1, description="Drop tokens less likely than this share of the likeliest.")
    every: int = Field(0, ge=0, description="Steps between evaluations; 0: only before and after.")

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(f"eval.samples must be 1 when eval.temperature is 0 (greedy), got {self.samples}")
        return self


class Config(Section):
    """All settings of a run."""

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

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        a, t = self.algorithm, self.training
        if t.group_size < 2 and needs_group(a):
            raise ValueError(
                f"training.group_size must be at least 2 for advantage {a.advantage!r}, got {t.group_size}"
            )
        filters = {name.strip() for name in str(a.filter).split("+")}
        if t.group_size < 2 and ("zero-variance" in filters or {"all-correct", "all-wrong"} <= filters):
            raise ValueError(
                f"training.group_size must be at least 2 for filter {a.filter!r}, got {t.group_size}: it would drop "
                "every group"
            )
        self._check_exact()
        if a.reference == "ema" and self.model.lora_rank:
            raise ValueError(
                "algorithm.reference must be 'frozen' or 'reset' with model.lora_rank, got 'ema': the mean of two "
                "pairs of adapters is not the adapter of the mean"
            )
        if a.advantage == "pass-at-k" and a.pass_k is not None and a.pass_k >= t.group_size:
            raise ValueError(
                f"algorithm.pass_k must be below training.group_size = {t.group_size}, got {a.pass_k}: one correct "
                "answer would make all draws of k succeed"
            )
        if a.advantage == "gae" and a.critic_warmup is not None and a.critic_warmup >= t.steps:
            raise ValueError(
                f"algorithm.critic_warmup must be below training.steps = {t.steps}, got {a.critic_warmup}: the policy "
                "would never learn"
            )
        if t.minibatches > t.prompts_per_step:
            raise ValueError(
                f"training.minibatches must be at most prompts_per_step = {t.prompts_per_step}, got {t.minibatches}"
            )
        if a.overlong_buffer and a.overlong_buffer > self.sampling.max_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer must be at most sampling.max_tokens = {self.sampling.max_tokens}, "
                f"got {a.overlong_buffer}"
            )
        if not self.engine.keep_cache and self.pipeline.placement != "shared":
            raise ValueError(
                "engine.keep_cache = false needs pipeline.placement = 'shared', got "
                f"{self.pipeline.placement!r}: the trainer does not use the memory of another process"
            )
        if self.pipeline.overdue == "drop" and not self.pipeline.max_staleness:
            raise ValueError(
                "pipeline.overdue = 'drop' needs pipeline.max_staleness of at least 1, got 0: nothing can be overdue"
            )
        if self.pipeline.refill and a.filter == "none" and a.truncation not in ("drop", "mask"):
            raise ValueError(
                "pipeline.refill replaces dropped groups, but algorithm.filter = 'none' drops none (a preset given on "
                "the command line replaces the recipe's choices of the algorithm)"
            )
        return self

    def _check_exact(self) -> None:
        if not self.model.exact:
            return
        if not self.engine.fast or not self.model.fuse:
            key = "engine.fast" if not self.engine.fast else "model.fuse"
            raise ValueError(f"model.exact runs on kernels of its own, got {key} = false, which asks for none")
        if self.pipeline.placement == "process" and not self.model.device.startswith("cuda"):
            raise ValueError(
                "model.exact needs pipeline.placement = 'shared' on a CPU, got 'process': with another number of "
                "threads a product is added up in another order (on a GPU, name it: model.device = 'cuda')"
            )

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)

    def changed(self) -> dict[str, Any]:
        """Like `flat`, only what differs from the defaults; of the algorithm, what differs from its preset."""
        plain = {name: info.annotation for name, info in type(self).model_fields.items()}
        usual = {
            f"{section}.{key}": info.get_default(call_default_factory=True)
            for section, cls in plain.items()
            for key, info in getattr(cls, "model_fields", {}).items()
        }
        own = {f"algorithm.{key}" for key in self.algorithm.choices()}
        return {
            key: value
            for key, value in self.flat().items()
            if value != _as_json(usual[key]) and (key in own or not key.startswith("algorithm."))
        }

    def flat(self) -> dict[str, Any]:
        """`{"training.lr": 1e-5, …}`, for display and comparison."""
        dumped = self.model_dump(mode="json")
        return {f"{section}.{key}": value for section, keys in dumped.items() for key, value in keys.items()}


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def load_config(recipe: Path, overrides: Iterable[str] = ()) -> Config:
    """Read a recipe file and apply `section.key=value` overrides."""
    try:
        values = tomllib.loads(recipe.read_text("utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"no recipe file {recipe}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{recipe} is not valid TOML: {error}") from None
    if isinstance(run := values.setdefault("run", {}), dict):
        run.setdefault("name", recipe.stem)
    _apply_overrides(values, overrides)
    return parse_config(values)


def override_config(config: Config, overrides: Iterable[str]) -> Config:
    """A copy of a resolved config with some settings changed."""
    values = config.model_dump(mode="json")
    values["algorithm"] = config.algorithm.choices()  # what its preset filled in may go with the choice that read it
    _apply_overrides(values, overrides)
    return parse_config(values)


def parse_config(values: Any) -> Config:
    """Validate a nested mapping; every complaint becomes one `ConfigError` that lists all of them."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"settings are sections with keys, got {values!r}")
    problems = list(_unknown_keys(values))
    if not problems:
        values = _with_data_verifier(values)
        try:
            return Config.model_validate({"data": {}, **values})
        except ValidationError as error:
            problems = [_describe(e) for e in error.errors()]
    raise ConfigError("\n".join(problems))


def _with_data_verifier(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tasks and formats know their verifier; a recipe need not name it."""
    verifier, data = values.get("verifier", {}), values.get("data", {})
    known = TASKS.get(str(data.get("task"))) or FORMATS.get(str(data.get("format")))
    name = known.verifier if known else "gym" if data.get("gym") else None
    if name is None or "name" in verifier:
        return values
    return {**values, "verifier": {**verifier, "name": name}}


def _apply_overrides(values: dict[str, Any], overrides: Iterable[str]) -> None:
    split = [_split_override(override) for override in overrides]
    sources = [name for name in _SOURCES if any(keys == ["data", name] for keys, _ in split)]
    if len(sources) > 1:
        raise ConfigError(f"data needs exactly one of {', '.join(_SOURCES)}, got {' and '.join(sources)}")
    for keys, text in sorted(split, key=lambda override: _keeps_source(override[0])):
        _apply_override(values, keys, text)


def _split_override(override: str) -> tuple[list[str], str]:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        known = hint(keys[0], _settings()) if equals and len(keys) == 1 and keys[0] else ""
        raise ConfigError(f"an override has the form section.key=value, got {override!r}{known}")
    return keys, text.strip()


def _keeps_source(keys: list[str]) -> bool:
    """False sorts first: a new source or preset drops the old one's settings, and must not drop those given with it."""
    return keys != ["algorithm", "preset"] and not (keys[0] == "data" and keys[1] in _SOURCES)


def _apply_override(values: dict[str, Any], keys: list[str], text: str) -> None:
    node = values
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{'.'.join(keys)!r} goes below {key!r}, which is a value, not a section")
    if keys == ["algorithm", "preset"]:  # another method replaces the recipe's choices
        node.clear()
    node[keys[-1]] = _parse_value(text, wants_text=_is_text(*keys[:2]))
    if keys[0] == "data" and keys[1] in _SOURCES:  # a new source replaces the recipe's
        gone = {*_SOURCES, "params", *(["eval_path"] if keys[1] != "path" else [])} - {keys[1]}
        for other in gone:
            node.pop(other, None)


def _parse_value(text: str, wants_text: bool) -> Any:
    """TOML syntax where it parses (`3`, `1e-5`, `["a"]`), else the bare text; `run.name=2026-01-31` is a name too."""
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
    return text if wants_text and not isinstance(value, str) else value


def _is_text(section: str, key: str) -> bool:
    sections = Config.model_fields
    fields = getattr(sections[section].annotation, "model_fields", {}) if section in sections else {}
    return key in fields and fields[key].annotation in (str, str | None)


def _settings() -> dict[str, list[str]]:
    """The keys of each section."""
    classes = {name: info.annotation for name, info in Config.model_fields.items()}
    return {name: list(getattr(cls, "model_fields", ())) for name, cls in classes.items()}


def _unknown_keys(values: Mapping[str, Any]) -> Iterable[str]:
    settings = _settings()
    for section, keys in values.items():
        if section not in settings:
            yield from _unknown_section(section, keys, settings)
        elif not isinstance(keys, Mapping):
            yield f"{section!r} is a section, got the value {keys!r}"
        else:
            for key in keys:
                if key not in settings[section]:
                    valid = ", ".join(f"{section}.{k}" for k in settings[section])
                    yield f"unknown key {section}.{key}{hint(f'{section}.{key}', settings) or f'; valid are {valid}'}"


def _unknown_section(section: str, values: Any, settings: Mapping[str, list[str]]) -> Iterable[str]:
    """A key outside of any section, another framework's section, or a misspelt one."""
    valid = f"; valid are {', '.join(settings)}"
    foreign = [f"unknown key {path}{found}" for path in _leaves(section, values) if (found := hint(path, settings))]
    if not isinstance(values, Mapping):
        yield f"unknown section {section!r}{hint(section, settings) or valid}"
    elif near := nearest(section, settings):
        yield f"unknown section {section!r}{near}"
    else:
        yield from foreign or [f"unknown section {section!r}{valid}"]


def _leaves(path: str, values: Any) -> Iterable[str]:
    if not isinstance(values, Mapping):
        yield path
    else:
        for key, value in values.items():
            yield from _leaves(f"{path}.{key}", value)


def _describe(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return str(message)
    got = json.dumps(error["input"], default=str)
    return f"{where}: {message[0].lower()}{message[1:]}, got {got}"
