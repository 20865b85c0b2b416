#!/bin/bash
DATA=(
    data.train_files=$HOME/data/gsm8k/train.parquet   # the training set
    data.val_files=$HOME/data/gsm8k/test.parquet
    data.train_batch_size=256
)
MODEL=( actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.model.enable_gradient_checkpointing=True )
ACTOR=(
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.actor.megatron.param_offload=True
)
ACTOR+=(actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var_kl)
UNUSED=(algorithm.adv_estimator=gae)
CMD=(python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo)
"${CMD[@]}" "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" \
    actor_rollout_ref.rollout.n=5 \
    trainer.total_epochs=15
