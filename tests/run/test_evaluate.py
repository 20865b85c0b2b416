"""Evaluations against fakes of their seams: grades of answers, the loss of demonstrations, and when it is time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.recipe import EvaluationConfig, SampledEvaluationConfig
from megarl.data.evaluation_files import EvaluatedRollout, generations_file, read_generations, write_generations
from megarl.errors import FleetError
from megarl.results import EvalResult
from megarl.rollout.groups import GivenGroups
from megarl.run.evaluate import Evaluator, HeldOutAnswers, HeldOutDemonstrations
from megarl.stages import Generator, SeparatePhases
from megarl.types import (
    DEMONSTRATION,
    FloatArray,
    PolicyVersion,
    Prompt,
    RolloutGroup,
    Score,
    ScoredGroup,
    TrainSample,
)
from tests.values import make_prompt, make_rollout


def prompts(count: int) -> list[Prompt]:
    return [
        make_prompt(
            place,
            token_ids=[place],
            file="eval.parquet",
            data_source="even" if place % 2 == 0 else "odd",
            ground_truth=str(place),
        )
        for place in range(count)
    ]


class Guesser:
    """Rollout i of prompt p says p + i + offset: the first one is right where the offset is 0."""

    def __init__(self, num_rollouts: int, *, offset: int = 0, fails_at: int = -1) -> None:
        self._num_rollouts = num_rollouts
        self._offset = offset
        self._fails_at = fails_at

    async def generate(self, prompt: Prompt) -> RolloutGroup:
        await asyncio.sleep(0.001 * (3 - prompt.position % 3))
        if prompt.position == self._fails_at:
            raise FleetError("no engine left")
        return RolloutGroup(
            prompt=prompt,
            rollouts=tuple(
                make_rollout([1, 2], text=str(prompt.position + index + self._offset), version=7)
                for index in range(self._num_rollouts)
            ),
        )


class Comparer:
    async def score(self, group: RolloutGroup) -> ScoredGroup:
        truth = group.prompt.ground_truth
        scores = (
            Score(value=float(rollout.text == truth), components={"length": len(rollout.text)}, prediction=rollout.text)
            for rollout in group.rollouts
        )
        return ScoredGroup(group=group, scores=tuple(scores))


async def write(path: Path, kept: Sequence[EvaluatedRollout]) -> None:
    write_generations(path, (answer.line(lambda token_ids: f"what is {token_ids[0]}?") for answer in kept))


def evaluator(
    folder: Path, config: EvaluationConfig, *, greedy: Generator | None = None, sampled: Generator | None = None
) -> HeldOutAnswers:
    return HeldOutAnswers(
        config=config,
        prompts=prompts(4),
        greedy=None if greedy is None else GivenGroups(greedy, Comparer()).scored_group,
        sampled=None if sampled is None else GivenGroups(sampled, Comparer()).scored_group,
        write=write,
        run_folder=folder,
    )


def evaluate(of: HeldOutAnswers) -> EvalResult:
    return asyncio.run(of.evaluate(5))


def test_greedy_alone_has_an_accuracy_and_nothing_of_samples(tmp_path: Path) -> None:
    result = evaluate(evaluator(tmp_path, EvaluationConfig(), greedy=Guesser(1)))
    assert (result.version, result.accuracy, result.sampled) == (7, 1.0, None)
    assert result.numbers == {"accuracy": 1.0, "score": 1.0}


def test_both_ways_in_one_evaluation(tmp_path: Path) -> None:
    config = EvaluationConfig(sampled=SampledEvaluationConfig(rollouts_per_prompt=4, pass_at=(1, 2)))
    result = evaluate(evaluator(tmp_path, config, greedy=Guesser(1, offset=1), sampled=Guesser(4)))
    assert result.numbers == {
        "accuracy": 0.0,
        "score": 0.0,
        "mean@4": 0.25,
        "pass@1": 0.25,
        "pass@2": 0.5,
        "majority@4": 1.0,
    }
    assert result.main is not None
    assert list(result.main.by_source) == ["even", "odd"]
    assert result.numbers_of("odd")["pass@2"] == 0.5


def test_sampled_alone_gives_the_accuracy(tmp_path: Path) -> None:
    config = EvaluationConfig(is_greedy=False, sampled=SampledEvaluationConfig(rollouts_per_prompt=2))
    result = evaluate(evaluator(tmp_path, config, sampled=Guesser(2)))
    assert result.greedy is None
    assert result.accuracy == result.numbers["mean@2"] == 0.5


def test_everything_is_kept_to_be_read(tmp_path: Path) -> None:
    config = EvaluationConfig(sampled=SampledEvaluationConfig(rollouts_per_prompt=3))
    evaluate(evaluator(tmp_path, config, greedy=Guesser(1), sampled=Guesser(3)))
    kept = list(read_generations(generations_file(tmp_path, 5)))
    assert [(item.prompt_uid, item.is_greedy, item.index) for item in kept[3:6]] == [
        ("eval.parquet:3", True, 0),
        ("eval.parquet:0", False, 0),
        ("eval.parquet:0", False, 1),
    ]
    assert len(kept) == 4 + 4 * 3
    last = kept[-1]
    assert (last.prompt, last.response, last.prediction, last.ground_truth) == ("what is 3?", "5", "5", "3")
    assert (last.score, last.is_right, last.components, last.num_tokens) == (0.0, False, {"length": 1.0}, 2)


def test_a_failing_engine_ends_the_evaluation_with_its_own_error_and_keeps_nothing(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="no engine left"):
        evaluate(evaluator(tmp_path, EvaluationConfig(), greedy=Guesser(1, fails_at=2)))
    assert not generations_file(tmp_path, 5).exists()


@pytest.mark.parametrize(
    ("config", "due"),
    [
        (EvaluationConfig(), [0, 6]),
        (EvaluationConfig(every_steps=2), [0, 2, 4, 6]),
        (EvaluationConfig(every_steps=4, runs_before_training=False), [4, 6]),
    ],
)
def test_when_it_is_time(config: EvaluationConfig, due: list[int]) -> None:
    of = Evaluator(config=config, phases=SeparatePhases())
    assert [step for step in range(7) if of.is_due(step, is_last=step == 6)] == due


@pytest.mark.parametrize(("num_rollouts", "expected"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_without_a_list_pass_at_takes_powers_of_two_and_n(num_rollouts: int, expected: tuple[int, ...]) -> None:
    assert SampledEvaluationConfig(rollouts_per_prompt=num_rollouts).pass_at_or_default == expected


LENGTHS = (3, 1, 4, 2, 5)


def demonstration(length: int) -> Prompt:
    return replace(
        make_prompt(length),
        demonstration=np.arange(length, dtype=np.int32),
        # The first of several tokens belongs to another speaker.
        demonstration_mask=np.arange(length) >= min(1, length - 1),
    )


class Recited:
    async def generate(self, prompt: Prompt) -> RolloutGroup:
        assert prompt.demonstration is not None
        assert prompt.demonstration_mask is not None
        rollout = make_rollout(prompt.demonstration, loss_mask=prompt.demonstration_mask, version=DEMONSTRATION)
        return RolloutGroup(prompt=prompt, rollouts=(rollout,))


def evaluate_demonstrations(
    *, samples_per_call: int, answers: HeldOutAnswers | None = None
) -> tuple[EvalResult, list[int]]:
    """Return the result, and the number of samples of each call; a token's log-probability is minus its place."""
    calls: list[int] = []

    async def logprobs(samples: Sequence[TrainSample]) -> tuple[FloatArray, ...]:
        calls.append(len(samples))
        return tuple(-sample.rollout.token_ids.astype(np.float32) for sample in samples)

    demonstrations = HeldOutDemonstrations(
        prompts=[demonstration(length) for length in LENGTHS],
        generator=Recited(),
        logprobs=logprobs,
        samples_per_call=samples_per_call,
    )
    of = Evaluator(config=EvaluationConfig(), phases=SeparatePhases(), answers=answers, demonstrations=demonstrations)
    return asyncio.run(of.evaluate(3, PolicyVersion(3))), calls


@pytest.mark.parametrize(("samples_per_call", "calls"), [(2, [2, 2, 1]), (5, [5]), (9, [5])])
def test_the_loss_is_the_mean_over_the_imitated_tokens(samples_per_call: int, calls: list[int]) -> None:
    counted = [place for length in LENGTHS for place in range(min(1, length - 1), length)]
    result, seen = evaluate_demonstrations(samples_per_call=samples_per_call)
    assert seen == calls
    assert result.version == 3
    assert result.held_out_loss == pytest.approx(sum(counted) / len(counted))
    assert result.numbers == pytest.approx(
        {"held_out_loss": result.held_out_loss, "perplexity": math.exp(sum(counted) / len(counted))}
    )


def test_the_loss_stands_beside_the_grades_of_answers(tmp_path: Path) -> None:
    answers = evaluator(tmp_path, EvaluationConfig(), greedy=Guesser(1))
    result, _ = evaluate_demonstrations(samples_per_call=2, answers=answers)
    assert list(result.numbers) == ["accuracy", "score", "held_out_loss", "perplexity"]
    assert (result.version, result.accuracy) == (7, 1.0)
