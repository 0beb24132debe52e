"""The keys of verl 0.9, as its ppo_trainer composes them, and those that say where and how fast."""

from kitae.importers.translation import Joint, No, Nothing, Rule, To, all_of, trackers

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_C = "algorithm.rollout_correction"
_ENGINE = "Kitae's own engine samples; engine.kind = 'vllm' or 'sglang' with engine.server uses yours (docs/servers.md)"

RULES: dict[str, Rule] = {
    f"{_M}.path": To("model.path", "~/models/deepseek-llm-7b-chat"),
    f"{_M}.lora_rank": To("model.lora_rank", 0), f"{_M}.lora_alpha": Joint(16),
    f"{_M}.target_modules": Joint("all-linear"),
    f"{_M}.trust_remote_code": To("model.trust_remote_code"),
    f"{_M}.enable_gradient_checkpointing": To("training.checkpoint_activations"),
    f"{_M}.external_lib": No("models are those of transformers"),
    f"{_M}.custom_chat_template": No("the template is the model's own"),
    f"{_M}.override_config": No("the config is the model's own", (None, {})),
    "data.train_files": Joint("~/data/rlhf/gsm8k/train.parquet"),
    "data.val_files": Joint("~/data/rlhf/gsm8k/test.parquet"),
    "data.prompt_key": Joint("prompt"), "data.train_batch_size": To("training.prompts_per_step", 1024),
    "data.max_response_length": To("sampling.max_tokens", 512), "data.shuffle": To("data.shuffle", True),
    "data.seed": To("run.seed"), "data.truncation": Nothing("a prompt beyond the model's context drops its group"),
    "data.max_prompt_length": Nothing("prompts may be as long as the model's context"),
    "data.reward_fn_key": No("the source of a row is its data_source", ("data_source",)),
    "data.apply_chat_template_kwargs": No("the template is rendered as it is", (None, {})),
    **all_of("data.train_max_samples data.val_max_samples", No("all rows of a file are read", (None, -1))),
    "data.custom_cls.path": No("a reader of rows is data.format = 'file.py:function'"),
    "data.custom_cls.name": Nothing("with data.custom_cls.path"),
    "data.tokenizer": No("the tokenizer is the model's own"),
    **all_of("data.tool_config_path data.function_tool_path", Joint()),
    f"{_A}.optim.lr": To("training.lr", 1e-6), f"{_A}.optim.weight_decay": To("training.weight_decay", 0.01),
    f"{_A}.optim.betas": To("training.betas", [0.9, 0.999]), f"{_A}.grad_clip": To("training.clip_norm", 1.0),
    f"{_A}.optim.clip_grad": Nothing("grad_clip is what verl reads"),
    f"{_A}.optim.lr_warmup_steps": Joint(-1), f"{_A}.optim.lr_warmup_steps_ratio": Joint(0.0),
    f"{_A}.optim.lr_scheduler_type": Joint("constant"), f"{_A}.optim.warmup_style": Joint(),
    f"{_A}.optim.min_lr_ratio": No("schedules end at 0", (None, 0, 0.0)),
    f"{_A}.optim.optimizer": No("the optimizer is AdamW", ("AdamW", "adam", "adamw")),
    f"{_A}.optim.total_training_steps": Nothing("it follows from training.steps"),
    f"{_A}.ppo_mini_batch_size": Joint(256), f"{_A}.ppo_epochs": To("training.epochs", 1),
    f"{_A}.clip_ratio": Joint(0.2), f"{_A}.clip_ratio_low": Joint(0.2), f"{_A}.clip_ratio_high": Joint(0.2),
    f"{_A}.clip_ratio_c": Joint(3.0), f"{_A}.tau_pos": Joint(1.0), f"{_A}.tau_neg": Joint(1.05),
    f"{_A}.policy_loss.loss_mode": Joint("vanilla"), f"{_A}.policy_loss.dro_beta": Joint(),
    f"{_A}.policy_loss.clip_cov_ratio": Joint(2e-4), f"{_A}.policy_loss.kl_cov_ratio": Joint(2e-4),
    f"{_A}.policy_loss.ppo_kl_coef": Joint(0.1),
    **all_of(f"{_A}.policy_loss.clip_cov_lb {_A}.policy_loss.clip_cov_ub",
             No("the tokens of highest covariance are held, not a sample from a band", (1.0, 5.0))),
    f"{_A}.loss_agg_mode": Joint("token-mean"), f"{_A}.loss_scale_factor": Joint(),
    f"{_A}.entropy_coeff": To("algorithm.entropy.coef", 0),
    f"{_A}.use_kl_loss": Joint(False), f"{_A}.kl_loss_coef": Joint(0.001), f"{_A}.kl_loss_type": Joint("low_var_kl"),
    f"{_A}.shuffle": Nothing("mini-batches are whole groups, in the order of the batch"),
    "algorithm.adv_estimator": Joint("gae"), "algorithm.norm_adv_by_std_in_grpo": Joint(True),
    "algorithm.gamma": Joint(1.0), "algorithm.lam": Joint(1.0),
    "algorithm.use_kl_in_reward": Joint(False), "algorithm.kl_penalty": Joint("kl"),
    "algorithm.kl_ctrl.type": Joint("fixed"), "algorithm.kl_ctrl.kl_coef": Joint(0.001),
    "algorithm.kl_ctrl.horizon": Joint(10000), "algorithm.kl_ctrl.target_kl": Joint(0.1),
    "algorithm.filter_groups.enable": Joint(False), "algorithm.filter_groups.max_num_gen_batches": Joint(0),
    "algorithm.filter_groups.metric": Nothing("groups with equal scores are dropped"),
    "algorithm.filter_groups.max_inflight_gen_batches": Nothing(_ENGINE),
    "algorithm.gdpo_reward_keys": Joint(), "algorithm.gdpo_reward_weights": Joint(),
    "algorithm.use_pf_ppo": No("there is no reweighting of samples by reward"),
    **all_of("algorithm.pf_ppo.reweight_method algorithm.pf_ppo.weight_pow", Nothing("of algorithm.use_pf_ppo")),
    f"{_C}.rollout_is": Joint(), f"{_C}.rollout_is_threshold": Joint(2.0), f"{_C}.bypass_mode": Joint(False),
    f"{_C}.loss_type": Joint("ppo_clip"),
    f"{_C}.rollout_rs": No("masks of verl take tokens out of the means too; near it are algorithm.correction "
                           "'geometric', "
                           "'k2-mask', 'k3-mask', 'veto' and 'icepop'"),
    f"{_C}.rollout_rs_threshold": Nothing("of rollout_rs"),
    f"{_C}.rollout_is_batch_normalize": No("weights are not divided by their mean"),
    "critic.optim.lr": Joint(1e-5), "critic.cliprange_value": Joint(0.5), "trainer.critic_warmup": Joint(0),
    f"{_R}.n": To("training.group_size", 1), f"{_R}.temperature": To("sampling.temperature", 1.0),
    f"{_R}.top_p": To("sampling.top_p", 1.0), f"{_R}.top_k": To("sampling.top_k", None, lambda k: max(0, k)),
    f"{_R}.response_length": Nothing("data.max_response_length says it"),
    f"{_R}.do_sample": No("training samples", (True,)),
    f"{_R}.ignore_eos": No("a response ends where the model ends it"),
    f"{_R}.val_kwargs.temperature": To("eval.temperature", 0.0), f"{_R}.val_kwargs.n": To("eval.samples", 1),
    f"{_R}.val_kwargs.top_p": To("eval.top_p", 1.0),
    f"{_R}.val_kwargs.top_k": To("eval.top_k", None, lambda k: max(0, k)),
    f"{_R}.val_kwargs.do_sample": Nothing("eval.temperature = 0 is greedy"),
    f"{_R}.multi_turn.enable": Joint(False), f"{_R}.multi_turn.max_assistant_turns": To("env.turns"),
    f"{_R}.multi_turn.function_tool_path": Joint(), f"{_R}.multi_turn.tool_config_path": Joint(),
    f"{_R}.multi_turn.max_tool_response_length": Joint(256),
    f"{_R}.multi_turn.max_user_turns": Nothing("env.turns counts "
                                                                                                    "the model's"),
    f"{_R}.agent.agent_loop_config_path": No("an agent loop is an environment: env.name = 'file.py:Class'"),
    f"{_R}.agent.default_agent_loop": Nothing("with tools, env.name = 'tools'"),
    "reward.custom_reward_function.path": Joint(), "reward.custom_reward_function.name": Joint("compute_score"),
    "custom_reward_function.path": Joint(), "custom_reward_function.name": Joint(),
    "reward.reward_manager.name": Joint("naive"), "reward_model.reward_manager": Joint(),
    "reward.reward_model.enable": Joint(False), "reward.reward_model.model_path": Joint(),
    "reward_model.enable": Joint(), "reward_model.model.path": Joint(),
    "reward.reward_kwargs.overlong_buffer_cfg.enable": Joint(False),
    "reward.reward_kwargs.overlong_buffer_cfg.len": Joint(0),
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": No("the penalty reaches 1", (1, 1.0)),
    **all_of("reward.reward_kwargs.max_resp_len reward.reward_kwargs.overlong_buffer_cfg.log",
             Nothing("the penalty ends at sampling.max_tokens")),
    "reward.sandbox_fusion.url": No("programs are judged by verifier.name = 'code', or 'remote_code' with its url"),
    "reward.reward_manager.module.path": No("a manager of your own is a verifier: verifier.name = 'file.py:function'"),
    **all_of("reward.sandbox_fusion.max_concurrent reward.sandbox_fusion.memory_limit_mb "
             "reward.reward_manager.module.name "
             "sandbox_fusion.max_concurrent sandbox_fusion.memory_limit_mb", Nothing("of another key")),
    "distillation.enabled": No("distillation is a kind of run: method.kind = 'distil' (docs/distillation.md)"),
    "trainer.total_epochs": Joint(30), "trainer.total_training_steps": Joint(),
    "trainer.save_freq": To("checkpoint.every", None, lambda n: n if n > 0 else None),
    "trainer.test_freq": To("eval.every", None, lambda n: max(0, n)),
    "trainer.max_actor_ckpt_to_keep": To("checkpoint.keep"),
    "trainer.experiment_name": To("run.name", None), "trainer.project_name": To("observe.project", None),
    "trainer.logger": To("observe.trackers", None, trackers),
    "trainer.val_before_train": No("a run is evaluated before its first step", (None, True)),
    "trainer.val_only": No("kitae eval MODEL measures"),
    "trainer.v1.trainer_mode": Joint("sync"), "trainer.v1.sampler.max_off_policy_threshold": Joint(8),
}  # fmt: skip

