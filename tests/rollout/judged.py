"""Groups for a judge, and the question that it gets."""

from __future__ import annotations

import numpy as np

from megarl.config.reward import EngineJudgeRewardConfig
from megarl.tokens import Content
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup

CHAT = ({"role": "user", "content": "12+30="},)


def group_of(*texts: str) -> RolloutGroup:
    nothing = np.zeros(1, np.int32)
    rollouts = [
        Rollout(
            versions=nothing,
            loss_mask=nothing.astype(bool),
            finish_reason=FinishReason.STOP,
            content=Content(token_ids=nothing, logprobs=nothing.astype(np.float32), text=text),
        )
        for text in texts
    ]
    prompt = Prompt(
        uid="row-0",
        position=0,
        epoch=0,
        token_ids=nothing,
        data_source="test",
        ground_truth="42",
        extra_info={},
        messages=CHAT,
    )
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))


def written_question(**keys: object) -> EngineJudgeRewardConfig:
    return EngineJudgeRewardConfig.model_validate(
        {"kind": "engine_judge", "template": "Is {response} right?", "answers": {"yes": 1.0, "no": 0.0}, **keys}
    )
