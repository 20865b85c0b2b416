"""Groups to score, and reward files written as a user would write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from megarl.config.reward import FunctionRewardConfig
from megarl.tokens import Content
from megarl.types import FinishReason, JsonValue, PolicyVersion, Prompt, Rollout, RolloutGroup

MakeGroup = Callable[..., RolloutGroup]
MakeReward = Callable[..., FunctionRewardConfig]


@pytest.fixture
def make_group() -> MakeGroup:
    def make(
        *texts: str,
        ground_truth: str = "42",
        extra_info: Mapping[str, JsonValue] | None = None,
        finish_reason: FinishReason = FinishReason.STOP,
    ) -> RolloutGroup:
        prompt = Prompt(
            uid="train.parquet:17",
            position=3,
            epoch=0,
            token_ids=np.array([1], dtype=np.int32),
            data_source="arithmetic",
            ground_truth=ground_truth,
            extra_info=extra_info or {},
            messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 * 7?"}),
        )
        rollouts = tuple(_rollout(text, finish_reason) for text in texts)
        return RolloutGroup(prompt=prompt, rollouts=rollouts)

    return make


def _rollout(text: str, finish_reason: FinishReason) -> Rollout:
    return Rollout(
        content=Content(
            token_ids=np.array([5], dtype=np.int32), logprobs=np.array([-0.5], dtype=np.float32), text=text
        ),
        versions=np.array([PolicyVersion(0)], dtype=np.int32),
        loss_mask=np.array([True]),
        finish_reason=finish_reason,
    )


@pytest.fixture
def make_reward(tmp_path: Path) -> MakeReward:
    def make(
        source: str, *, name: str = "compute_score", workers: int = 1, deadline_s: float = 20
    ) -> FunctionRewardConfig:
        path = tmp_path / "my_reward.py"
        path.write_text(dedent(source))
        return FunctionRewardConfig(kind="function", path=path, name=name, workers=workers, deadline_s=deadline_s)

    return make
