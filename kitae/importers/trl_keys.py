"""The keys of TRL 1.16: those of transformers' arguments, of generation, and of each trainer's own config."""

from collections.abc import Mapping

from kitae.importers.translation import Joint, No, Nothing, Rule, Rules, To, all_of, trackers

TRAINERS = {"grpo": "rl", "rloo": "rl", "sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "reward"}
"""The kind of run that each trainer is."""

_SAMPLING = "the trainer's log-probs are those of the logits as they are"
_ENGINE = "Kitae's own engine samples; engine.kind = 'vllm' with engine.server uses yours (docs/servers.md)"

_EVERY: Rules = {
    "learning_rate": To("training.lr", 5e-5),
    "weight_decay": To("training.weight_decay", 0.0),
    "max_grad_norm": To("training.clip_norm", 1.0, lambda value: value or None),
    "seed": To("run.seed", 42),
    "output_dir": Joint(),
    "run_name": To("run.name"),
    "save_steps": To("checkpoint.every", None, lambda value: int(value) if value >= 1 else None),
    "save_total_limit": To("checkpoint.keep"),
    "gradient_checkpointing": To("training.checkpoint_activations"),
    "report_to": To("observe.trackers", None, trackers),
    "trust_remote_code": To("model.trust_remote_code"),
    "lr_scheduler_type": Joint("linear"), "warmup_steps": Joint(0), "warmup_ratio": Joint(0.0),
    "adam_beta1": Joint(0.9), "adam_beta2": Joint(0.999),
    "per_device_train_batch_size": Joint(8), "gradient_accumulation_steps": Joint(1),
    "max_steps": Joint(-1), "num_train_epochs": Joint(3.0), "eval_strategy": Joint("no"), "eval_steps": Joint(),
    "bf16": Joint(),
    "fp16": No("weights are bfloat16 or float32"),
    "dtype": Joint(), "torch_dtype": Joint(), "model_init_kwargs": Joint(),
    "model": Joint(), "model_name_or_path": Joint(), "train_dataset": Joint(), "eval_dataset": Joint(),
    "dataset_name": Joint(), "dataset_config": Joint(), "dataset_train_split": Joint("train"),
    "dataset_test_split": Joint("test"), "use_peft": Joint(False), "lora_r": Joint(16), "lora_alpha": Joint(32),
    "lora_target_modules": Joint(), "use_cpu": Joint(False),
    "adam_epsilon": No("AdamW adds 1e-8 to its deviation", (1e-8,)),
    "optim": No("the optimizer is AdamW", ("adamw_torch", "adamw_torch_fused", "adamw_hf")),
    "lora_dropout": No("adapters have no dropout, which would part the trainer from the engine", (0, 0.0)),
    "lr_scheduler_kwargs": No("schedules end at 0 and have no settings of their own", (None, {})),
    "shuffle_dataset": To("data.shuffle"),
    **all_of("lora_modules_to_save use_rslora use_dora lora_target_parameters", No("adapters are plain LoRA")),
    **all_of("load_in_8bit load_in_4bit quantization_config", No("frozen weights are bfloat16 or float32")),
    **all_of("deepspeed fsdp fsdp_config parallelism_config accelerator_config ddp_find_unused_parameters ddp_timeout "
             "ddp_backend ddp_bucket_cap_mb local_rank ds3_gather_for_generation",
             Nothing("how a model is cut is said in [cluster]")),
    **all_of("logging_steps logging_strategy logging_first_step logging_dir log_level disable_tqdm log_completions "
             "num_completions_to_print log_unique_prompts log_multimodal log_completions_hub_repo project",
             Nothing("every step is logged, and answers are kept: kitae show, kitae ui")),
    **all_of("dataloader_num_workers dataloader_pin_memory dataloader_drop_last dataloader_prefetch_factor "
             "dataloader_persistent_workers dataset_num_proc dataset_streaming remove_unused_columns "
             "pad_to_multiple_of "
             "torch_compile tf32 use_liger_kernel activation_offloading gradient_checkpointing_kwargs "
             "auto_find_batch_size "
             "average_tokens_across_devices torch_empty_cache_steps use_cache group_by_length padding_free "
             "eval_packing "
             "per_device_eval_batch_size attn_implementation ignore_bias_buffers precompute_ref_batch_size "
             "dataset_kwargs "
             "include_num_input_tokens_seen train_sampling_strategy bf16_full_eval eval_accumulation_steps",
             Nothing("speed or memory")),
    **all_of("save_strategy save_only_model load_best_model_at_end overwrite_output_dir resume_from_checkpoint "
             "do_train "
             "do_eval eval_on_start", Nothing("runs are saved, evaluated at both ends, and resumed: kitae resume")),
    **all_of("activation_checkpointing activation_checkpointing_kwargs batch_eval_metrics data_seed "
             "dataloader_in_order "
             "dataloader_multiprocessing_context ddp_broadcast_buffers ddp_static_graph debug do_predict "
             "enable_jit_checkpoint eval_delay eval_do_concat_batches eval_use_gather_object fp16_full_eval "
             "full_determinism greater_is_better ignore_data_skip include_for_metrics label_names length_column_name "
             "liger_kernel_config log_level_replica log_on_each_node logging_nan_inf_filter lora_task_type "
             "metric_for_best_model prediction_loss_only restore_callback_states_from_checkpoint save_on_each_node "
             "skip_memory_metrics torch_compile_backend torch_compile_mode trackio_bucket_id trackio_space_id "
             "trackio_static_space_id bnb_4bit_quant_storage bnb_4bit_quant_type use_bnb_nested_quant",
             Nothing("speed, memory or bookkeeping")),
    **all_of("optim_args optim_target_modules hub_always_push hub_revision", No("not in Kitae")),
    **all_of("push_to_hub hub_model_id hub_strategy hub_private_repo hub_token",
             No("the trained model is the folder RUN/model", (None, False))),
    **all_of("processing_class model_revision", Nothing("the tokenizer and template are the model's own")),
    **all_of("callbacks optimizers compute_metrics", No("code in the loop: stages and verifiers can be your own")),
    "neftune_noise_alpha": No("inputs have no noise"), "label_smoothing_factor": No("not in Kitae", (0, 0.0)),
    "router_aux_loss_coef": To("algorithm.experts.balance_coef", None, lambda value: value or None),
    "disable_dropout": Nothing("nothing has dropout while it is trained"),
}  # fmt: skip

_GENERATION: Rules = {
    "learning_rate": To("training.lr", 1e-6),
    "temperature": To("sampling.temperature", 1.0),
    "max_completion_length": To("sampling.max_tokens", 512),
    "num_iterations": To("training.epochs", 1),
    "reward_funcs": Joint(), "reward_weights": Joint(), "reward_model_name_or_path": Joint(), "tools": Joint(),
    "max_tool_calling_iterations": To("env.turns"),
    "steps_per_generation": Joint(), "generation_batch_size": Joint(),
    "beta": Joint(0.0), "epsilon": Joint(0.2), "epsilon_high": Joint(), "use_vllm": Joint(False),
    "mask_truncated_completions": Joint(False),
    "sync_ref_model": Joint(False), "ref_model_mixup_alpha": Joint(0.6), "ref_model_sync_steps": Joint(512),
    "top_p": To("sampling.top_p", 1.0), "top_k": To("sampling.top_k", None, lambda k: max(0, k)),
    "min_p": To("sampling.min_p", None),
    "repetition_penalty": No(_SAMPLING, (None, 1, 1.0)), "generation_kwargs": No(_SAMPLING, (None, {})),
    "chat_template_kwargs": No("the template is rendered as it is", (None, {})),
    "environment_factory": Joint(),
    "rollout_func": No("write an environment: env.name = 'file.py:Class' or 'command' (docs/agents.md)"),
    "reward_processing_classes": Nothing("a reward model comes with its tokenizer"),
    "max_prompt_length": No("prompts may be as long as the model's context"),
    "num_generations_eval": To("eval.samples"),
    "vllm_structured_outputs_regex": No("sampling is free; judge the form with a verifier: regex, tags, json_schema"),
    **all_of("vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host vllm_server_port "
             "vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length "
             "vllm_tensor_parallel_size cache_implementation use_transformers_continuous_batching "
             "use_transformers_paged "
             "transformers_continuous_batching_config", Nothing(_ENGINE)),
}  # fmt: skip

_GRPO: Rules = {
    "num_generations": To("training.group_size", 8),
    "loss_type": Joint("dapo"), "scale_rewards": Joint("group"), "importance_sampling_level": Joint("token"),
    "multi_objective_aggregation": Joint("sum_then_normalize"), "delta": Joint(),
    "sapo_temperature_pos": Joint(1.0), "sapo_temperature_neg": Joint(1.05),
    "vespo_k_pos": Joint(2.0), "vespo_lambda_pos": Joint(3.0),
    "vespo_k_neg": Joint(3.0), "vespo_lambda_neg": Joint(2.0),
    "top_entropy_quantile": Joint(1.0), "entropy_coef": Joint(0.0), "use_adaptive_entropy": Joint(False),
    "entropy_target": Joint(0.2), "entropy_coef_delta": Joint(0.005),
    "entropy_coef_min": No("the bonus never falls below 0", (0, 0.0)),
    "entropy_coef_max": No("the bonus has no upper bound", (1, 1.0)),
    "vllm_importance_sampling_correction": Joint(True), "vllm_importance_sampling_mode": Joint("sequence_mask"),
    "vllm_importance_sampling_clip_max": Joint(3.0), "vllm_importance_sampling_clip_min": Joint(),
    "vllm_importance_sampling_cap": Joint(), "off_policy_mask_threshold": Joint(),
    "use_bias_correction_kl": Joint(True),
    "cast_lm_head_to_fp32": Nothing("log-probs are computed in float32"),
}  # fmt: skip

_RLOO: Rules = {
    "num_generations": To("training.group_size", 2),
    "beta": Joint(0.05), "normalize_advantages": Joint(False), "reward_clip_range": Joint(),
}  # fmt: skip

_OFFLINE: Rules = {
    "max_length": Joint(1024), "truncation_mode": No("what is too long is cut at its end", ("keep_start", None)),
    "pad_token": Nothing("rows are packed, not padded"), "eos_token": Nothing("the template ends its turns"),
    "chat_template_path": No("the template is the model's own"),
    **all_of("precompute_ref_log_probs", Nothing("the reference is computed once, and kept")),
    **all_of("sync_ref_model ref_model_mixup_alpha ref_model_sync_steps", No("the reference is the initial model",
             (None, False, 0.6, 512))),
    "ref_model": No("the reference is the initial model"),
}  # fmt: skip

_SFT: Rules = {
    "learning_rate": To("training.lr", 2e-5), "loss_type": Joint("nll"), "completion_only_loss": Joint(),
    "assistant_only_loss": Joint(False), "dataset_text_field": To("data.columns.text", "text"),
    "packing": Nothing("rows are packed without their seeing each other"),
    "packing_strategy": No("examples are never split over rows", ("bfd", "bfd_split", None)),
}  # fmt: skip

_DPO: Rules = {
    "learning_rate": To("training.lr", 1e-6), "beta": To("method.beta", 0.1),
    "loss_type": Joint(("sigmoid",)), "loss_weights": Joint(), "label_smoothing": Joint(0.0),
    "f_divergence_type": No("the divergence is the reverse KL", ("reverse_kl", "FDivergenceType.REVERSE_KL", None)),
    "f_alpha_divergence_coef": Nothing("of another divergence"), "discopop_tau": Nothing("of another loss"),
    "ld_alpha": No("log-probs are sums of all tokens", (None, 1.0)), "use_weighting": No("pairs have no weights (WPO)"),
}  # fmt: skip

_KTO: Rules = {
    "learning_rate": To("training.lr", 1e-6), "beta": To("method.beta", 0.1),
    "desirable_weight": To("method.desirable", 1.0), "undesirable_weight": To("method.undesirable", 1.0),
    "loss_type": No("there is KTO, and no APO", ("kto",)),
}  # fmt: skip

_REWARD: Rules = {
    "learning_rate": To("training.lr", 1e-4),
    "center_rewards_coefficient": To("method.centring", None, lambda value: value or None),
}  # fmt: skip

_OWN: Mapping[str, Rules] = {
    "grpo": {**_GENERATION, **_GRPO}, "rloo": {**_GENERATION, **_RLOO}, "sft": {**_OFFLINE, **_SFT},
    "dpo": {**_OFFLINE, **_DPO}, "kto": {**_OFFLINE, **_KTO}, "reward": {**_OFFLINE, **_REWARD},
}  # fmt: skip

RULES: Mapping[str, Mapping[str, Rule]] = {trainer: {**_EVERY, **own} for trainer, own in _OWN.items()}
