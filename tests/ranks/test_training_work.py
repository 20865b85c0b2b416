from __future__ import annotations

import pytest

from megarl.config.hub import PUBLIC_MODELS
from megarl.ranks.trainer import training_work
from megarl.results import RankUsage, TrainingWork

SHAPE = PUBLIC_MODELS["qwen2.5-7b"]


def work_of(lengths: list[int], *, epochs: int = 1, num_ranks: int = 1, gpu: str | None = None) -> TrainingWork:
    usage = RankUsage(resident_bytes=1, host_available_bytes=1, host_total_bytes=2, gpu_name=gpu)
    return training_work(lengths, usage, shape=SHAPE, epochs=epochs, num_ranks=num_ranks)


def test_a_token_costs_six_per_weight_and_a_long_sequence_more() -> None:
    short = work_of([10]).flops / 10
    long = work_of([8192]).flops / 8192
    # 7.07e9 weights are multiplied with: the embedding is only looked up.
    assert short == pytest.approx(6 * 7.07e9, rel=0.01)
    assert long - short == pytest.approx(3 * 2 * 28 * 28 * 128 * (8192 - 10))


def test_all_sequences_count_in_every_epoch() -> None:
    one = work_of([10])
    two = work_of([10, 10], epochs=3, num_ranks=2, gpu="NVIDIA H100 80GB HBM3")
    assert two.flops == 2 * 3 * one.flops
    assert (one.peak_flops_per_second, two.peak_flops_per_second) == (None, 2 * 989e12)


def test_the_peak_of_a_gpu_that_is_not_known_is_not_guessed() -> None:
    assert work_of([10], gpu="NVIDIA H200").peak_flops_per_second == 989e12
    assert work_of([10], gpu="Some Accelerator").peak_flops_per_second is None
