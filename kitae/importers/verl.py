"""verl 0.9: Hydra settings of PPO and its relatives, from a YAML file, a shell script, or `key=value` words.

What is not given is the default of verl's ppo_trainer: GAE with a critic, mean over tokens, dual clip at 3, 256 prompts
in a mini-batch, thirty epochs. Batches count prompts.
"""

import re
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from kitae.errors import ConfigError
from kitae.importers.command_lines import flattened, parse_value, read_yaml, split_command
from kitae.importers.sources import count_rows, source_of
from kitae.importers.translation import Joint, Nothing, Rule, Translation, whole
from kitae.importers.verl_keys import RULES, is_idle

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_C = "algorithm.rollout_correction"
_KEY = re.compile(r"[A-Za-z_][\w.@/]*")


def read(source: str, overrides: Sequence[str], beside: Path) -> Translation:
    """From a YAML file with overrides, a shell script that calls verl, or the words of such a call."""
    given: dict[str, Any] = {}
    words: list[str] = []
    if source.endswith((".yaml", ".yml")):
        given = {k: v for k, v in flattened(read_yaml(Path(source))).items() if not _is_default(v)}
    else:
        words = split_command(source)
    for word in (*words, *overrides):
        key, equals, value = word.lstrip("+~").partition("=")
        if equals and _KEY.fullmatch(key) and ("." in key or key.islower()):
            given[key] = parse_value(value)
        elif word in overrides:
            raise ConfigError(f"an override of verl has the form key=value, got {word!r}")
    if not given:
        raise ConfigError(f"kitae import verl reads a .yaml, a .sh, or key=value words, got {source!r}")
    return translate(given)


def _is_default(value: Any) -> bool:
    """Of a composed file: references to other keys, and what must be given."""
    return isinstance(value, str) and value.startswith(("${", "???"))


def translate(given: Mapping[str, Any]) -> Translation:
    rules: dict[str, Rule] = {**RULES, **{key: Nothing("where, how fast, or with how much memory") for key in given
                                          if key not in RULES and is_idle(key)}}  # fmt: skip
    rules |= {key: Joint() for key in given if "reward_kwargs." in key and key not in rules}
    t = Translation("verl", rules, {k: v for k, v in given.items() if not k.endswith("_target_")})
    t.simple()
    if t[f"{_M}.lora_rank"]:
        t.set("model.lora_alpha", t[f"{_M}.lora_alpha"], of=f"{_M}.lora_alpha")
        modules = t[f"{_M}.target_modules"]
        t.set(
            "model.lora_targets", modules if isinstance(modules, str) else ",".join(modules), of=f"{_M}.target_modules"
        )
    _data(t)
    _schedule(t, _batches(t))
    _rewards(t)
    _tools(t)
    t.set("algorithm.preset", "grpo", of="algorithm.adv_estimator")
    _advantage(t)
    _gate(t)
    _aggregation(t)
    _kl(t)
    _correction(t)
    return t


def _data(t: Translation) -> None:
    train, held = source_of(t["data.train_files"]), source_of(t["data.val_files"])
    if train is None:
        t.refuse("data.train_files", "a recipe reads one file: join them, and set data.path")
    else:
        train.put(t, "data.train_files")
    if held is None or held.is_hub:
        t.refuse("data.val_files", "held-out rows are one file: join them, and set data.eval_path")
        t.set("eval.prompts", 0, of="data.val_files")
    else:
        held.put_held_out(t, "data.val_files", held)
    t.set("data.format", "verl", of="data.prompt_key")
    if t["data.prompt_key"] != "prompt":
        t.refuse(
            "data.prompt_key", "the format verl reads the column 'prompt': rename it, or write a reader of your own"
        )
    if t.recipe.get("eval", {}).get("samples", 1) > 1 and not t.recipe["eval"].get("temperature"):
        t.refuse(f"{_R}.val_kwargs.n", "several samples need a temperature above 0; one is taken")
        t.recipe["eval"]["samples"] = 1


