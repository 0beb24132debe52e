"""What sections may not say together: every refusal that needs to see more than one of them.

A rule takes the sections that it compares and yields a sentence for each contradiction, with the rule and the value
got; a root names the rules that hold for it. What one section says wrong about itself is refused beside it.
"""

from collections.abc import Iterator

from kitae.algorithms.config import AlgorithmConfig, needs_group
from kitae.algorithms.requirements import Trait
from kitae.algorithms.stages import STAGES
from kitae.engines.config import EngineConfig, SamplingConfig
from kitae.envs.config import EnvConfig
from kitae.models.config import ModelConfig
from kitae.offline.config import DistilMethod, MethodConfig
from kitae.rl.config import EvalConfig, PipelineConfig
from kitae.trainer.config import TrainingConfig
from kitae.verifiers.config import VerifierConfig
from kitae.workers.config import ClusterConfig
from kitae.workers.gpus import COMPUTING


def groups(a: AlgorithmConfig, t: TrainingConfig) -> Iterator[str]:
    size = t.group_size
    if size < 2 and needs_group(a):
        yield f"training.group_size must be at least 2 for advantage {a.advantage.name!r}, got {size}"
    filters = {name.strip() for name in str(a.filter.name).split("+")}
    if size < 2 and ("zero-variance" in filters or {"all-correct", "all-wrong"} <= filters):
        yield (
            f"training.group_size must be at least 2 for filter {a.filter.name!r}, got {size}: it would drop every "
            "group"
        )
    if a.advantage.name == "pass-at-k" and (k := a.advantage.setting("k")) >= size:
        yield (
            f"algorithm.advantage.k must be below training.group_size = {size}, got {k}: one correct answer would make "
            "all draws of k succeed"
        )


def turns(a: AlgorithmConfig, env: EnvConfig) -> Iterator[str]:
    if Trait.TURNS in a.traits("advantage") and (env.name == "single" or env.turns == 1):
        got = "'single'" if env.name == "single" else f"{env.name!r} with env.turns = 1"
        yield f"algorithm.advantage {a.advantage.name!r} is for environments with several turns, got env.name = {got}"


def sizes(a: AlgorithmConfig, t: TrainingConfig, sampling: SamplingConfig) -> Iterator[str]:
    if a.critic.warmup is not None and a.critic.warmup >= t.steps:
        yield (
            f"algorithm.critic.warmup must be below training.steps = {t.steps}, got {a.critic.warmup}: the policy "
            "would never learn"
        )
    if t.minibatches > t.prompts_per_step:
        yield f"training.minibatches must be at most prompts_per_step = {t.prompts_per_step}, got {t.minibatches}"
    buffer = a.shaping.setting("overlong_buffer") if a.shaping.name == "standard" else None
    if buffer and buffer > sampling.max_tokens:
        yield (
            f"algorithm.shaping.overlong_buffer must be at most sampling.max_tokens = {sampling.max_tokens}, got "
            f"{buffer}"
        )


def plain(model: ModelConfig, engine: EngineConfig) -> Iterator[str]:
    if model.plain and engine.weights_dtype != "model":
        yield f"model.plain needs engine.weights_dtype = 'model', got {engine.weights_dtype!r}: it has no kernels"


def exact(model: ModelConfig, engine: EngineConfig) -> Iterator[str]:
    if not model.exact:
        return
    if model.plain:
        yield "model.exact runs on kernels of its own, got model.plain = true, which asks for none"
    if engine.cache_dtype != "model":
        yield f"model.exact needs engine.cache_dtype = 'model', got {engine.cache_dtype!r}: 8 bits are not exact"
    if engine.weights_dtype != "model":
        yield f"model.exact needs engine.weights_dtype = 'model', got {engine.weights_dtype!r}: 8 bits are not exact"
    if engine.kind == "process" and not model.device.startswith("cuda"):
        yield (
            "model.exact needs engine.kind = 'native' on a CPU, got 'process': with another number of threads a "
            "product is added up in another order (on a GPU, name it: model.device = 'cuda')"
        )


def served(
    c: ClusterConfig, model: ModelConfig, engine: EngineConfig, p: PipelineConfig, e: EvalConfig
) -> Iterator[str]:
    """What a server of other people cannot do."""
    if not engine.serves:
        return
    if model.exact:
        yield f"model.exact needs Kitae's own kernels in the engine, got engine.kind = {engine.kind!r}"
    if engine.kind == "sglang" and p.in_flight == "keep":
        yield (
            "pipeline.in_flight must be 'recompute' with engine.kind = 'sglang', got 'keep': it cannot empty a cache "
            "that running requests use"
        )
    if engine.kind == "sglang" and (e.top_p < 1 or e.top_k or e.min_p):
        yield (
            "eval.top_p, top_k and min_p must be off with engine.kind = 'sglang', whose log-probs are those before "
            f"them, got {e.top_p:g}, {e.top_k} and {e.min_p:g}"
        )
    if engine.kind == "vllm" and e.top_p < 1 and e.min_p:
        yield (
            "eval.top_p or eval.min_p must be off with engine.kind = 'vllm', which applies them in the other order, "
            f"got {e.top_p:g} and {e.min_p:g}"
        )


