python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae algorithm.kl_ctrl.kl_coef=0.001 data.train_files=/data/train.parquet data.val_files=/data/test.parquet \
  data.train_batch_size=256 actor_rollout_ref.model.path=Qwen/Qwen2.5-72B-Instruct actor_rollout_ref.actor.strategy=megatron \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8 actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=4 \
  actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.tensor_model_parallel_size=8 critic.model.path=Qwen/Qwen2.5-72B-Instruct critic.optim.lr=1e-5 \
  reward_model.reward_fn.path=my_reward.py reward_model.reward_fn.name=compute_reward trainer.nnodes=8 trainer.n_gpus_per_node=8
