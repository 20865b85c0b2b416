set -x
if [ "$#" -lt 2 ]; then
    echo "usage: arguments.sh <model> <save_path> [keys...]"
    exit 1
fi
model=$1
save_path=$2
shift 2
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=remax data.train_files=train.parquet \
    actor_rollout_ref.model.path=$model \
    actor_rollout_ref.rollout.tensor_model_parallel_size=$ROLLOUT_TP \
    trainer.default_local_dir=$save_path $@
