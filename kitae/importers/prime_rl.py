"""prime-rl 0.8: the TOML of `rl`, with trainer, orchestrator and inference in it.

What is not given is prime-rl's default: batches of 128 rollouts, reward minus the mean of the group, a trust region of
0.3 in probability to what sampled (IPO), rollouts up to eight versions old. Environments are packages of `verifiers`,
and run in the interpreter that has them.
"""

import importlib.util
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kitae.errors import ConfigError
from kitae.importers.command_lines import flattened, parse_flags, split_command
from kitae.importers.translation import Joint, No, Nothing, Rule, To, Translation, all_of, whole

_O, _T = "orchestrator", "trainer"
_ALGO = f"{_O}.train.algo"
_WHERE = "where, how fast, or with how much memory"

RULES: dict[str, Rule] = {
    "model.name": To("model.path", "Qwen/Qwen3-0.6B"), "max_steps": To("training.steps", None),
    "seq_len": Joint(2048), f"{_O}.seq_len": Joint(), f"{_T}.model.seq_len": Nothing(_WHERE),
    f"{_T}.model.name": To("model.path"), f"{_O}.model.name": Nothing("the model is that of the trainer"),
    f"{_O}.batch_size": Joint(128), f"{_O}.group_size": To("training.group_size", 1),
    f"{_O}.rollouts_per_example": Joint(),
    f"{_O}.token_batch_size": No("a batch is a number of prompts: training.prompts_per_step"),
    f"{_O}.max_off_policy_steps": To("pipeline.max_staleness", 8),
    f"{_O}.train.sampling.temperature": To("sampling.temperature", 1.0),
    f"{_O}.train.sampling.max_completion_tokens": Joint(), f"{_O}.train.sampling.max_tokens": Joint(),
    f"{_O}.train.sampling.top_p": To("sampling.top_p", 1.0), f"{_O}.train.sampling.min_p": To("sampling.min_p", 0.0),
    f"{_O}.train.sampling.top_k": To("sampling.top_k", None, lambda k: max(0, k)),
    f"{_O}.train.sampling.extra_body": No("requests have no further fields", (None, {})),
    f"{_O}.train.source": Joint(), f"{_O}.train.env": Joint(), f"{_O}.env": Joint(),
    f"{_ALGO}.type": Joint("grpo"), f"{_ALGO}.loss_aggregation": Joint("token"),
    f"{_ALGO}.length_weighted_baseline": Joint(False),
    f"{_ALGO}.length_penalty.num_output_tokens_weight": To("algorithm.shaping.length_penalty"),
    **all_of(f"{_ALGO}.length_penalty.num_input_tokens_weight {_ALGO}.length_penalty.num_turns_weight",
             No("the penalty counts what the model says", (0, 0.0))),
    f"{_ALGO}.length_penalty.type": Joint(),
    f"{_O}.eval.interval": To("eval.every"), f"{_O}.eval.source": Joint(), f"{_O}.eval.env": Joint(),
    f"{_O}.eval.num_examples": To("eval.prompts", None, lambda n: n if n > 0 else None),
    f"{_O}.eval.group_size": To("eval.samples"), f"{_O}.eval.sampling.temperature": To("eval.temperature"),
    f"{_O}.constant_trainer_batch_size": Joint(True),
    f"{_T}.optim.lr": To("training.lr", 1e-6), f"{_T}.optim.weight_decay": To("training.weight_decay", 0.01),
    f"{_T}.optim.max_norm": To("training.clip_norm", 1.0), f"{_T}.optim.type": No("the optimizer is AdamW", ("adamw",)),
    f"{_T}.optim.betas1": Joint(0.9), f"{_T}.optim.betas2": Joint(0.999),
    f"{_T}.scheduler.type": Joint("constant"), f"{_T}.scheduler.warmup_steps": To("training.warmup_steps"),
    f"{_T}.scheduler.decay_steps": No("a linear schedule falls over the whole run"),
    f"{_T}.scheduler.min_lr": No("schedules end at 0", (0, 0.0)),
    f"{_T}.loss.type": Joint("ipo"), f"{_T}.loss.eps": Joint(0.3), f"{_T}.loss.max_importance_ratio": Joint(1e4),
    f"{_T}.loss.ratio_low": Joint(0.2), f"{_T}.loss.ratio_high": Joint(5.0), f"{_T}.loss.adv_tau": Joint(1.0),
    f"{_T}.model.lora.rank": To("model.lora_rank"), f"{_T}.model.lora.alpha": To("model.lora_alpha"),
    f"{_T}.model.lora.target_modules": To("model.lora_targets", None, ",".join),
    f"{_T}.model.lora.dropout": No("adapters have no dropout", (0, 0.0)),
    f"{_T}.model.ac": Joint(), f"{_T}.model.ac.freq": Joint(), f"{_T}.model.ac.mode": Joint(),
    f"{_T}.model.optimization_dtype": Nothing("AdamW's masters are float32"),
    f"{_T}.enable_router_replay": Joint(False),
    "ckpt.interval": To("checkpoint.every"), "ckpt.keep_last": To("checkpoint.keep"),
    **all_of("ckpt ckpt.keep_interval ckpt.resume_step ckpt.output_dir",
    Nothing("runs are saved and resumed: kitae resume")),
    "wandb.project": To("observe.project"), "wandb.name": To("run.name"),
    "monitors.wandb.project": To("observe.project"), "monitors.wandb.name": To("run.name"), "run.name": To("run.name"),
}  # fmt: skip

