#!/usr/bin/env bash
set -xeuo pipefail

# lengths
prompt_len=$((1024 * 2))
answer_len=$((1024 * 4))
buffer_len=$((answer_len / 8))
gpus=8
nodes=$((gpus * 4 / gpus))
budget=$(((prompt_len + answer_len) * 2))

python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml'\
    algorithm.adv_estimator=grpo \
    data.train_files="$HOME/data/dapo.parquet" \
    data.max_prompt_length=$((prompt_len)) \
    data.max_response_length=${answer_len} \
    data.train_batch_size=512 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-32B \
    actor_rollout_ref.actor.ppo_mini_batch_size=$((512 / 16)) \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$budget \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=$buffer_len \
    trainer.nnodes="${nodes}" trainer.n_gpus_per_node=${gpus} \
    trainer.total_epochs=4 "$@"
