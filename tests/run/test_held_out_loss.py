"""The loss of held-out demonstrations: the mean over imitated tokens, whatever the calls it is computed in."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import pytest

from megarl.config.recipe import EvaluationConfig
from megarl.results import EvalResult, Grade, Grades
from megarl.run.held_out_loss import DemonstrationEvaluator
from megarl.serving.phases import SeparatePhases
from megarl.tokens import Content
from megarl.types import (
    DEMONSTRATION,
    FinishReason,
    FloatArray,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    TrainSample,
)

LENGTHS = (3, 1, 4, 2, 5)


def demonstration(length: int) -> Prompt:
    return Prompt(
        uid=str(length),
        position=0,
        epoch=0,
        token_ids=np.zeros(2, np.int32),
        data_source="test",
        ground_truth="",
        extra_info={},
        demonstration=np.arange(length, dtype=np.int32),
        # The first of several tokens belongs to another speaker.
        demonstration_mask=np.arange(length) >= min(1, length - 1),
    )


class Recited:
    async def generate(self, prompt: Prompt) -> RolloutGroup:
        assert prompt.demonstration is not None
        assert prompt.demonstration_mask is not None
        num_tokens = len(prompt.demonstration)
        rollout = Rollout(
            content=Content(token_ids=prompt.demonstration, logprobs=np.zeros(num_tokens, np.float32), text=""),
            versions=np.full(num_tokens, DEMONSTRATION, np.int32),
            loss_mask=prompt.demonstration_mask,
            finish_reason=FinishReason.STOP,
        )
        return RolloutGroup(prompt=prompt, rollouts=(rollout,))


class GradedAnswers:
    def is_due(self, step: int, *, is_last: bool) -> bool:
        return True

    async def evaluate(self, step: int, version: PolicyVersion) -> EvalResult:
        grade = Grade(num_prompts=2, rollouts_per_prompt=1, score_mean=0.5, accuracy=0.5, majority=0.5, pass_at={})
        return EvalResult(version=version, greedy=Grades(overall=grade, by_source={}), sampled=None)


def evaluate(*, samples_per_call: int, answers: GradedAnswers | None = None) -> tuple[EvalResult, list[int]]:
    """Return the result, and the number of samples of each call; a token's log-probability is minus its place."""
    calls: list[int] = []

    async def logprobs(samples: Sequence[TrainSample]) -> tuple[FloatArray, ...]:
        calls.append(len(samples))
        return tuple(-sample.rollout.token_ids.astype(np.float32) for sample in samples)

    evaluator = DemonstrationEvaluator(
        EvaluationConfig(),
        demonstrations=[demonstration(length) for length in LENGTHS],
        answers=answers,
        generator=Recited(),
        logprobs=logprobs,
        phases=SeparatePhases(),
        samples_per_call=samples_per_call,
    )
    return asyncio.run(evaluator.evaluate(3, PolicyVersion(3))), calls


@pytest.mark.parametrize(("samples_per_call", "calls"), [(2, [2, 2, 1]), (5, [5]), (9, [5])])
def test_the_loss_is_the_mean_over_the_imitated_tokens(samples_per_call: int, calls: list[int]) -> None:
    counted = [place for length in LENGTHS for place in range(min(1, length - 1), length)]
    result, seen = evaluate(samples_per_call=samples_per_call)
    assert seen == calls
    assert result.version == 3
    assert result.held_out_loss == pytest.approx(sum(counted) / len(counted))
    assert result.numbers == pytest.approx(
        {"held_out_loss": result.held_out_loss, "perplexity": math.exp(sum(counted) / len(counted))}
    )


def test_the_loss_stands_beside_the_grades_of_answers() -> None:
    result, _ = evaluate(samples_per_call=2, answers=GradedAnswers())
    assert list(result.numbers) == ["accuracy", "score", "held_out_loss", "perplexity"]
    assert result.accuracy == 0.5
