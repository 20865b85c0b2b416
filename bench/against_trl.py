"""The step of `recipes/gsm8k_smollm.yaml` by TRL's GRPO trainer, for a comparison on the same GPU.

    python -m bench.against_trl MODEL data/gsm8k/train.parquet [--steps 6] [--continuous] [--out MODEL_AFTER]

Needs an environment with `trl`, `accelerate` and `datasets`, without SGLang. The same prompts, responses, limits,
updates, learning rate and clipping. TRL generates with transformers: padded batches, or `--continuous` ones.
Prints a line of JSON per step: seconds, mean reward, tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megarl.reward.scorers.gsm8k import compute_score

PROMPTS, ROLLOUTS, UPDATES = 128, 16, 2
MICRO_BATCH = 128


class StepTimes(TrainerCallback):
    """Prints the seconds of each step: as many updates as a step has."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._num_updates = 0
        self._logs: dict[str, float] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        self._logs |= logs or {}

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._num_updates += 1
        if self._num_updates % UPDATES == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            names = ("reward", "num_tokens", "completions/mean_length")
            line = {"step": self._num_updates // UPDATES, "seconds": round(now - self._began, 2)}
            print(json.dumps(line | {name: self._logs.get(name) for name in names}), flush=True)
            self._began = now


def reward(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
    texts = [each[0]["content"] if isinstance(each, list) else each for each in completions]
    return [
        float(str(compute_score("", text, truth)["score"])) for text, truth in zip(texts, ground_truth, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--continuous", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/trl"))
    asked = parser.parse_args()
    rows = pq.read_table(asked.data).to_pylist()
    data = Dataset.from_list([{"prompt": r["prompt"], "ground_truth": r["reward_model"]["ground_truth"]} for r in rows])
    batches = PROMPTS * ROLLOUTS // MICRO_BATCH
    config = GRPOConfig(
        output_dir=str(asked.out),
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=batches // UPDATES,
        steps_per_generation=batches,
        num_generations=ROLLOUTS,
        max_completion_length=256,
        max_steps=asked.steps * UPDATES,
        learning_rate=4e-5,
        warmup_steps=2 * UPDATES,
        lr_scheduler_type="constant_with_warmup",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_transformers_continuous_batching=asked.continuous,
    )
    trainer = GRPOTrainer(
        model=str(asked.model),
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(asked.model),
        callbacks=[StepTimes()],
    )
    trainer.train()
    trainer.save_model(str(asked.out / "model"))


if __name__ == "__main__":
    main()