def truncated(sampling: SamplingConfig, engine: EngineConfig, m: MethodConfig) -> Iterator[str]:
    """Who must know which tokens the engine kept, and cannot."""
    if not sampling.truncates:
        return
    asked = f"{sampling.top_p:g}, {sampling.top_k} and {sampling.min_p:g}"
    rule = "sampling.top_p, top_k and min_p must be off with"
    if engine.serves:
        yield f"{rule} engine.kind = {engine.kind!r}, which does not say what it kept, got {asked}"
    if engine.proof.share:
        yield f"{rule} engine.proof.share = {engine.proof.share:g}: what an engine kept proves nothing, got {asked}"
    if isinstance(m, DistilMethod) and m.teacher.url:
        yield f"{rule} method.teacher.url, whose log-probs are over the whole vocabulary, got {asked}"


def four_bits(model: ModelConfig, c: ClusterConfig) -> Iterator[str]:
    if model.lora_base != "nf4":
        return
    if not model.lora_rank:
        yield "model.lora_base = 'nf4' needs adapters, which learn instead of the weights: give model.lora_rank"
    if model.exact:
        yield "model.lora_base = 'nf4' needs model.exact = false, whose layers have whole weights"
    if c.ranks > 1:
        yield f"model.lora_base = 'nf4' needs cluster.ranks = 1, got {c.ranks}: codes are not sharded"


def four_bits_sampled(model: ModelConfig, engine: EngineConfig) -> Iterator[str]:
    if model.lora_base == "nf4" and (engine.serves or engine.weights_dtype != "model"):
        yield (
            "model.lora_base = 'nf4' needs an engine that samples from the same 4 bits: Kitae's own, with "
            f"engine.weights_dtype = 'model', got {engine.kind!r} and {engine.weights_dtype!r}"
        )


def reference(a: AlgorithmConfig, model: ModelConfig) -> Iterator[str]:
    if a.reference.name == "ema" and model.lora_rank:
        yield (
            "algorithm.reference must be 'frozen' or 'reset' with model.lora_rank, got 'ema': the mean of two pairs of "
            "adapters is not the adapter of the mean"
        )


def routing(a: AlgorithmConfig, t: TrainingConfig, c: ClusterConfig, engine: EngineConfig) -> Iterator[str]:
    if a.experts.routing not in ("old", "engine"):
        return
    if a.experts.routing == "engine" and engine.serves:
        yield (
            "algorithm.experts.routing = 'engine' needs Kitae's own engines, which record the experts that they choose"
            f", got engine.kind = {engine.kind!r}"
        )
    if a.experts.routing == "old" and t.minibatches * t.epochs == 1:
        yield (
            "algorithm.experts.routing = 'old' needs training.minibatches × training.epochs above 1, got 1: the update "
            "of a batch is computed by π_old itself"
        )
    if c.ranks > 1:
        yield (
            f"algorithm.experts.routing = {a.experts.routing!r} needs cluster.ranks = 1, got {c.ranks}: experts are "
            "not sent to ranks"
        )
    elif c.backend == "ray":
        yield (
            f"algorithm.experts.routing = {a.experts.routing!r} needs the trainer beside the controller, got "
            "cluster.backend = 'ray', where it is a rank: experts are not sent to ranks"
        )


def routers(a: AlgorithmConfig, c: ClusterConfig) -> Iterator[str]:
    """The terms of a mixture of experts."""
    for key, value in (("z_coef", a.experts.z_coef), ("balance_coef", a.experts.balance_coef)):
        if value and (c.ranks > 1 or c.backend == "ray"):
            yield (
                f"algorithm.experts.{key} must be 0 with ranks (cluster.ranks above 1, or backend 'ray'), got {value:g}"
            )
    if a.experts.balance_coef and a.experts.routing not in ("old", "engine"):
        yield (
            f"algorithm.experts.balance_coef = {a.experts.balance_coef:g} needs algorithm.experts.routing = 'old' or "
            f"'engine', which know the experts of a batch before its first update, got {a.experts.routing!r}"
        )


