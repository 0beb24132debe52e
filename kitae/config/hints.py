"""What to say about a setting that does not exist: where it is now, what Kitae calls it, or that there is none like it.

A wrong hint is worse than none: a name is offered as the nearest only if it differs by a letter or two.
"""

import difflib
from collections.abc import Iterable, Mapping

ELSEWHERE = {
    "learning_rate": "training.lr",
    "num_generations": "training.group_size",
    "n_samples_per_prompt": "training.group_size",
    "num_rollouts": "training.group_size",
    "rollout.n": "training.group_size",
    "batch_size": "training.prompts_per_step",
    "train_batch_size": "training.prompts_per_step",
    "rollout_batch_size": "training.prompts_per_step",
    "per_device_train_batch_size": "training.prompts_per_step",
    "micro_batch_size": "training.token_budget",
    "micro_train_batch_size": "training.token_budget",
    "ppo_micro_batch_size_per_gpu": "training.token_budget",
    "gradient_accumulation_steps": "training.token_budget",
    "ppo_mini_batch_size": "training.minibatches",
    "num_mini_batches": "training.minibatches",
    "max_steps": "training.steps",
    "total_training_steps": "training.steps",
    "num_train_epochs": "training.steps",
    "total_epochs": "training.steps",
    "num_iterations": "training.epochs",
    "ppo_epochs": "training.epochs",
    "lr_scheduler_type": "training.schedule",
    "max_grad_norm": "training.clip_norm",
    "grad_clip": "training.clip_norm",
    "gradient_checkpointing": "training.checkpoint_activations",
    "max_new_tokens": "sampling.max_tokens",
    "max_completion_length": "sampling.max_tokens",
    "max_response_length": "sampling.max_tokens",
    "generate_max_len": "sampling.max_tokens",
    "num_speculative_tokens": "engine.speculation",
    "speculative_num_draft_tokens": "engine.speculation",
    "reward_fn": "verifier.name",
    "reward_funcs": "verifier.name",
    "custom_reward_function": "verifier.name",
    "dataset": "data.path, data.hub",
    "dataset_name": "data.hub",
    "train_files": "data.path",
    "val_files": "data.eval_path",
    "prompt_data": "data.path",
    "input_key": "data.columns.prompt",
    "label_key": "data.columns.answer",
    "system_prompt": "data.system",
    "model_name_or_path": "model.path",
    "pretrain": "model.path",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype",
    "lora_r": "model.lora_rank",
    "lora.rank": "model.lora_rank",
    "lora.r": "model.lora_rank",
    "lora.alpha": "model.lora_alpha",
    "peft.r": "model.lora_rank",
    "peft.lora_alpha": "model.lora_alpha",
    "lora.target_modules": "model.lora_targets",
    "target_modules": "model.lora_targets",
    "gpu_memory_utilization": "engine.memory_gb",
    "quantization": "engine.weights_dtype",
    "kv_cache_dtype": "engine.cache_dtype",
    "max_num_seqs": "engine.max_batch",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "experiment_name": "run.name",
    "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "eval.every",
    "test_freq": "eval.every",
    "beta": "algorithm.kl.coef",
    "kl_beta": "algorithm.kl.coef",
    "kl_loss_coef": "algorithm.kl.coef",
    "init_kl_coef": "algorithm.kl.coef",
    "epsilon": "algorithm.gate.clip_low, algorithm.gate.clip_high",
    "clip_eps": "algorithm.gate.clip_low, algorithm.gate.clip_high",
    "clip_ratio": "algorithm.gate.clip_low, algorithm.gate.clip_high",
    "epsilon_high": "algorithm.gate.clip_high",
    "clip_ratio_low": "algorithm.gate.clip_low",
    "clip_ratio_high": "algorithm.gate.clip_high",
    "entropy_coeff": "algorithm.entropy.coef",
    "algorithm": "algorithm.preset",
    "adv_estimator": "algorithm.preset",
    "advantage_estimator": "algorithm.preset",
    "scale_rewards": "algorithm.advantage",
    "loss_type": "algorithm.preset, algorithm.aggregation",
    "loss_agg_mode": "algorithm.aggregation",
    "critic_learning_rate": "algorithm.critic.lr",
    "actor_learning_rate": "training.lr",
    "engine.fast": "model.plain",
    "model.fuse": "model.plain",
    "training.share_prompts": "model.plain",
    "engine.guesses": "engine.speculation",
    "cluster.engines": "engine.count",
}
"""What others, or earlier versions, call a setting: by its last name, or by the last two where one says too little."""

_MOVED = {
    "algorithm": "truncation_reward=truncation reward_bias=shaping.bias reward_scale=shaping.scale "
    "reward_clip=shaping.clip reward_norm=shaping.norm advantage_ddof=advantage.ddof "
    "advantage_epsilon=advantage.epsilon pass_k=advantage.k critic_lr=critic.lr critic_clip=critic.clip "
    "critic_warmup=critic.warmup routing=experts.routing router_z_coef=experts.z_coef "
    "router_balance_coef=experts.balance_coef correction_floor=correction.floor correction_cap=correction.cap "
    "correction_low=correction.low correction_high=correction.high constant_length=aggregation.length kl_coef=kl.coef "
    "kl_in=kl.into kl_target=kl.target kl_horizon=kl.horizon reference_every=reference.every "
    "reference_mix=reference.mix entropy_coef=entropy.coef entropy_target=entropy.target entropy_rate=entropy.rate "
    "sft_coef=sft.coef",
    "data": "prompt_key=columns.prompt answer_key=columns.answer text_key=columns.text "
    "completion_key=columns.completion messages_key=columns.messages tools_key=columns.tools "
    "chosen_key=columns.chosen rejected_key=columns.rejected label_key=columns.label margin_key=columns.margin "
    "score_keys=columns.scores",
    "method": "teacher_place=teacher.place teacher_device=teacher.device teacher_threads=teacher.threads "
    "teacher_url=teacher.url teacher_model=teacher.model teacher_key_env=teacher.key_env "
    "teacher_concurrency=teacher.concurrency teacher_cache=teacher.cache",
    "pipeline": "max_refill=refill.most oversample=refill.oversample",
}

