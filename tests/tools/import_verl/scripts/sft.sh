#!/usr/bin/env bash
ENTRYPOINT=${ENTRYPOINT:-"-m verl.trainer.sft_trainer"}
NUM_GPUS=${NUM_GPUS:-8}
ENGINE="\
    engine=megatron \
    optim=megatron \
    optim.lr=1e-5 \
    optim.lr_warmup_steps_ratio=0.2 \
    optim.betas="[0.9,0.95]" \
    optim.lr_decay_style=cosine \
    optim.min_lr=1e-6 \
    engine.tensor_model_parallel_size=${TP:-2} \
    engine.pipeline_model_parallel_size=2 \
    engine.virtual_pipeline_model_parallel_size=${VPP:-null}"
torchrun --standalone --nnodes=1 --nproc_per_node=${NUM_GPUS} ${ENTRYPOINT} \
    data.train_files=~/data/sft/train.parquet \
    data.val_files=~/data/sft/test.parquet \
    data.train_batch_size=64 \
    data.max_length=4096 \
    data.messages_key=messages \
    model.path=Qwen/Qwen3-8B \
    ${ENGINE} \
    trainer.test_freq=50 \
    trainer.logger=['console','tensorboard'] \
    trainer.total_epochs=2 \
    trainer.total_training_steps=200 \

    # trainer.max_ckpt_to_keep=1 \
