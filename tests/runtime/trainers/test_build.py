from __future__ import annotations

import numpy as np
import pytest

from megarl.config.public_models import PUBLIC_MODELS
from megarl.results import RankUsage, TrainingWork
from megarl.runtime.trainers.build import peak_flops, training_work
from megarl.types import MicroBatch, MiniBatch, TrainBatch

SHAPE = PUBLIC_MODELS["qwen2.5-7b"]


def micro_batch(lengths: list[int], *, padding: int = 0) -> MicroBatch:
    sizes = [*lengths, padding] if padding else lengths
    num_tokens = sum(sizes)
    return MicroBatch(
        token_ids=np.zeros(num_tokens, np.int32),
        sequence_starts=np.cumsum([0, *sizes]).astype(np.int32),
        last_ids=np.zeros(len(sizes), np.int32),
        loss_mask=np.ones(num_tokens, np.bool_),
        rollout_logprobs=np.zeros(num_tokens, np.float32),
        advantages=np.zeros(num_tokens, np.float32),
        old_logprobs=None,
        reference_logprobs=None,
        values=None,
        returns=None,
        sample_ids=np.array([*range(len(lengths)), *([-1] if padding else [])], np.int32),
        response_starts=np.zeros(len(sizes), np.int32),
    )


def batch_of(*shares: tuple[MicroBatch, ...]) -> TrainBatch:
    return TrainBatch(
        mini_batches=(MiniBatch(shares=shares, num_loss_tokens=1, num_sequences=1),),
        temperature=1.0,
    )


def work_of(batch: TrainBatch, *, epochs: int = 1, num_ranks: int = 1, gpu: str | None = None) -> TrainingWork:
    usage = RankUsage(resident_bytes=1, host_available_bytes=1, host_total_bytes=2, gpu_name=gpu)
    return training_work(batch, usage, shape=SHAPE, epochs=epochs, num_ranks=num_ranks)


def test_a_token_costs_six_per_weight_and_a_long_sequence_more() -> None:
    short = work_of(batch_of((micro_batch([10]),))).flops / 10
    long = work_of(batch_of((micro_batch([8192]),))).flops / 8192
    # 7.07e9 weights are multiplied with: the embedding is only looked up.
    assert short == pytest.approx(6 * 7.07e9, rel=0.01)
    assert long - short == pytest.approx(3 * 2 * 28 * 28 * 128 * (8192 - 10))


def test_all_ranks_sequences_count_and_padding_does_not() -> None:
    one = work_of(batch_of((micro_batch([10]),)))
    shares = (micro_batch([10], padding=30),), (micro_batch([10], padding=30),)
    two = work_of(batch_of(*shares), epochs=3, num_ranks=2, gpu="NVIDIA H100 80GB HBM3")
    assert two.flops == 2 * 3 * one.flops
    assert (one.peak_flops_per_second, two.peak_flops_per_second) == (None, 2 * 989e12)


def test_the_peak_of_a_gpu_that_is_not_known_is_not_guessed() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("Some Accelerator") is None
