"""OpenRLHF 0.11: the dotted flags of train_ppo_ray.

What is not given is OpenRLHF's default: GAE with a critic, a KL penalty of 0.01 in the reward, a warm-up and a cosine
to a tenth. `rollout.batch_size` counts prompts, `train.batch_size` responses.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from kitae.errors import ConfigError
from kitae.importers.command_lines import parse_flags, split_command
from kitae.importers.sources import DataSource, count_rows
from kitae.importers.translation import Joint, No, Nothing, Rule, To, Translation, whole

_WHERE = "where, how fast, or with how much memory"

RULES: dict[str, Rule] = {
    "actor.model_name_or_path": To("model.path"), "critic.model_name_or_path": Joint(),
    "actor.adam.lr": To("training.lr", 1e-6), "actor.adam.betas": To("training.betas", [0.9, 0.95]),
    "actor.adam.weight_decay": To("training.weight_decay", 0.0), "actor.max_norm": To("training.clip_norm", 1.0),
    "actor.adam.eps": No("AdamW adds 1e-8 to its deviation", (1e-8,)),
    "actor.optim": No("the optimizer is AdamW", ("adam",)),
    "actor.lr_scheduler": Joint("cosine_with_min_lr"), "actor.lr_warmup_ratio": Joint(0.03),
    "actor.min_lr_ratio": Joint(0.1),
    "actor.gradient_checkpointing_enable": To("training.checkpoint_activations"),
    "actor.eps_clip": Joint(0.2), "actor.eps_clip_low_high": Joint(), "actor.dual_clip": Joint(),
    "actor.policy_loss_type": Joint("ppo"), "actor.entropy_coef": To("algorithm.entropy.coef", None),
    "actor.aux_loss_coef": To("algorithm.experts.balance_coef", None, lambda x: x or None),
    "actor.freeze_visual_encoder": No("models read text"),
    "algo.advantage.estimator": Joint("gae"), "algo.advantage.gamma": Joint(1.0), "algo.advantage.lambd": Joint(1.0),
    "algo.advantage.no_std_norm": Joint(False), "algo.advantage.is_correction_enable": Joint(False),
    "algo.advantage.is_correction_threshold": Joint([0.5, 5.0]), "algo.advantage.is_correction_type": Joint("tis"),
    "algo.kl.init_coef": Joint(0.01), "algo.kl.estimator": Joint("k1"), "algo.kl.use_loss": Joint(False),
    "algo.kl.target": Joint(), "algo.kl.horizon": Joint(10000),
    "algo.dynamic_filtering_enable": Joint(False), "algo.dynamic_filtering_range": Joint([0, 1]),
    "critic.value_clip": Joint(0.5), "critic.adam.lr": Joint(9e-6), "critic.freezing_steps": Joint(-1),
    "critic.save_value_network": No("the critic is not exported"),
    "reward.remote_url": Joint(), "reward.model_name_or_path": Joint(), "reward.clip_range": Joint([-10, 10]),
    "reward.normalize_enable": Nothing("scores of a reward model are shaped by verifier.params center and spread"),
    "reward.overlong_buffer_len": To("algorithm.shaping.overlong_buffer", None, int),
    "reward.overlong_penalty_factor": No("the penalty reaches 1", (1, 1.0)),
    "reward.stop_properly_penalty_coef": Joint(),
    "rollout.batch_size": To("training.prompts_per_step", 1024),
    "rollout.n_samples_per_prompt": To("training.group_size", 1),
    "rollout.temperature": To("sampling.temperature", 1.0), "rollout.top_p": To("sampling.top_p", 1.0),
    "rollout.max_new_tokens": Joint(), "data.max_len": Joint(2048),
    "rollout.vllm_generate_batch_size": Nothing(_WHERE), "rollout.micro_batch_size": Nothing(_WHERE),
    "rollout.max_tokens_per_gpu": Nothing(_WHERE),
    "train.batch_size": Joint(128), "train.max_epochs": To("training.epochs", 1), "train.num_episodes": Joint(1),
    "train.seed": To("run.seed", 42), "train.async_enable": Joint(False), "train.async_queue_size": Joint(1),
    "train.partial_rollout_enable": Nothing("pipeline.in_flight = 'keep' goes on with what was sampled"),
    "train.agent_func_path": No("an AgentExecutor is an environment: env.name = 'file.py:Class' with start and step, "
                                "or "
                                "'command' for a program (docs/agents.md)"),
    "train.enable_ema": No("no average of the weights is kept"), "train.ema_beta": Nothing("of train.enable_ema"),
    "data.prompt_dataset": Joint(), "data.prompt_split": Joint("train"), "data.prompt_probs": No("one file is read"),
    "data.input_key": Joint("input"), "data.label_key": Joint(), "data.apply_chat_template": Joint(False),
    "data.prompt_max_len": Nothing("prompts may be as long as the model's context"),
    "data.input_template": Joint(), "data.max_samples": No("all rows of a file are read", (100000000,)),
    "eval.dataset": Joint(), "eval.split": Joint("train"), "eval.temperature": To("eval.temperature", 0.6),
    "eval.n_samples_per_prompt": To("eval.samples", 4), "eval.steps": To("eval.every", None, lambda n: max(0, n)),
    "ckpt.save_steps": To("checkpoint.every", None, lambda n: n if n > 0 else None),
    "ckpt.max_num": To("checkpoint.keep"), "ckpt.output_dir": Joint(),
    "ds.lora.rank": To("model.lora_rank", 0), "ds.lora.alpha": Joint(16), "ds.lora.target_modules": Joint("all-linear"),
    "ds.lora.dropout": No("adapters have no dropout", (0, 0.0)),
    "ds.load_in_4bit": No("weights are bfloat16 or float32"),
    "ds.param_dtype": To("model.dtype", None, {"bf16": "bfloat16"}.get),
    "logger.wandb.key": Joint(), "logger.tensorboard_dir": Joint(), "logger.wandb.project": To("observe.project"),
    "logger.wandb.run_name": To("run.name"), "use_ms": No("models come from the hub or a folder"),
}  # fmt: skip

_IDLE = ("ds.", "vllm.", "ref.", "reward.num_", "reward.offload", "actor.num_", "critic.num_", "train.colocate",
"ckpt.",
         "logger.", "train.dynamic_batch", "train.micro_batch", "train.max_tokens", "train.full_determinism",
         "local_rank",
         "critic.", "actor.muon", "data.dataloader", "data.disable_fast", "data.image_key", "data.max_images",
         "actor.gradient_checkpointing_reentrant")  # fmt: skip


_OF_RAY = ("address", "runtime-env-json", "working-dir", "no-wait")
_FLAGS = """
pretrain=actor.model_name_or_path reward_pretrain=reward.model_name_or_path remote_rm_url=reward.remote_url
agent_func_path=train.agent_func_path prompt_data=data.prompt_dataset input_key=data.input_key
label_key=data.label_key apply_chat_template=data.apply_chat_template generate_max_len=rollout.max_new_tokens
prompt_split=data.prompt_split input_template=data.input_template max_samples=data.max_samples
rollout_batch_size=rollout.batch_size n_samples_per_prompt=rollout.n_samples_per_prompt
train_batch_size=train.batch_size max_epochs=train.max_epochs num_episodes=train.num_episodes seed=train.seed
dynamic_filtering=algo.dynamic_filtering_enable dynamic_filtering_reward_range=algo.dynamic_filtering_range
advantage_estimator=algo.advantage.estimator gamma=algo.advantage.gamma lambd=algo.advantage.lambd
actor_learning_rate=actor.adam.lr critic_learning_rate=critic.adam.lr entropy_loss_coef=actor.entropy_coef
init_kl_coef=algo.kl.init_coef use_kl_loss=algo.kl.use_loss kl_estimator=algo.kl.estimator kl_target=algo.kl.target
kl_horizon=algo.kl.horizon eps_clip=actor.eps_clip dual_clip=actor.dual_clip
eps_clip_low_high=actor.eps_clip_low_high policy_loss_type=actor.policy_loss_type value_clip=critic.value_clip
enable_vllm_is_correction=algo.advantage.is_correction_enable adam_betas=actor.adam.betas l2=actor.adam.weight_decay
vllm_is_correction_type=algo.advantage.is_correction_type max_norm=actor.max_norm temperature=rollout.temperature
vllm_is_truncated_threshold=algo.advantage.is_correction_threshold top_p=rollout.top_p
lr_scheduler=actor.lr_scheduler lr_warmup_ratio=actor.lr_warmup_ratio save_steps=ckpt.save_steps
save_path=ckpt.output_dir eval_steps=eval.steps eval_dataset=eval.dataset
gradient_checkpointing=actor.gradient_checkpointing_enable lora_rank=ds.lora.rank lora_alpha=ds.lora.alpha
target_modules=ds.lora.target_modules param_dtype=ds.param_dtype use_tensorboard=logger.tensorboard_dir
use_wandb=logger.wandb.key reward_clip_range=reward.clip_range overlong_buffer_len=reward.overlong_buffer_len
overlong_penalty_factor=reward.overlong_penalty_factor stop_properly_penalty_coef=reward.stop_properly_penalty_coef
async_train=train.async_enable prompt_max_len=data.prompt_max_len no_advantage_std_norm=algo.advantage.no_std_norm
zero_stage=ds.zero_stage load_checkpoint=ckpt.load_enable ckpt_path=ckpt.path save_hf_ckpt=ckpt.save_hf
max_ckpt_num=ckpt.max_num packing_samples=ds.packing_samples use_dynamic_batch=train.dynamic_batch_enable
bf16=ds.bf16 train_max_tokens_per_gpu=train.max_tokens_per_gpu rollout_max_tokens_per_gpu=rollout.max_tokens_per_gpu
micro_train_batch_size=train.micro_batch_size micro_rollout_batch_size=rollout.micro_batch_size
colocate_all_models=train.colocate_all enforce_eager=vllm.enforce_eager logging_steps=logger.logging_steps
actor_num_nodes=actor.num_nodes actor_num_gpus_per_node=actor.num_gpus_per_node ref_num_nodes=ref.num_nodes
ref_num_gpus_per_node=ref.num_gpus_per_node vllm_num_engines=vllm.num_engines ring_attn_size=ds.ring_attn_size
vllm_tensor_parallel_size=vllm.tensor_parallel_size vllm_gpu_memory_utilization=vllm.gpu_memory_utilization
vllm_sync_backend=vllm.sync_backend ring_head_stride=ds.ring_attn_head_stride fsdp2_enable_sleep=ds.enable_sleep
deepspeed_enable_sleep=ds.enable_sleep vllm_enable_sleep=vllm.enable_sleep flash_attn=ds.flash_attn
"""
_EARLIER = dict(pair.split("=") for pair in _FLAGS.split())
"""Flags of versions before 0.11, which had no dots."""


def read(source: str, overrides: Sequence[str], beside: Path) -> Translation:
    """From a command line in quotes, or a shell script that has one."""
    if overrides:
        raise ConfigError(f"kitae import openrlhf takes one command line, in quotes, got {overrides[0]!r} too")
    words = split_command(source)
    program = next((word.rpartition(".")[2] for word in words if word.startswith("openrlhf.cli.")), "train_ppo_ray")
    if program != "train_ppo_ray":
        raise ConfigError(
            f"kitae import openrlhf reads train_ppo_ray, got {program}: see docs/coming-from.md for the others"
        )
    flags = parse_flags(words)
    given = {_EARLIER.get(key, key): value for key, value in flags.items() if key not in _OF_RAY}
    if not given:
        raise ConfigError(f"a command line for OpenRLHF has flags, got {source!r}")
    return translate(given)


def translate(given: Mapping[str, Any]) -> Translation:
    idle = {key: Nothing(_WHERE) for key in given if key not in RULES and key.startswith(_IDLE)}
    t = Translation("OpenRLHF", {**RULES, **idle}, given)
    t.simple()
    if t["ds.lora.rank"]:
        t.set("model.lora_alpha", t["ds.lora.alpha"], of="ds.lora.alpha")
        modules = t["ds.lora.target_modules"]
        t.set(
            "model.lora_targets",
            modules if isinstance(modules, str) else ",".join(modules),
            of="ds.lora.target_modules",
        )
    rows = _data(t)
    _schedule(t, _batches(t, rows))
    _rewards(t)
    t.set("algorithm.preset", "grpo", of="algo.advantage.estimator")
    _advantage(t)
    _loss(t)
    _kl(t)
    _trackers(t)
    return t


def _data(t: Translation) -> int | None:
    if not isinstance(name := t["data.prompt_dataset"], str):
        t.refuse("data.prompt_dataset", "there must be one: set data.path")
        return None
    source = DataSource.named(name, None, t["data.prompt_split"])
    source.put(t, "data.prompt_dataset")
    t.set("data.columns.prompt", t["data.input_key"], of="data.input_key")
    t.set("data.columns.answer", t["data.label_key"] or "", of="data.label_key")
    if isinstance(template := t["data.input_template"], str):
        t.set("data.instruction", template.replace("{}", "{question}"), of="data.input_template")
    if not t["data.apply_chat_template"]:
        t.near("data.apply_chat_template", "the model's chat template is always used; in OpenRLHF only with this flag")
    tokens = t["rollout.max_new_tokens"]
    if tokens:
        t.set("sampling.max_tokens", tokens, of="rollout.max_new_tokens")
    else:
        t.set("sampling.max_tokens", t["data.max_len"], of="data.max_len")
        t.near("data.max_len", "it is the most of a response; in OpenRLHF of prompt and response together")
    if isinstance(held := t["eval.dataset"], str) and not DataSource(held).is_hub:
        DataSource(held).put_held_out(t, "eval.dataset", source)
    else:
        t.set("eval.prompts", 0, of="eval.dataset")
        if held:
            t.refuse("eval.dataset", "held-out rows are a file: set data.eval_path and eval.prompts")
        t.recipe["eval"] |= {"samples": 1, "temperature": 0.0}
    return count_rows(source)


def _batches(t: Translation, rows: int | None) -> int | None:
    """Optimizer steps of the run: of each batch of prompts, and of `train.batch_size` responses."""
    prompts, group = t["rollout.batch_size"], t["rollout.n_samples_per_prompt"]
    cuts = whole(prompts * group / t["train.batch_size"], "optimizer steps of a batch", t, "train.batch_size")
    if cuts > prompts:
        t.refuse("train.batch_size", f"a batch of {prompts} prompts is cut by whole groups, and not into {cuts}")
        cuts = prompts
    t.set("training.minibatches", cuts, of="train.batch_size")
    if t["train.async_enable"]:
        t.set("pipeline.max_staleness", max(1, t["train.async_queue_size"]), of="train.async_enable")
    if rows is None:
        t.near("train.num_episodes", "how many rows there are is not known here: training.steps is 100, set it")
        t.set("training.steps", 100, of="train.num_episodes")
        return None
    steps = max(1, rows // prompts) * t["train.num_episodes"]
    t.set("training.steps", steps, of="train.num_episodes")
    return int(steps * cuts * t["train.max_epochs"])


def _schedule(t: Translation, updates: int | None) -> None:
    kind = str(t["actor.lr_scheduler"])
    known = {"cosine_with_min_lr": "cosine", "cosine": "cosine", "linear": "linear", "constant": "constant",
             "constant_with_warmup": "constant"}  # fmt: skip
    if kind not in known:
        t.refuse("actor.lr_scheduler", "schedules are constant, linear and cosine; it is constant")
    t.set("training.schedule", known.get(kind, "constant"), of="actor.lr_scheduler")
    if kind == "cosine_with_min_lr" and t["actor.min_lr_ratio"]:
        t.near("actor.min_lr_ratio", f"schedules end at 0, not at {t['actor.min_lr_ratio']:g} of the peak")
    if (share := t["actor.lr_warmup_ratio"]) and updates is not None:
        t.set("training.warmup_steps", ceil(share * updates), of="actor.lr_warmup_ratio")
    elif share:
        t.near("actor.lr_warmup_ratio", f"set training.warmup_steps to {share:g} of the optimizer steps")


def _rewards(t: Translation) -> None:
    url, model = t["reward.remote_url"], t["reward.model_name_or_path"]
    if isinstance(url, str) and url.endswith(".py"):
        t.set("verifier.name", f"{url}:reward_func", of="reward.remote_url")
    elif isinstance(url, str) and "," not in url:
        t.set("verifier.name", url, of="reward.remote_url")
    elif model and not url:
        t.set("verifier.name", "reward_model", of="reward.model_name_or_path")
        t.set("verifier.params.model", model, of="reward.model_name_or_path")
    else:
        t.refuse("reward.remote_url", "one file with reward_func, or one address, judges: verifier.name")
        return
    if url:
        t.set("verifier.style", "openrlhf", of="reward.remote_url")
        if path := t["actor.model_name_or_path"]:
            t.set("verifier.params.tokenizer", path, of="actor.model_name_or_path")
    t.set("verifier.check_gold", False, of="reward.remote_url" if url else "reward.model_name_or_path")
    low, high = t["reward.clip_range"]
    if -low == high:
        t.set("algorithm.shaping.clip", float(high), of="reward.clip_range")
        t.near("reward.clip_range", "rewards are clipped before the baseline, in OpenRLHF after it")
    else:
        t.refuse("reward.clip_range", "rewards are clipped to ± one number: algorithm.shaping.clip")
    stop = t["reward.stop_properly_penalty_coef"]
    if isinstance(stop, int | float) and stop < 0:
        t.set("algorithm.truncation", float(stop), of="reward.stop_properly_penalty_coef")
    elif stop not in (None, 1):
        t.refuse(
            "reward.stop_properly_penalty_coef", "a truncated response gets a score (algorithm.truncation), no factor"
        )


def _advantage(t: Translation) -> None:
    of, kind = "algo.advantage.estimator", t["algo.advantage.estimator"]
    whiten = {} if t["algo.advantage.no_std_norm"] else {"whiten": "tokens"}
    known: dict[str, dict[str, Any]] = {
        "gae": {"name": "gae", "gamma": t["algo.advantage.gamma"], "gae_lambda": t["algo.advantage.lambd"], **whiten},
        "reinforce": {"name": "returns", "gamma": t["algo.advantage.gamma"], **whiten},
        "rloo": {"name": "leave-one-out"},
        "reinforce_baseline": {"name": "group-centred", **whiten},
        "group_norm": {"name": "group-zscore", "epsilon": 1e-9},
        "dr_grpo": {"name": "group-centred"},
    }  # fmt: skip
    if kind not in known:
        t.refuse(of, f"estimators are {', '.join(known)}; the recipe has the preset's")
        return
    t.set("algorithm.advantage", known[kind], of=of)
    if not whiten and kind in ("gae", "reinforce", "reinforce_baseline"):
        t.near("algo.advantage.no_std_norm", "advantages are neither divided nor centred over the batch")
    if kind == "gae":
        t.set("algorithm.critic.lr", t["critic.adam.lr"], of="critic.adam.lr")
        t.set("algorithm.critic.clip", t["critic.value_clip"], of="critic.value_clip")
        if (warmup := t["critic.freezing_steps"]) > 0:
            t.set("algorithm.critic.warmup", warmup, of="critic.freezing_steps")
    if t["algo.dynamic_filtering_enable"]:
        if list(t["algo.dynamic_filtering_range"]) != [0, 1]:
            t.near("algo.dynamic_filtering_range", "groups with equal scores are dropped, whatever their mean")
        t.set("algorithm.filter", "zero-variance", of="algo.dynamic_filtering_enable")
        t.set("pipeline.refill", 10.0, of="algo.dynamic_filtering_enable")


def _loss(t: Translation) -> None:
    low, high = t["actor.eps_clip_low_high"] or [t["actor.eps_clip"]] * 2
    gate = {"name": "clip", "clip_low": low, "clip_high": high}
    of = "actor.eps_clip_low_high" if "actor.eps_clip_low_high" in t.given else "actor.eps_clip"
    sequence = t["actor.policy_loss_type"] == "gspo"
    t.set("algorithm.aggregation", "seq-mean-token-mean" if sequence else "token-mean", of="actor.policy_loss_type")
    if sequence:
        t.set("algorithm.ratio", "sequence-mean", of="actor.policy_loss_type")
        if max(low, high) > 0.05:
            t.refuse(of, "of the mean ratio of a sequence a clip above 0.05 never acts; it is GSPO's 3e-4 and 4e-4")
            gate |= {"clip_low": 3e-4, "clip_high": 4e-4}
    if (dual := t["actor.dual_clip"]) is not None:
        gate["dual_clip"] = dual
    t.set("algorithm.gate", gate, of=of)
    low, high = t["algo.advantage.is_correction_threshold"]
    known: dict[str, dict[str, Any]] = {
        "tis": {"name": "tis", "floor": low, "cap": high}, "icepop": {"name": "icepop", "low": low, "high": high},
        "seq-mask-tis": {"name": "tis+geometric", "cap": 1e8, "geometric_low": low, "geometric_high": high},
    }  # fmt: skip
    if t["algo.advantage.is_correction_enable"]:
        t.set(
            "algorithm.correction",
            known[t["algo.advantage.is_correction_type"]],
            of="algo.advantage.is_correction_type",
        )
    else:
        t.set("algorithm.correction", "none", of="algo.advantage.is_correction_enable")


def _kl(t: Translation) -> None:
    coef, kind, estimator = t["algo.kl.init_coef"], t["algo.advantage.estimator"], t["algo.kl.estimator"]
    if not coef:
        return
    if t["algo.kl.use_loss"]:
        name = estimator if estimator in ("k2", "k3") else "k2"
        if estimator == "k1":
            t.refuse("algo.kl.estimator", "k1 in the loss has an expected gradient of zero; it is k2")
        t.set("algorithm.kl", {"name": name, "coef": coef}, of="algo.kl.use_loss")
    else:
        if estimator != "k1":
            t.refuse("algo.kl.estimator", "through the reward only k1 has the gradient of the KL; it is k1")
        t.set("algorithm.kl", {"name": "k1", "coef": coef, "into": "reward"}, of="algo.kl.init_coef")
        if kind not in ("gae", "reinforce"):
            t.near(
                "algo.kl.init_coef",
                "the penalty of a response counts in its baseline; in OpenRLHF it is taken off after",
            )
    t.set("algorithm.reference", "frozen", of="algo.kl.init_coef")
    if (target := t["algo.kl.target"]) is not None:
        t.set("algorithm.kl.target", target, of="algo.kl.target")
        t.set("algorithm.kl.horizon", t["algo.kl.horizon"], of="algo.kl.horizon")


def _trackers(t: Translation) -> None:
    names = {"logger.wandb.key": "wandb", "logger.tensorboard_dir": "tensorboard"}
    if used := [key for key in names if t[key]]:
        t.set("observe.trackers", [names[key] for key in used], of=used[0])
    if isinstance(folder := t["ckpt.output_dir"], str) and "logger.wandb.run_name" not in t.given:
        t.set("run.name", folder.rstrip("/").rpartition("/")[2] or "openrlhf", of="ckpt.output_dir")