_IDLE = ("deployment", "inference", "slurm", "log", "wandb", "monitors", "weight_broadcast", "rollout_transport",
"output_dir",
         "clean", "bench", "dashboard", "env_vars", "run", "resume", "tokenizer", f"{_O}.renderer", f"{_O}.log",
         f"{_O}.concurrency", f"{_O}.num_train_workers", f"{_O}.client", f"{_O}.tokenizer", f"{_O}.max_inflight",
         f"{_O}.oversampling", f"{_O}.weight_broadcast", f"{_O}.train.max_retries", f"{_O}.eval.skip_first_step",
         f"{_T}.model", f"{_T}.log", f"{_T}.ckpt", f"{_T}.weight_broadcast", f"{_T}.metrics_server", f"{_O}.ckpt",
         f"{_O}.eval.sampling", f"{_O}.eval.max_retries")  # fmt: skip


def read(source: str, overrides: Sequence[str], beside: Path) -> Translation:
    """From the TOML of `rl`, or a command line: `rl @ rl.toml --max-steps 20`."""
    words = split_command(source) if " " in source else [source]
    given: dict[str, Any] = {}
    for file in (word for word in words if word.endswith(".toml")):
        try:
            given |= flattened(tomllib.loads(Path(file).read_text("utf-8")))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from None
    flags = parse_flags([word for word in (*words, *overrides) if not word.endswith(".toml") and word != "@"])
    given |= {key.replace("-", "_"): value for key, value in flags.items()}
    if not given:
        raise ConfigError(f"kitae import prime-rl reads a .toml, got {source!r}")
    return translate(given)


def translate(given: Mapping[str, Any]) -> Translation:
    given = {_now(key): value for key, value in given.items()}
    idle = {key: Nothing(_WHERE) for key in given if key not in RULES and key.startswith(_IDLE)}
    t = Translation("prime-rl", {**RULES, **idle}, given)
    t.simple()
    if "max_steps" not in given:
        t.near("max_steps", "prime-rl trains until it is stopped; training.steps is 100, set it")
        t.set("training.steps", 100, of="max_steps")
    _batches(t)
    _environment(t)
    _optimizer(t)
    t.set("algorithm.preset", "grpo", of=f"{_ALGO}.type")
    _algorithm(t)
    _loss(t)
    if any(key.startswith(("wandb", "monitors.wandb")) for key in given):
        of = next(k for k in given if k.startswith(("wandb", "monitors.wandb")))
        if importlib.util.find_spec("wandb"):
            t.set("observe.trackers", ["wandb"], of=of)
        else:
            t.near(of, "wandb is not installed here: with it, set observe.trackers = ['wandb']")
    return t


def _now(key: str) -> str:
    """What older examples call otherwise."""
    sampling = f"{_O}.sampling."
    return key.replace(sampling, f"{_O}.train.sampling.") if key.startswith(sampling) else key


def _batches(t: Translation) -> None:
    group = t[f"{_O}.rollouts_per_example"] or t[f"{_O}.group_size"]
    if f"{_O}.rollouts_per_example" in t.given:
        t.set("training.group_size", group, of=f"{_O}.rollouts_per_example")
    prompts = whole(t[f"{_O}.batch_size"] / group, "prompts of a batch", t, f"{_O}.batch_size")
    t.set("training.prompts_per_step", prompts, of=f"{_O}.batch_size")
    if t[f"{_O}.max_off_policy_steps"]:
        t.set("pipeline.overdue", "drop", of=f"{_O}.max_off_policy_steps")
    if t[f"{_O}.constant_trainer_batch_size"]:
        t.set("algorithm.filter", "zero-variance", of=f"{_O}.constant_trainer_batch_size")
        t.set("pipeline.refill", 3.0, of=f"{_O}.constant_trainer_batch_size")
    tokens = next((k for k in ("max_completion_tokens", "max_tokens") if t[f"{_O}.train.sampling.{k}"]), None)
    if tokens:
        t.set("sampling.max_tokens", t[f"{_O}.train.sampling.{tokens}"], of=f"{_O}.train.sampling.{tokens}")
    else:
        key = f"{_O}.seq_len" if t[f"{_O}.seq_len"] else "seq_len"
        t.set("sampling.max_tokens", t[key], of=key)
        t.near(key, "it is the most of a response; in prime-rl of prompt and response together")


