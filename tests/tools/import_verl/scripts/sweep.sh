LRS=(1e-6 5e-6)
for lr in "${LRS[@]}"; do
    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet \
        actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct actor_rollout_ref.rollout.n=8 \
        actor_rollout_ref.actor.optim.lr=$lr trainer.experiment_name=lr-$lr
done
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae data.train_files=other.parquet
