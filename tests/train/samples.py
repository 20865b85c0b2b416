"""Random rollouts with credit, for batches of a test."""

from __future__ import annotations

import numpy as np

from megarl.tokens import Content
from megarl.types import FinishReason, PolicyVersion, Rollout, TrainSample


def make_samples(
    num: int, *, vocab: int, seed: int = 0, max_prompt: int = 8, max_response: int = 12
) -> list[TrainSample]:
    """Return samples of different lengths, with some tokens that the policy did not choose."""
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(num):
        num_response = int(random.integers(1, max_response + 1))
        loss_mask = random.random(num_response) < 0.8
        loss_mask[0] = True
        rollout = Rollout(
            content=Content(
                token_ids=random.integers(0, vocab, num_response).astype(np.int32),
                logprobs=np.log(random.uniform(0.001, 0.05, num_response)).astype(np.float32),
                text="",
            ),
            versions=np.full(num_response, PolicyVersion(0), np.int32),
            loss_mask=loss_mask,
            finish_reason=FinishReason.STOP,
        )
        samples.append(
            TrainSample(
                prompt_ids=random.integers(0, vocab, int(random.integers(1, max_prompt + 1))).astype(np.int32),
                rollout=rollout,
                advantages=np.where(loss_mask, random.standard_normal(num_response), 0).astype(np.float32),
            )
        )
    return samples
