from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from megarl.data.demonstrations import Demonstrations, DemonstrationScorer
from megarl.data.tokenizer import Tokenizer
from megarl.types import DEMONSTRATION, FinishReason, Prompt


def prompt_with(tokenizer: Tokenizer, response: str) -> Prompt:
    return Prompt(
        uid="sft.parquet:4",
        position=0,
        epoch=0,
        token_ids=tokenizer.encode(["1+1="])[0],
        data_source="sums",
        ground_truth="2",
        extra_info={},
        demonstration=tokenizer.encode_responses([response])[0],
    )


def test_the_group_is_the_data_sets_own_answer(tokenizer: Tokenizer) -> None:
    prompt = prompt_with(tokenizer, "12")
    group = asyncio.run(Demonstrations(tokenizer).generate(prompt))
    (rollout,) = group.rollouts
    assert group.prompt is prompt
    assert rollout.token_ids is prompt.demonstration
    assert rollout.text == "12"
    assert rollout.finish_reason is FinishReason.STOP
    assert rollout.versions.tolist() == [DEMONSTRATION] * 3
    assert rollout.logprobs.tolist() == [0.0] * 3
    assert rollout.logprobs.dtype == np.float32
    # The end token is part of what is imitated.
    assert rollout.loss_mask.tolist() == [True] * 3


def test_every_demonstration_scores_one(tokenizer: Tokenizer) -> None:
    group = asyncio.run(Demonstrations(tokenizer).generate(prompt_with(tokenizer, "wrong")))
    scored = asyncio.run(DemonstrationScorer().score(group))
    assert scored.group is group
    assert [score.value for score in scored.scores] == [1.0]


def test_a_prompt_without_a_demonstration_is_a_bug(tokenizer: Tokenizer) -> None:
    prompt = replace(prompt_with(tokenizer, "2"), demonstration=None)
    with pytest.raises(AssertionError, match=r"sft.parquet:4 has no demonstration"):
        asyncio.run(Demonstrations(tokenizer).generate(prompt))
