#!/usr/bin/env bash
# The keys of verl's CISPO example, for a small model. A lower clip of 10 is none.
set -xeuo pipefail

clip_ratio_low=${CLIP_RATIO_LOW:-10}
clip_ratio_high=${CLIP_RATIO_HIGH:-0.2}

ACTOR=(
    actor_rollout_ref.actor.policy_loss.loss_mode=cispo
    actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low}
    actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high}
    actor_rollout_ref.actor.optim.lr=1e-3
    actor_rollout_ref.actor.ppo_mini_batch_size=4
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0
)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
    data.train_files="['arithmetic/train.parquet']" data.train_batch_size=8 \
    data.max_prompt_length=16 data.max_response_length=6 data.filter_overlong_prompts=True data.truncation='error' \
    actor_rollout_ref.model.path=arithmetic/model \
    "${ACTOR[@]}" \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.n=5 \
    trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_training_steps=2 "$@"