def placed(c: ClusterConfig, engine: EngineConfig, model: ModelConfig, m: MethodConfig) -> Iterator[str]:
    if engine.kind == "native" and (c.ranks > 1 or c.backend == "ray"):
        yield (
            "engine.kind must be one with weights of its own (process, vllm, sglang) with cluster.ranks above 1 or "
            f"cluster.backend = 'ray', got 'native' with {c.ranks} and {c.backend!r}"
        )
    yield from _gpus(c, model)
    if c.ranks > 1 and isinstance(m, DistilMethod) and not m.teacher.url:
        yield f"cluster.ranks = {c.ranks} needs a teacher behind a server (method.teacher.url), got one that is loaded"
    if c.ranks > 1 and model.exact:
        yield f"model.exact needs cluster.ranks = 1, got {c.ranks}: sums over ranks are added up in another order"


def _gpus(c: ClusterConfig, model: ModelConfig) -> Iterator[str]:
    """On a Ray cluster a process sees the GPUs that its pool asks for, and no others."""
    if c.backend != "ray" or not model.device.startswith("cuda"):
        return
    if model.device != "cuda":
        yield f"model.device must be auto, cpu or cuda with cluster.backend = 'ray', got {model.device!r}"
    for name in COMPUTING:
        if name in c.pools and c.pools[name].gpus == 0:
            yield f"cluster.pools.{name}.gpus must be above 0 with model.device = 'cuda', got 0"


def engineless(c: ClusterConfig, model: ModelConfig) -> Iterator[str]:
    """Where nothing is sampled."""
    yield from _gpus(c, model)
    if c.ranks > 1 and model.exact:
        yield f"model.exact needs cluster.ranks = 1, got {c.ranks}: sums over ranks are added up in another order"


def commanded(e: EnvConfig) -> Iterator[str]:
    if e.command and e.name != "command":
        yield f"env.command is run by env.name = 'command', got {e.name!r}"
    if e.name == "command" and not e.command and "command" not in e.params:
        yield "env.name = 'command' needs env.command, got none"
    if e.command and "command" in e.params:
        yield f"env.command is {e.command!r}, so env.params must have no command, got {e.params['command']!r}"


def taught(a: AlgorithmConfig, m: MethodConfig) -> Iterator[str]:
    """Without a teacher, nothing may read one."""
    for stage in STAGES if m.kind != "distil" else ():
        if found := (Trait.TEACHER | Trait.DIVERGENCE) & a.traits(stage):
            what = "log-probs of a teacher" if Trait.TEACHER in found else "the divergence from a teacher"
            chosen = f"algorithm.{stage} {a.choice(stage).name!r}"
            yield f"{chosen} reads {what}: it needs method.kind = 'distil', got {m.kind!r}"


def teacher(a: AlgorithmConfig, m: DistilMethod, sampling: SamplingConfig, v: VerifierConfig) -> Iterator[str]:
    read, own = Trait(0), a.has_own_functions
    for stage in STAGES:
        read |= a.traits(stage)
    wanted = Trait.TEACHER if m.loss == "reverse-kl" else Trait.DIVERGENCE
    if not own and wanted not in read:
        what = "log-probs of the teacher" if wanted is Trait.TEACHER else "the divergence from the teacher"
        preset = "distil" if wanted is Trait.TEACHER else "gkd"
        yield (
            f"method.loss = {m.loss!r} needs a stage that reads {what}, got none in preset {a.preset!r} (preset "
            f"{preset!r} has one)"
        )
    if m.loss != "jsd" and Trait.DIVERGENCE in read:
        yield f"algorithm.gate {a.gate.name!r} needs method.loss = 'jsd', got {m.loss!r}"
    if m.teacher.url and sampling.temperature != 1:
        yield (
            f"method.teacher.url needs sampling.temperature = 1, got {sampling.temperature:g}: the log-probs of a "
            "server are those at 1"
        )
    if v.name == "none" and a.advantage.name == "reverse-kl" and (coef := a.advantage.setting("reward_coef")):
        yield f"algorithm.advantage.reward_coef is {coef:g}, but verifier.name = 'none' gives every response 0"


def staleness(a: AlgorithmConfig, p: PipelineConfig) -> Iterator[str]:
    if p.overdue == "drop" and not p.max_staleness:
        yield "pipeline.overdue = 'drop' needs pipeline.max_staleness of at least 1, got 0: nothing can be overdue"
    if p.refill.most and a.filter.name == "none" and a.truncation not in ("drop", "mask"):
        yield (
            "pipeline.refill replaces dropped groups, but algorithm.filter = 'none' drops none (a preset given on the "
            "command line replaces the recipe's choices of the algorithm)"
        )