def _batches(t: Translation) -> int:
    """How many optimizer steps there will be."""
    prompts, mini = t["data.train_batch_size"], min(t[f"{_A}.ppo_mini_batch_size"], t["data.train_batch_size"])
    cuts = whole(prompts / mini, "optimizer steps of a batch", t, f"{_A}.ppo_mini_batch_size")
    t.set("training.minibatches", cuts, of=f"{_A}.ppo_mini_batch_size")
    train = source_of(t["data.train_files"])
    rows = count_rows(train) if train is not None else None
    key = "trainer.total_epochs"
    if steps := t["trainer.total_training_steps"]:
        key = "trainer.total_training_steps"
    elif rows is not None:
        steps = max(1, rows // prompts) * t["trainer.total_epochs"]
    else:
        steps = 100
        t.near(key, "how many rows there are is not known here: training.steps is 100, set it")
    t.set("training.steps", steps, of=key)
    if t["trainer.v1.trainer_mode"] != "sync":
        t.set("pipeline.max_staleness", t["trainer.v1.sampler.max_off_policy_threshold"], of="trainer.v1.trainer_mode")
        t.set("pipeline.overdue", "drop", of="trainer.v1.trainer_mode")
    return int(steps * cuts * t[f"{_A}.ppo_epochs"])


def _schedule(t: Translation, updates: int) -> None:
    kind = t[f"{_A}.optim.warmup_style"] or t[f"{_A}.optim.lr_scheduler_type"]
    if kind in ("constant", "cosine"):
        t.set("training.schedule", kind, of=f"{_A}.optim.lr_scheduler_type")
    else:
        t.refuse(f"{_A}.optim.lr_scheduler_type", "schedules are constant, linear and cosine; it is constant")
    steps, share = t[f"{_A}.optim.lr_warmup_steps"], t[f"{_A}.optim.lr_warmup_steps_ratio"]
    if steps is not None and steps > 0:
        t.set("training.warmup_steps", steps, of=f"{_A}.optim.lr_warmup_steps")
    elif share:
        t.set("training.warmup_steps", ceil(share * updates), of=f"{_A}.optim.lr_warmup_steps_ratio")


def _rewards(t: Translation) -> None:
    key = "reward.custom_reward_function.path"
    path = t[key] or t["custom_reward_function.path"]
    of = key if t[key] else "custom_reward_function.path"
    name = t["custom_reward_function.name"] or t["reward.custom_reward_function.name"]
    if path:
        t.set("verifier.name", f"{path}:{name}", of=of)
        t.set("verifier.style", "verl", of=of)
        if arguments := {key.rpartition(".")[2]: t[key] for key in _arguments(t)}:
            t.set("verifier.params.arguments", arguments, of=_arguments(t)[0])
    elif model := t["reward.reward_model.model_path"] or t["reward_model.model.path"]:
        t.set("verifier.name", "reward_model", of="reward.reward_model.enable")
        t.set("verifier.params.model", model, of="reward.reward_model.enable")
    else:
        t.set("verifier.name", "verl", of="reward.custom_reward_function.path")
        for argument in _arguments(t):
            t.refuse(
                argument, "the usual score has no arguments: write a compute_score, or use a verifier (kitae verifiers)"
            )
    t.set("verifier.check_gold", False, of=of)
    manager = t["reward_model.reward_manager"] or t["reward.reward_manager.name"]
    if manager not in ("naive", "dapo", "batch", "prime", "gdpo"):
        t.refuse(
            "reward.reward_manager.name", "a manager of your own is a verifier: verifier.name = 'file.py:function'"
        )
    if t["reward.reward_kwargs.overlong_buffer_cfg.enable"]:
        buffer = "reward.reward_kwargs.overlong_buffer_cfg.len"
        t.set("algorithm.shaping.overlong_buffer", t[buffer], of=buffer)


def _arguments(t: Translation) -> list[str]:
    """The keys that verl hands to the score function."""
    return [key for key in t.given if "reward_kwargs." in key and "overlong_buffer_cfg" not in key]


def _tools(t: Translation) -> None:
    if not t[f"{_R}.multi_turn.enable"]:
        return
    path = t[f"{_R}.multi_turn.function_tool_path"] or t["data.function_tool_path"]
    if path:
        t.set("env.name", "tools", of=f"{_R}.multi_turn.enable")
        t.set("env.params.tools", [f"{path}:function"], of=f"{_R}.multi_turn.function_tool_path")
        t.near(f"{_R}.multi_turn.function_tool_path", "name each function of the file, without verl's decorator")
        length = f"{_R}.multi_turn.max_tool_response_length"
        t.set("env.params.output", max(50, t[length]), of=length)
    else:
        t.refuse(f"{_R}.multi_turn.tool_config_path", "a BaseTool with a YAML file: write its execute as a function "
                                                      "with "
                 "type hints, env.params.tools = ['file.py:function'] (docs/agents.md)")  # fmt: skip


def _advantage(t: Translation) -> None:
    of, kind, scaled = "algorithm.adv_estimator", t["algorithm.adv_estimator"], t["algorithm.norm_adv_by_std_in_grpo"]
    kind = getattr(kind, "value", kind)
    spread: dict[str, Any] = {"name": "group-zscore"} if scaled else {"name": "group-centred"}
    known: dict[str, dict[str, Any]] = {
        "gae": {"name": "gae", "whiten": "tokens", "gamma": t["algorithm.gamma"], "gae_lambda": t["algorithm.lam"]},
        "grpo": spread, "grpo_vectorized": spread,
        "grpo_passk": {"name": "best-margin"},
        "rloo": {"name": "leave-one-out"}, "rloo_vectorized": {"name": "leave-one-out"},
        "opo": {"name": "length-weighted"}, "remax": {"name": "greedy"},
        "gpg": {"name": "group-centred", "whiten": "successes"},
        "reinforce_plus_plus": {"name": "returns", "whiten": "tokens", "gamma": t["algorithm.gamma"]},
        "reinforce_plus_plus_baseline": {"name": "group-centred", "whiten": "tokens"},
        "gdpo": {"name": "each-zscore", "whiten": "tokens"},
    }  # fmt: skip
    if kind not in known:
        t.refuse(of, f"estimators are {', '.join(known)}; the recipe has the preset's")
        return
    if kind == "gdpo":
        known[kind]["rewards"] = list(t["algorithm.gdpo_reward_keys"] or ())
        if weights := t["algorithm.gdpo_reward_weights"]:
            known[kind]["weights"] = list(weights)
    t.set("algorithm.advantage", known[kind], of=of)
    if kind == "gae":
        t.set("algorithm.critic.lr", t["critic.optim.lr"], of="critic.optim.lr")
        t.set("algorithm.critic.clip", t["critic.cliprange_value"], of="critic.cliprange_value")
        if t["trainer.critic_warmup"]:
            t.set("algorithm.critic.warmup", t["trainer.critic_warmup"], of="trainer.critic_warmup")
    else:
        for key in ("critic.optim.lr", "critic.cliprange_value", "trainer.critic_warmup"):
            if key in t.given:
                t.idle(key, f"{kind} has no critic")
    if kind == "grpo_passk" and not scaled:
        t.refuse("algorithm.norm_adv_by_std_in_grpo", "best-margin is divided by the deviation of the group")
    if t["algorithm.filter_groups.enable"]:
        t.set("algorithm.filter", "zero-variance", of="algorithm.filter_groups.enable")
        most = t["algorithm.filter_groups.max_num_gen_batches"]
        t.set("pipeline.refill", float(most if most > 0 else 10), of="algorithm.filter_groups.max_num_gen_batches")


def _gate(t: Translation) -> None:
    of, mode = f"{_A}.policy_loss.loss_mode", t[f"{_A}.policy_loss.loss_mode"]
    if t[f"{_C}.bypass_mode"] and t[f"{_C}.loss_type"] == "reinforce":
        _weighted(t)
        return
    plain = t[f"{_A}.clip_ratio"]
    low = t[f"{_A}.clip_ratio_low"] if f"{_A}.clip_ratio" not in t.given or f"{_A}.clip_ratio_low" in t.given else plain
    high = (
        t[f"{_A}.clip_ratio_high"] if f"{_A}.clip_ratio" not in t.given or f"{_A}.clip_ratio_high" in t.given else plain
    )
    if f"{_A}.clip_ratio" in t.given and low != plain:
        t.idle(f"{_A}.clip_ratio", "clip_ratio_low and clip_ratio_high are what verl reads")
    band, cap = {"clip_low": low, "clip_high": high}, t[f"{_A}.clip_ratio_c"]
    known: dict[str, dict[str, Any]] = {
        "vanilla": {"name": "clip", **band, "dual_clip": cap},
        "bypass_mode": {"name": "clip", **band, "dual_clip": cap},
        "gspo": {"name": "clip", **band},
        "sapo": {"name": "sigmoid", "tau_positive": t[f"{_A}.tau_pos"], "tau_negative": t[f"{_A}.tau_neg"]},
        "gpg": {"name": "likelihood"},
        "cispo": {"name": "weight-clip", "weight_floor": 1 - low, "weight_cap": 1 + high},
        "geo_mean": {"name": "geometric-clip", **band},
        "dro": {"name": "squared", "pull": t[f"{_A}.policy_loss.dro_beta"]},
        "dppo_tv": {"name": "divergence-mask", "tv_limit": high, "ratio_cap": cap},
        "dppo_kl": {"name": "kl-mask", "kl_limit": high, "ratio_cap": cap},
        "clip_cov": {"name": "clip-cov", **band, "cov_share": t[f"{_A}.policy_loss.clip_cov_ratio"]},
        "kl_cov": {"name": "kl-cov", "cov_share": t[f"{_A}.policy_loss.kl_cov_ratio"],
                   "cov_coef": t[f"{_A}.policy_loss.ppo_kl_coef"]},
    }  # fmt: skip
    if mode not in known:
        t.refuse(of, f"losses are {', '.join(known)}; the recipe clips as 'vanilla' does")
        mode = "vanilla"
    if mode == "vanilla" and cap <= 1 + high:
        t.refuse(f"{_A}.clip_ratio_c", f"it acts above 1 + clip_ratio_high = {1 + high:g} only")
        known[mode].pop("dual_clip")
    if mode == "gspo":
        t.set("algorithm.ratio", "sequence-mean-token", of=of)
        if max(low, high) > 0.05:
            t.refuse(f"{_A}.clip_ratio_high", "of the mean ratio of a sequence a clip above 0.05 never acts (GSPO: "
                                              "3e-4 "
                     "and 4e-4, which the recipe sets)")  # fmt: skip
            known[mode] |= {"clip_low": 3e-4, "clip_high": 4e-4}
    if mode.startswith("dppo") and low != high:
        t.refuse(f"{_A}.clip_ratio_low", f"the limit is one for both signs of the advantage, {high:g}")
    if mode.endswith("_cov"):
        t.near(
            of, "tokens are ranked over the whole step by the log-probs that sampled them; in verl in each micro-batch"
        )
    t.set("algorithm.gate", known[mode], of=of)


def _aggregation(t: Translation) -> None:
    of, mode = f"{_A}.loss_agg_mode", t[f"{_A}.loss_agg_mode"]
    if t[f"{_A}.policy_loss.loss_mode"] in ("gspo", "sapo", "geo_mean"):
        if mode != "seq-mean-token-mean" and of in t.given:
            t.idle(of, "this loss is a mean over responses whatever it says, in verl too")
        mode = "seq-mean-token-mean"
        if t[f"{_A}.entropy_coeff"] or t[f"{_A}.use_kl_loss"]:
            t.near(of, "entropy and KL terms are averaged like the loss; in verl as loss_agg_mode says")
    if mode == "seq-mean-token-sum-norm":
        length = t[f"{_A}.loss_scale_factor"] or "max_tokens"
        t.set("algorithm.aggregation", {"name": "constant-length", "length": length}, of=of)
    elif mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"):
        t.set("algorithm.aggregation", mode, of=of)
    else:
        t.refuse(of, "there is no such mean; it is over tokens")
        t.set("algorithm.aggregation", "token-mean", of=of)


def _kl(t: Translation) -> None:
    if t["algorithm.use_kl_in_reward"]:
        of = "algorithm.use_kl_in_reward"
        if t["algorithm.kl_penalty"] not in ("kl", "k1"):
            t.refuse("algorithm.kl_penalty", "through the reward only k1 has the gradient of the KL; it is k1")
        t.set("algorithm.kl", {"name": "k1", "coef": t["algorithm.kl_ctrl.kl_coef"], "into": "reward"}, of=of)
        t.set("algorithm.reference", "frozen", of=of)
        if t["algorithm.kl_ctrl.type"] == "adaptive":
            lengths = t["data.max_response_length"]
            t.set("algorithm.kl.target", t["algorithm.kl_ctrl.target_kl"] * lengths, of="algorithm.kl_ctrl.target_kl")
            t.set("algorithm.kl.horizon", t["algorithm.kl_ctrl.horizon"], of="algorithm.kl_ctrl.horizon")
            t.near("algorithm.kl_ctrl.target_kl", "the target is of a response, in verl of a token: times the longest")
        if t[f"{_A}.use_kl_loss"]:
            t.refuse(f"{_A}.use_kl_loss", "there is one KL term; it is in the reward")
        return
    if not t[f"{_A}.use_kl_loss"]:
        return
    kind = t[f"{_A}.kl_loss_type"]
    known = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2", "abs": "abs"}
    if kind in known:
        name = known[kind]
    elif str(kind).endswith("+"):
        name = "k2"
        t.near(f"{_A}.kl_loss_type", "its gradient is that of k2, and its value too")
    else:
        name = "k2"
        t.refuse(f"{_A}.kl_loss_type", "k1 in the loss has an expected gradient of zero; it is k2")
    t.set("algorithm.kl", {"name": name, "coef": t[f"{_A}.kl_loss_coef"]}, of=f"{_A}.use_kl_loss")
    t.set("algorithm.reference", "frozen", of=f"{_A}.use_kl_loss")


def _correction(t: Translation) -> None:
    level, bounds, of = t[f"{_C}.rollout_is"], t[f"{_C}.rollout_is_threshold"], f"{_C}.rollout_is"
    if t[f"{_C}.bypass_mode"]:
        _bypass(t)
        return
    weights: dict[str, Any] = {"name": "none"}
    if isinstance(bounds, str) and "_" in bounds:
        low, high = (float(x) for x in bounds.split("_", 1))
        if level:
            weights = {"token": {"name": "icepop", "low": low, "high": high},
                       "sequence": {"name": "sequence-mask", "bottom": low, "cap": high}}[level]  # fmt: skip
    elif level:
        weights = {"name": {"token": "tis", "sequence": "sequence-tis"}[level], "cap": float(bounds)}
    if level and t[f"{_A}.policy_loss.loss_mode"] == "geo_mean":
        t.refuse(of, "the geometric mean of a response takes no weight of single tokens")
        weights = {"name": "none"}
    t.set("algorithm.correction", weights, of=of)


def _bypass(t: Translation) -> None:
    """No π_old: the ratio is to what sampled."""
    of = f"{_C}.bypass_mode"
    t.set("algorithm.correction", "none", of=of)
    if t[f"{_C}.loss_type"] == "ppo_clip" or t[f"{_C}.rollout_is"] == "token":
        t.set("algorithm.ratio.anchor", "behaviour", of=of)
    elif t[f"{_C}.rollout_is"] == "sequence":
        t.set("algorithm.ratio", {"name": "sequence-product", "anchor": "behaviour"}, of=of)


def _weighted(t: Translation) -> None:
    """The gate of bypass mode with `reinforce`: a bounded weight of the log-prob, or none."""
    of, level = f"{_C}.loss_type", t[f"{_C}.rollout_is"]
    cap = str(t[f"{_C}.rollout_is_threshold"]).rpartition("_")[2]
    gate = {"name": "weight-clip", "weight_cap": float(cap)} if level else {"name": "likelihood"}
    t.set("algorithm.gate", gate, of=of)
