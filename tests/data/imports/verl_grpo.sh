# GRPO as scripts for verl write it: one command, settings as words.
set -x
DATA=.
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$DATA/verl.parquet \
    data.val_files=$DATA/held_out.parquet \
    data.train_batch_size=4 \
    data.max_prompt_length=256 \
    data.max_response_length=16 \
    data.truncation='error' \
    actor_rollout_ref.model.path=tiny \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=2 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.n=4 \
    trainer.logger='["console"]' \
    trainer.experiment_name=verl-grpo \
    trainer.n_gpus_per_node=8 \
    trainer.total_epochs=1 $@
