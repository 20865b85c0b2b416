RUNTIME_ENV=${RUNTIME_ENV:-"./runtime_env.yaml"}
for v in $(env | awk -F= '/^SLURM_/{print $1}'); do
    unset "$v"
done
ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" --working-dir "$PWD" -- python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo data.train_files=train.parquet \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.multi_turn.enable=True \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$(pwd)/tools.yaml" \
    # trainer.total_epochs=3 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=$((4 * 2)) \ 
    trainer.total_epochs=15
