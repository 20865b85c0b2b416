torchrun --nproc_per_node $1 -m verl.trainer.fsdp_sft_trainer \
    data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet \
    data.prompt_key=extra_info data.response_key=extra_info \
    data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \
    model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct \
    model.lora_rank=32\
    model.target_modules=all-linear \
    trainer.total_epochs=1