def _environment(t: Translation) -> None:
    """A package of `verifiers`; its taskset's settings are its arguments."""
    of = next((k for k in (f"{_O}.train.source", f"{_O}.train.env", f"{_O}.env") if t[k]), f"{_O}.train.source")
    sources = t[of] if isinstance(t[of], list) else []
    if len(sources) != 1:
        t.refuse(of, f"a recipe has one environment, got {len(sources)}: mix them in one of your own")
        if not sources:
            return
    first = flattened(sources[0])
    inside = {key.removeprefix("env."): value for key, value in first.items()}
    name = inside.get("taskset.id") or inside.get("id")
    if not isinstance(name, str):
        t.refuse(of, "it must name a taskset: env.taskset.id")
        return
    t.set("data.task", "episodes", of=of)
    t.set("env.name", "verifiers", of=of)
    t.set("env.params.environment", name.rpartition("/")[2], of=of)
    here = sys.executable if importlib.util.find_spec("verifiers") else ".venv/bin/python"
    t.set("env.params.python", here, of=of)
    if not Path(here).exists():
        t.note("env.params.python must be the interpreter that has verifiers and the environment.")
    taken = ("taskset.", "args.")
    args = {k.removeprefix(p): v for p in taken for k, v in inside.items() if k.startswith(p) and k != "taskset.id"}
    if args:
        t.set("env.params.args", _nested(args), of=of)
    if settings := {k: v for k, v in inside.items() if k.startswith(("agent.", "harness."))}:
        t.set("env.params.settings", _nested(settings), of=of)
    t.set("verifier.check_gold", False, of=of)
    rest = [
        k for k in inside if not k.startswith((*taken, "agent.", "harness.")) and k not in ("id", "name", "taskset.id")
    ]
    if rest:
        t.near(of, f"{', '.join(rest)} of the source are not kept")
    for key in (f"{_O}.eval.source", f"{_O}.eval.env"):
        if t[key]:
            t.near(key, "held-out tasks of the training environment are measured; others with kitae eval")


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in flat.items():
        *tables, last = path.split(".")
        place = found
        for table in tables:
            place = place.setdefault(table, {})
        place[last] = value
    return found


def _optimizer(t: Translation) -> None:
    t.set("training.betas", [t[f"{_T}.optim.betas1"], t[f"{_T}.optim.betas2"]], of=f"{_T}.optim.betas2")
    kind = t[f"{_T}.scheduler.type"]
    t.set("training.schedule", kind if kind in ("linear", "cosine") else "constant", of=f"{_T}.scheduler.type")
    if kind == "linear":
        t.near(f"{_T}.scheduler.type", "it falls from the warm-up to the end; in prime-rl over its last decay_steps")
    if any(key.startswith(f"{_T}.model.ac") for key in t.given):
        of = next(key for key in t.given if key.startswith(f"{_T}.model.ac"))
        t.set("training.checkpoint_activations", True, of=of)
    if t[f"{_T}.enable_router_replay"]:
        t.set("algorithm.experts.routing", "engine", of=f"{_T}.enable_router_replay")


def _algorithm(t: Translation) -> None:
    of, kind = f"{_ALGO}.type", t[f"{_ALGO}.type"]
    if kind == "max_rl":
        t.set("algorithm.advantage", "mean-scaled", of=of)
    else:
        weighted = t[f"{_ALGO}.length_weighted_baseline"]
        t.set("algorithm.advantage", "length-weighted" if weighted else "group-centred", of=of)
        if kind in ("opd", "opsd", "sft"):
            t.refuse(
                of, "distillation is a kind of run: method.kind = 'distil' (docs/distillation.md); the recipe is GRPO"
            )
        elif kind != "grpo":
            t.refuse(of, "algorithms are grpo and max_rl; the recipe is GRPO")
    aggregation = "prompt-mean" if t[f"{_ALGO}.loss_aggregation"] == "prompt" else "token-mean"
    t.set("algorithm.aggregation", aggregation, of=f"{_ALGO}.loss_aggregation")
    if t[f"{_ALGO}.length_penalty.type"]:
        t.near(f"{_ALGO}.length_penalty.type", "the penalty is not scaled by the share of the group that is right")


def _loss(t: Translation) -> None:
    of, kind = f"{_T}.loss.type", t[f"{_T}.loss.type"]
    t.set("algorithm.ratio.anchor", "behaviour", of=of)
    t.set("algorithm.correction", "none", of=of)
    if kind == "icepop":
        bounds = {"low": t[f"{_T}.loss.ratio_low"], "high": t[f"{_T}.loss.ratio_high"]}
        t.set("algorithm.gate", "none", of=of)
        t.set("algorithm.ratio.anchor", "old", of=of)
        t.set("algorithm.correction", {"name": "icepop", **bounds}, of=of)
    else:
        if kind != "ipo":
            t.refuse(of, "losses are ipo and icepop; one of your own is algorithm.gate = 'file.py:function'; it is ipo")
        t.set("algorithm.gate", {"name": "divergence-mask", "tv_limit": t[f"{_T}.loss.eps"], "both_sides": True,
                                 "ratio_cap": t[f"{_T}.loss.max_importance_ratio"]}, of=of)  # fmt: skip
    if t[f"{_T}.loss.adv_tau"] != 1:
        t.refuse(
            f"{_T}.loss.adv_tau", "advantages have no factor of their own: algorithm.shaping.scale, or training.lr"
        )