_IDLE = (  # prefixes of keys that say where, how fast and with how much memory
    "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref", "critic",
    "actor_rollout_ref.actor.checkpoint", "actor_rollout_ref.actor.profiler", "actor_rollout_ref.actor", "ray_kwargs",
    "actor_rollout_ref.rollout", "actor_rollout_ref.model", "actor_rollout_ref.hybrid_engine", "global_profiler",
    "trainer",
    "transfer_queue", "skip", "distillation", "actor_rollout_ref.nccl_timeout", "data", "reward", "reward_model",
    "sandbox_fusion", "hydra", "defaults", "model_engine",
)  # fmt: skip
_ALL_IDLE = (
    "global_profiler", "transfer_queue", "skip", "ray_kwargs", "defaults", "hydra", "distillation", "sandbox_fusion",
)  # fmt: skip
_KNOWN_IDLE = all_of(
    "use_dynamic_bsz ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu strategy "
    "use_torch_compile ulysses_sequence_parallel_size entropy_from_logits_with_chunking entropy_checkpointing "
    "use_remove_padding use_fused_kernels use_prefix_grouper use_liger use_shm enable_activation_offload "
    "calculate_entropy calculate_sum_pi_squared data_loader_seed freeze_vision_tower "
    "log_prob_micro_batch_size log_prob_use_dynamic_bsz log_prob_micro_batch_size_per_gpu "
    "log_prob_max_token_len_per_gpu name mode gpu_memory_utilization enforce_eager free_cache_engine "
    "tensor_model_parallel_size data_parallel_size expert_parallel_size pipeline_model_parallel_size "
    "max_num_batched_tokens max_model_len max_num_seqs enable_chunked_prefill enable_prefix_caching "
    "load_format layered_summon disable_log_stats calculate_log_probs dtype seed prompt_length nnodes "
    "n_gpus_per_node device balance_batch resume_mode resume_from_path default_local_dir default_hdfs_dir "
    "del_local_ckpt_after_load max_critic_ckpt_to_keep log_val_generations rollout_data_dir "
    "validation_data_dir ray_wait_register_center_timeout esi_redundant_time use_v1 filter_overlong_prompts "
    "filter_overlong_prompts_workers return_raw_chat image_key video_key audio_key dataloader_num_workers "
    "val_batch_size gen_batch_size num_workers hf_config_path tokenizer_path return_raw_input_ids "
    "return_full_prompt return_multi_modal_inputs validation_shuffle trust_remote_code format hybrid_engine "
    "nccl_timeout grad_clip rollout_n forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu "
    "use_legacy_worker_impl enable entropy_from_logits_chunk_size pad_to_length full_determinism "
    "cudagraph_capture_sizes logprobs_mode scheduling_policy over_sample_rate multi_stage_wake_up "
    "num_repeat_rollouts skip_tokenizer_init enable_rollout_routing_replay moe_load_balance_metrics_interval "
    "quantization quantization_config_file mtp qat image_patch_size mm_processor_kwargs ppo_mini_batch_size "
    "ppo_epochs shuffle loss_agg_mode loss_scale_factor forward_micro_batch_size enable_resource_pool "
    "reward_loop_source reward_loop_module_path reward_loop_class_name source max_parallel_calls "
    "tool_response_truncate_side use_inference_chat_template tokenization_sanity_check_mode",
    Nothing("where, how fast, or with how much memory"),
)
_DEEP = (
    "disaggregation",
    "custom_async_server",
    "continuous_token",
    "v1",
    "deepspeed",
    "deepspeed_config",
    "override_config",
    "fsdp_config",
    "megatron",
    "checkpoint",
    "profiler",
    "engine_kwargs",
    "router_replay",
    "optim",
    "fsdp",
    "qat",
    "checkpoint_engine",
    "trace",
    "prometheus",
    "wrap_policy",
    "ray_init",
    "model",
    "lora",
    "mtp",
    "global_tool_config",
)


def is_idle(key: str) -> bool:
    parts = key.split(".")
    if parts[0] in ("reward", "reward_model") and "rollout" in parts:
        return True
    known = parts[-1] in _KNOWN_IDLE or any(part in _DEEP for part in parts[1:-1]) or parts[0] in _ALL_IDLE
    return key.startswith(_IDLE) and known