RENAMED = {
    f"{section}.{old}": f"{section}.{new}"
    for section, names in _MOVED.items()
    for old, _, new in (name.partition("=") for name in names.split())
}
"""Earlier names of settings, by their paths."""

DECIDED = {
    "algorithm.params": "give the settings of a function of your own in the table of its stage, e.g. algorithm.gate",
    "data.overlap_words": "overlap is measured in runs of 13 words",
    "engine.merge_adapters": "adapters are merged where memory for it is free",
    "observe.tokens_per_step": "at most 65,536 tokens of a step are recorded",
    "observe.tokens_mb": "at most 256 MB of tokens are kept",
    "observe.hook_seconds": "a hook has 30 seconds",
    "pipeline.snapshot_seconds": "the time between copies follows what a copy takes",
}
"""Settings that there were, and what holds without them."""

_REASONS = {
    "backend use_vllm vllm vllm_mode vllm_num_engines sglang": "engine.kind says which engine samples, engine.count "
    "how many",
    "deepspeed fsdp zero_stage tensor_parallel_size tensor_model_parallel_size data_parallel_size nnodes num_gpus "
    "n_gpus_per_node world_size": "the section cluster says how many ranks train, and how they share a model",
    "logging_steps log_every log_interval": "every step is shown, and logged in RUN/metrics.jsonl",
    "report_to wandb use_wandb logger tensorboard": "a run's numbers are in RUN/metrics.jsonl, and observe.trackers "
    "sends them on",
    "fp16 load_in_4bit load_in_8bit": "weights are bfloat16 or float32",
    "push_to_hub hub_model_id": "the trained model is the folder RUN/model",
    "reward_model reward_pretrain": "a reward model is a verifier: verifier.name='reward_model'",
    "relays": "engines fetch weights from the trainer itself: cluster.transport",
    "optim optimizer": "the optimizer is AdamW",
    "max_prompt_length prompt_max_len": "prompts may be as long as the model's context",
    "engine.page_size engine.threads training.logit_chunk": "Kitae decides it by itself",
    "engine.one_kernel": "the engine decodes small batches with the kernels of kitae/kernels/cuda/small_batch.py",
}

ABSENT = {name: reason for names, reason in _REASONS.items() for name in names.split()}
"""What other frameworks have and Kitae has not, and why."""

_NEAR = 0.75


def hint(name: str, settings: Mapping[str, Iterable[str]]) -> str:
    """How to go on from an unknown `section.key`, or from a bare key; "" where nothing is known.

    `settings` are the keys of each section.
    """
    parts = name.split(".")
    section, key = ".".join(parts[:-1]), parts[-1]
    if name in RENAMED:
        return f"; it is {RENAMED[name]} now"
    if name in DECIDED:
        return f"; it is no setting any more: {DECIDED[name]}"
    if below := [f"{s}.{key}" for s, keys in settings.items() if s.startswith(f"{section}.") and key in keys]:
        return f"; it is {' or '.join(below)} now" if section else _did_you_mean(below)
    if found := _foreign(".".join(parts[-2:])) or _foreign(key):
        return found
    own = list(settings.get(section, ()))
    if key in own:
        return ""
    if near := difflib.get_close_matches(key, own, 1, _NEAR) or [k for k in own if k.startswith(f"{key}_")][:1]:
        return _did_you_mean([f"{section}.{near[0]}"])
    inner = {k: f"{s}.{k}" for s, keys in settings.items() if section and s.startswith(f"{section}.") for k in keys}
    if near := difflib.get_close_matches(key, inner, 1, _NEAR):
        return _did_you_mean([inner[near[0]]])
    same = [s for s, keys in settings.items() if key in keys]
    if same := [s for s in same if "." not in s] or same:  # a table is named where no section has the key
        return _did_you_mean(f"{s}.{key}" for s in same)
    if near := difflib.get_close_matches(key, [*ELSEWHERE, *ABSENT], 1, _NEAR):
        return _foreign(near[0])
    keys = {k for found in settings.values() for k in found} if not own else set[str]()
    if near := difflib.get_close_matches(key, sorted(keys), 1, _NEAR):
        return _did_you_mean([f"{s}.{near[0]}" for s, keys in settings.items() if near[0] in keys])
    return ""


def _foreign(name: str) -> str:
    if name in ELSEWHERE:
        return f"; Kitae calls it {ELSEWHERE[name]}"
    return f"; not supported: {ABSENT[name]}" if name in ABSENT else ""


def _did_you_mean(names: Iterable[str]) -> str:
    return f"; did you mean {' or '.join(names)}?"
