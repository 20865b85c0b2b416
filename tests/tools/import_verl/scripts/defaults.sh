export VLLM_USE_V1=1
DATA_HOME=${DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-${DATA_HOME}/models/Qwen2.5-7B}
TRAIN=${TRAIN:-$DATA_HOME/data/train.parquet}
TEST=${TEST:-"['$DATA_HOME/data/a.parquet', '$DATA_HOME/data/b.parquet']"}
FREQ=${FREQ:--1}
TP=${1:-4}
EXP=run-tp${TP}${SUFFIX:+"-"}${SUFFIX}-$(date +%m%d)
: "${SEED:=11}"
if [ $TP -eq 4 ] || [ $TP -eq 2 ]; then
    SEQS=1024
else
    SEQS=384
fi
[ -z "$WARMUP" ] && WARMUP=0.05

python3 -u -m verl.trainer.main_ppo \
    data.train_files="$TRAIN" data.val_files="$TEST" data.seed=$SEED \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=$WARMUP \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TP \
    actor_rollout_ref.rollout.tensor_model_parallel_size=$TP \
    actor_rollout_ref.rollout.max_num_seqs=$SEQS \
    algorithm.adv_estimator=gae \
    trainer.experiment_name=$EXP trainer.test_freq=$FREQ \
    trainer.logger='["console","wandb"]' trainer.project_name=demo \
    trainer.n_gpus_per_node=8 "${@:2}" 2>&1 | tee run.log
