"""TRL 1.16: settings of GRPOTrainer, RLOOTrainer, SFTTrainer, DPOTrainer, KTOTrainer and RewardTrainer.

What a user does not set is TRL's default, and the recipe spells it out where it is not Kitae's: a linear schedule,
three epochs, the loss "dapo", one prompt for each optimizer step of eight sequences, a mask of sequences with vLLM.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from kitae.errors import ConfigError
from kitae.importers.command_lines import parse_flags, read_yaml, split_command
from kitae.importers.sources import DataSource, count_rows
from kitae.importers.translation import Translation, Unread, whole
from kitae.importers.trl_keys import RULES, TRAINERS
from kitae.importers.trl_rewards import set_rewards
from kitae.importers.trl_script import read_script

_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}


def read(source: str, overrides: Sequence[str], beside: Path) -> Translation:
    """From a script, a YAML file or a command line: `trl grpo --config grpo.yaml`, `script.py --beta 0.04`."""
    if overrides:
        raise ConfigError(
            f"kitae import trl takes one script, file or command line (in quotes), got {overrides[0]!r} too"
        )
    words = split_command(source)
    start = next((place for place, word in enumerate(words) if word.endswith(".py")), 0)
    flags = parse_flags(words[start:])
    if isinstance(file := flags.pop("config", None), str):
        flags = {**read_yaml(Path(file)), **flags}
    scripts = [word for word in words if word.endswith(".py") and not word.startswith("-")]
    if scripts:
        script = read_script(Path(scripts[0]), beside, flags if len(words) > 1 else None)
        return translate(script.trainer, script.given, script.files)
    if len(words) == 1 and source.endswith((".yaml", ".yml")):
        given = read_yaml(Path(source))
        return translate(_guess(given, source), given, {})
    trainer = next((word for word in words if word in RULES), None)
    if trainer is None:
        raise ConfigError(f"a command line for TRL names a trainer ({', '.join(RULES)}) or a script, got {source!r}")
    return translate(trainer, flags, {})


def _guess(given: Mapping[str, Any], source: str) -> str:
    """The trainer that alone knows all keys of a file."""
    known = {trainer: sum(key in rules for key in given) for trainer, rules in RULES.items()}
    best = [trainer for trainer, count in known.items() if count == max(known.values())]
    if len(best) > 1:
        raise ConfigError(
            f'{source} may be for {" or ".join(best)}: say which, kitae import trl "trl {best[0]} --config {source}"'
        )
    return best[0]


def translate(trainer: str, given: Mapping[str, Any], files: Mapping[str, str]) -> Translation:
    """The settings of a trainer ("grpo", "sft", …). files: what the recipe needs beside it, by path."""
    if trainer not in RULES:
        raise ConfigError(f"kitae import trl knows the trainers {', '.join(RULES)}, got {trainer!r}")
    t = Translation("TRL", RULES[trainer], given, TRAINERS[trainer], dict(files))
    if t.kind != "rl":
        t.set("method.kind", t.kind, of="trainer")
    t.simple()
    _model(t)
    _optimizer(t)
    if isinstance(name := t["output_dir"], str) and "run_name" not in given:
        t.set("run.name", name.rstrip("/").rpartition("/")[2], of="output_dir")
    rows = _data(t)
    if t.kind == "rl":
        _batches(t, rows)
        set_rewards(t)
        (_grpo if trainer == "grpo" else _rloo)(t)
    else:
        _examples(t, trainer)
    return t


def _model(t: Translation) -> None:
    key = "model" if "model" in t.given else "model_name_or_path"
    if "ref_model" in t.given and t.given["ref_model"] in (None, t[key]):
        t.idle("ref_model", "the reference is the initial model")
    if isinstance(path := t[key], str):
        t.set("model.path", path, of=key)
    else:
        t.refuse(key, "only running the script would tell it; set model.path")
    init = t["model_init_kwargs"]
    named = "torch_dtype" if "torch_dtype" in t.given else "dtype"
    dtype = init.get("dtype", init.get("torch_dtype")) if isinstance(init, Mapping) else t[named]
    if "bf16" in t.given and isinstance(t["bf16"], bool):
        t.set("model.dtype", "bfloat16" if t["bf16"] else "float32", of="bf16")
    elif dtype in ("bfloat16", "float32"):
        t.set("model.dtype", dtype, of=named if named in t.given else "model_init_kwargs")
    elif dtype not in (None, "auto"):
        t.refuse(named if named in t.given else "model_init_kwargs", "weights are bfloat16 or float32")
    if t["use_cpu"]:
        t.set("model.device", "cpu", of="use_cpu")
    if t["use_peft"]:
        t.set("model.lora_rank", t["lora_r"], of="lora_r")
        t.set("model.lora_alpha", t["lora_alpha"], of="lora_alpha")
        if isinstance(modules := t["lora_target_modules"], list | tuple):
            t.set("model.lora_targets", ",".join(str(m).strip(",") for m in modules), of="lora_target_modules")
        elif isinstance(modules, str):
            t.set("model.lora_targets", modules, of="lora_target_modules")
        else:
            t.near("lora_target_modules", "PEFT picks some modules of each family; here it is all-linear")


def _optimizer(t: Translation) -> None:
    kind = str(t["lr_scheduler_type"])
    if kind in _SCHEDULES:
        t.set("training.schedule", _SCHEDULES[kind], of="lr_scheduler_type")
    else:
        t.refuse("lr_scheduler_type", f"schedules are {', '.join(dict.fromkeys(_SCHEDULES.values()))}; it is constant")
    t.set("training.betas", [t["adam_beta1"], t["adam_beta2"]], of="adam_beta2")


def _data(t: Translation) -> int | None:
    """The data, and how many rows it has where that can be known."""
    source = t["train_dataset"]
    key = "train_dataset"
    if source is None and isinstance(t["dataset_name"], str):
        source, key = DataSource.named(t["dataset_name"], t["dataset_config"], t["dataset_train_split"]), "dataset_name"
    if not isinstance(source, DataSource):
        t.refuse("train_dataset", "its rows are made by code: write them to a .jsonl file and set data.path")
        if t.kind == "rl":
            t.set("data.format", "trl", of=key)  # the columns and the chats that its reward functions expect
        return None
    source.put(t, key)
    if source.reader:
        t.set("data.format", source.reader, of=key)
    elif t.kind == "rl":
        t.set("data.format", "trl", of=key)
    for change in source.changes:
        t.near(key, f"rows are not changed by {change}: put them into a file as they are after it")
    _evaluation(t, source)
    return count_rows(source)


def _evaluation(t: Translation, train: DataSource) -> None:
    held = t["eval_dataset"]
    amount = "eval.prompts" if t.kind == "rl" else "eval.examples"
    if isinstance(held, DataSource) and str(t["eval_strategy"]) != "no":
        held.put_held_out(t, "eval_dataset", train)
        if isinstance(every := t["eval_steps"], int | float) and every >= 1:
            t.set("eval.every", int(every), of="eval_steps")
        return
    t.set(amount, 0, of="eval_strategy")
    if "eval_dataset" in t.given:
        t.idle("eval_dataset", "eval_strategy is 'no', so TRL does not use it either")
    if t.kind == "rl" and train.is_hub:
        t.recipe["data"].pop("hub_eval_files", None)


def _batches(t: Translation, rows: int | None) -> None:
    """TRL counts sequences: a generation batch of them is cut into optimizer steps."""
    device, accumulated = t["per_device_train_batch_size"], t["gradient_accumulation_steps"]
    group = t["num_generations"]
    if not all(isinstance(x, int) for x in (device, accumulated, group)):
        t.refuse("per_device_train_batch_size", "the batch cannot be read: set training.prompts_per_step")
        return
    step = device * accumulated
    batch = t["generation_batch_size"] or device * (t["steps_per_generation"] or accumulated)
    prompts = whole(batch / group, "prompts of a batch", t, "per_device_train_batch_size")
    t.set("training.prompts_per_step", prompts, of="per_device_train_batch_size")
    t.note("Batches are those of one process; TRL multiplies per_device_train_batch_size by the number of processes.")
    cuts = whole(batch / step, "optimizer steps of a batch", t, "steps_per_generation")
    if cuts > prompts:
        t.refuse("steps_per_generation", f"a batch of {prompts} prompts is cut by whole groups, and not into {cuts}")
        cuts = prompts
    t.set("training.minibatches", cuts, of="steps_per_generation")
    updates = cuts * t["num_iterations"]
    if t["max_steps"] > 0:
        steps, key = ceil(t["max_steps"] / updates), "max_steps"
    elif rows is not None:
        steps, key = ceil(t["num_train_epochs"] * rows / prompts), "num_train_epochs"
    else:
        t.near("num_train_epochs", "how many rows there are is not known here: training.steps is 100, set it")
        steps, key = 100, "num_train_epochs"
    t.set("training.steps", max(1, steps), of=key)
    _warmup(t, max(1, steps) * updates)


def _warmup(t: Translation, updates: int | None) -> None:
    asked, share = t["warmup_steps"], t["warmup_ratio"]
    key = "warmup_ratio" if share else "warmup_steps"
    share = share or (asked if isinstance(asked, float) and 0 < asked < 1 else 0)
    if share and updates is None:
        t.refuse(key, "the number of steps is not known here: set training.warmup_steps")
    elif share and updates:
        t.set("training.warmup_steps", ceil(share * updates), of=key)
    elif asked:
        t.set("training.warmup_steps", int(asked), of=key)


def _reference(t: Translation) -> None:
    if not t["sync_ref_model"]:
        t.set("algorithm.reference", "frozen", of="beta")
        return
    t.set("algorithm.reference.name", "ema", of="sync_ref_model")
    t.set("algorithm.reference.mix", t["ref_model_mixup_alpha"], of="ref_model_mixup_alpha")
    t.set("algorithm.reference.every", t["ref_model_sync_steps"], of="ref_model_sync_steps")


def _rloo(t: Translation) -> None:
    """One ratio for a whole response, clipped; the KL penalty is part of the reward."""
    t.set("algorithm.preset", "rloo", of="trainer")
    t.set("algorithm.ratio", "sequence-product", of="trainer")
    t.set("algorithm.gate.name", "clip", of="trainer")
    t.set("algorithm.gate.clip_low", t["epsilon"], of="epsilon")
    t.set("algorithm.gate.clip_high", t["epsilon_high"] or t["epsilon"], of="epsilon_high")
    t.set("algorithm.correction", "none", of="trainer")
    t.set("algorithm.aggregation", "seq-mean-token-mean", of="trainer")
    t.set("algorithm.kl.coef", t["beta"], of="beta")
    if t["beta"]:
        _reference(t)
    else:
        t.set("algorithm.reference", "none", of="beta")
    if isinstance(bounds := t["reward_clip_range"], list | tuple):
        if -bounds[0] == bounds[1]:
            t.set("algorithm.shaping.clip", bounds[1], of="reward_clip_range")
        else:
            t.refuse("reward_clip_range", "rewards are clipped to ± one number: algorithm.shaping.clip")
    if t["normalize_advantages"]:
        t.set("algorithm.advantage.whiten", "samples", of="normalize_advantages")
        t.set("algorithm.advantage.whiten_epsilon", 1e-4, of="normalize_advantages")
    _truncation(t)


def _truncation(t: Translation) -> None:
    if t["mask_truncated_completions"]:
        t.set("algorithm.truncation", "mask", of="mask_truncated_completions")
        t.near("mask_truncated_completions", "masked responses do not count in means over responses; in TRL they do")


def _grpo(t: Translation) -> None:
    t.set("algorithm.preset", "grpo", of="trainer")
    _advantage(t)
    _gate(t)
    _kl(t)
    _correction(t)
    _entropy(t)
    _truncation(t)


def _advantage(t: Translation) -> None:
    scale = {True: "group", False: "none"}.get(t["scale_rewards"], t["scale_rewards"])
    if t["multi_objective_aggregation"] == "normalize_then_sum":
        of = "multi_objective_aggregation"
        t.set("algorithm.advantage", {"name": "each-zscore", "epsilon": 1e-4, "whiten": "samples",
                                      "whiten_epsilon": 1e-4}, of=of)  # fmt: skip
        if weights := t["reward_weights"]:
            names = t.recipe.get("verifier", {}).get("params", {}).get("function", [])
            t.set("algorithm.advantage.rewards", [str(n).rpartition(":")[2] for n in names], of=of)
            t.set("algorithm.advantage.weights", list(weights), of="reward_weights")
        if "scale_rewards" in t.given:
            t.idle("scale_rewards", "each reward is normalised in its group, then their sum over the batch")
    elif scale == "group":
        t.set("algorithm.advantage", {"name": "group-zscore", "epsilon": 1e-4}, of="scale_rewards")
    elif scale in ("none", "batch"):
        t.set("algorithm.advantage", "group-centred", of="scale_rewards")
        if scale == "batch":
            t.set("algorithm.shaping", {"norm": "batch", "norm_ddof": 1, "norm_epsilon": 1e-4}, of="scale_rewards")
    else:
        t.refuse("scale_rewards", "rewards are scaled by group, batch or none; the recipe has the preset's")


_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "bnpo": "token-mean", "dapo": "token-mean",
    "cispo": "token-mean", "vespo": "token-mean", "luspo": "seq-mean-token-sum",
}  # fmt: skip


def _gate(t: Translation) -> None:
    loss, level = t["loss_type"], t["importance_sampling_level"]
    low, high = t["epsilon"], t["epsilon_high"] or t["epsilon"]
    if loss == "dr_grpo":
        t.set("algorithm.aggregation", {"name": "constant-length", "length": "max_tokens"}, of="loss_type")
    elif loss in _AGGREGATIONS:
        t.set("algorithm.aggregation", _AGGREGATIONS[loss], of="loss_type")
    else:
        t.refuse("loss_type", f"losses are {', '.join((*_AGGREGATIONS, 'dr_grpo'))}; the recipe has the preset's")
    if loss == "bnpo" and t["gradient_accumulation_steps"] > 1:
        t.near("loss_type", "the mean is over the tokens of the step, in TRL over those of each micro-batch")
    if level == "sequence" and loss != "vespo":
        t.set("algorithm.ratio", "sequence-mean", of="importance_sampling_level")
        if loss not in ("cispo", "sapo") and max(low, high) > 0.05:
            t.refuse("epsilon", "at the level of sequences a clip above 0.05 never acts (GSPO: 3e-4 and 4e-4, which "
                     "the recipe sets)")  # fmt: skip
            low, high = 3e-4, 4e-4
    if loss == "cispo":
        if high < 1:
            t.refuse("epsilon_high", f"it is the cap of the weight itself, and {high:g} would shrink every update; the "
                     "recipe caps at 5 (ScaleRL)")  # fmt: skip
            high = 5.0
        t.set("algorithm.gate", {"name": "weight-clip", "weight_cap": high}, of="loss_type")
    elif loss == "sapo":
        taus = {"tau_positive": t["sapo_temperature_pos"], "tau_negative": t["sapo_temperature_neg"]}
        t.set("algorithm.gate", {"name": "sigmoid", **taus}, of="loss_type")
    elif loss == "vespo":
        powers = {"power_positive": t["vespo_k_pos"], "decay_positive": t["vespo_lambda_pos"]}
        others = {"power_negative": t["vespo_k_neg"], "decay_negative": t["vespo_lambda_neg"]}
        t.set("algorithm.gate", {"name": "gamma", **powers, **others}, of="loss_type")
        t.set("algorithm.ratio.name", "sequence-product", of="loss_type")
    else:
        gate: dict[str, Any] = {"name": "clip", "clip_low": low, "clip_high": high}
        if (delta := t["delta"]) is not None:
            if delta > 1 + high:
                gate["dual_clip"] = delta
            else:
                t.refuse("delta", f"it acts above 1 + epsilon_high = {1 + high:g} only, got {delta:g}")
        t.set("algorithm.gate", gate, of="epsilon" if "loss_type" in t.given else "loss_type")


def _kl(t: Translation) -> None:
    if not t["beta"]:
        return
    biased = not t["use_bias_correction_kl"]
    if not biased and t["importance_sampling_level"] == "sequence":
        t.refuse("use_bias_correction_kl", "the KL term takes the ratio of each token, TRL's that of the sequence here")
    t.set("algorithm.kl", {"name": "k3" if biased else "k3-ratio", "coef": t["beta"]}, of="beta")
    _reference(t)


def _correction(t: Translation) -> None:
    names: dict[str, dict[str, Any]] = {}
    if t["use_vllm"] and t["vllm_importance_sampling_correction"]:
        cap = t["vllm_importance_sampling_cap"] or t["vllm_importance_sampling_clip_max"] or 1e8
        low, mode = t["vllm_importance_sampling_clip_min"] or 0.0, t["vllm_importance_sampling_mode"]
        known: dict[str, tuple[str, dict[str, Any]]] = {
            "sequence_mask": ("sequence-mask", {"bottom": low, "cap": cap}),
            "sequence_truncate": ("sequence-tis", {"floor": low, "cap": cap}),
            "token_truncate": ("tis", {"floor": low, "cap": cap}),
            "token_mask": ("icepop", {"low": low, "high": cap}),
        }
        if t["loss_type"] == "vespo":
            t.set("algorithm.ratio.anchor", "behaviour", of="vllm_importance_sampling_mode")
            t.near("vllm_importance_sampling_mode", "the ratio is to what sampled, without a bound of its own")
        elif mode in known:
            names |= [known[mode]]
        else:
            t.refuse("vllm_importance_sampling_mode", f"modes are {', '.join(known)}; the recipe corrects nothing")
    of = "vllm_importance_sampling_mode" if names else "use_vllm"
    if (threshold := t["off_policy_mask_threshold"]) is not None:
        names["opsm"], of = {"opsm_limit": threshold}, "off_policy_mask_threshold"
    if (share := t["top_entropy_quantile"]) < 1:
        names["high-entropy"], of = {"entropy_share": share}, "top_entropy_quantile"
        t.near("top_entropy_quantile", "the share is of each response; in TRL of the tokens of a micro-batch")
    settings = {key: value for own in names.values() for key, value in own.items()}
    t.set("algorithm.correction", {"name": "+".join(names), **settings} if names else "none", of=of)


def _entropy(t: Translation) -> None:
    if not t["entropy_coef"] and not t["use_adaptive_entropy"]:
        return
    t.set("algorithm.entropy.coef", t["entropy_coef"], of="entropy_coef")
    if t["use_adaptive_entropy"]:
        t.set("algorithm.entropy.target", t["entropy_target"], of="use_adaptive_entropy")
        t.set("algorithm.entropy.rate", t["entropy_coef_delta"], of="entropy_coef_delta")
    if t["loss_type"] not in ("dapo", "cispo", "bnpo", "vespo"):
        t.near("entropy_coef", "the bonus is averaged like the loss; in TRL over all tokens")


_DPO_LOSSES = {
    "sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo-token", "robust": "robust", "sigmoid_norm": "sigmoid-token",
}  # fmt: skip


def _examples(t: Translation, trainer: str) -> None:
    """What trainers on a file of examples have in common."""
    device, accumulated = t["per_device_train_batch_size"], t["gradient_accumulation_steps"]
    if isinstance(device, Unread) or isinstance(accumulated, Unread):
        t.refuse("per_device_train_batch_size", "the batch cannot be read: set training.batch")
    else:
        t.set("training.batch", device * accumulated, of="per_device_train_batch_size")
    if t["max_steps"] > 0:
        t.set("training.steps", t["max_steps"], of="max_steps")
    else:
        t.set("training.epochs", t["num_train_epochs"], of="num_train_epochs")
    _warmup(t, t["max_steps"] if t["max_steps"] > 0 else None)
    if isinstance(t["max_length"], int):
        t.set("data.max_tokens", t["max_length"], of="max_length")
        t.set("data.too_long", "truncate", of="max_length")
    if trainer == "sft":
        _sft(t)
    elif trainer == "dpo":
        _dpo(t)
    elif trainer == "reward":
        t.set("method.margin_coef", 1.0, of="trainer")


def _sft(t: Translation) -> None:
    loss = {"nll": "likelihood", "chunked_nll": "likelihood", "dft": "dft"}.get(str(t["loss_type"]))
    if loss is None:
        t.refuse("loss_type", "losses are nll and dft; it is nll")
    else:
        t.set("method.loss", loss, of="loss_type")
    if t["assistant_only_loss"]:
        t.set("data.train_on", "all", of="assistant_only_loss")
    elif t["completion_only_loss"]:
        t.set("data.train_on", "completion", of="completion_only_loss")
    elif t["completion_only_loss"] is None:
        t.note("TRL trains on every token of rows with messages unless assistant_only_loss is set; Kitae never on what "
               "the user says. Rows with prompt and completion are the same in both.")  # fmt: skip
    else:
        t.near("completion_only_loss", "what the user says is never trained on; rows with a text are, whole")


def _dpo(t: Translation) -> None:
    names = [t["loss_type"]] if isinstance(t["loss_type"], str) else list(t["loss_type"])
    weights = list(t["loss_weights"] or [1.0] * len(names))
    main = [(n, w) for n, w in zip(names, weights, strict=False) if n != "sft"]
    if len(main) != 1 or main[0][0] not in _DPO_LOSSES or main[0][1] != 1:
        t.refuse("loss_type", f"one loss of weight 1, of {', '.join(_DPO_LOSSES)}, and sft beside it; it is sigmoid")
        main = [("sigmoid", 1.0)]
    name = _DPO_LOSSES[main[0][0]]
    if t["label_smoothing"] and name == "robust":
        t.set("method.label_smoothing", t["label_smoothing"], of="label_smoothing")
    elif t["label_smoothing"]:
        t.idle("label_smoothing", f"TRL's {main[0][0]} does not read it; Kitae's loss 'smoothed' does")
    t.set("method.loss", name, of="loss_type")
    if "sft" in names:
        t.set("method.sft_coef", weights[names.index("sft")], of="loss_weights")
        t.near("loss_weights", "the likelihood is a mean per response; in TRL over the tokens of all")
