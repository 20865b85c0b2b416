backend=${BACKEND:-megatron} # fsdp or megatron
estimator=gae
tp=2
ACTOR_MEGATRON="
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$tp \
    actor_rollout_ref.actor.megatron.optimizer_offload=True"
CRITIC_MEGATRON="${ACTOR_MEGATRON//actor_rollout_ref.actor/critic}"
ACTOR="
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_decay_style=cosine"
CRITIC="critic.optim.lr=2e-5"
if [[ $backend == "megatron" ]]; then
    CONFIG=ppo_megatron_trainer
    ACTOR="$ACTOR $ACTOR_MEGATRON"
    if [[ $estimator == "gae" ]]; then
        CRITIC="$CRITIC $CRITIC_MEGATRON"
    else
        CRITIC=""
    fi
else # fsdp
    CONFIG=ppo_trainer
    ACTOR="$ACTOR actor_rollout_ref.actor.fsdp_config.param_offload=True"
fi
cat <<EOF
data.train_files=not/this.parquet
EOF
python -m verl.trainer.main_ppo --config-name=$CONFIG model_engine=megatron \
    algorithm.adv_estimator=$estimator data.train_files=train.parquet \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \
    $ACTOR \
    $CRITIC \
    trainer.total_training_steps=100
