from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from megarl.errors import FleetError
from megarl.rollout.greedy import WithGreedyRollout, WithGreedyScore
from megarl.types import Prompt, RolloutGroup, Score, ScoredGroup
from tests.algo.groups import scored_group


class Answers:
    """A generator that answers with rollouts of given lengths, or not at all."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    async def generate(self, prompt: Prompt) -> RolloutGroup:
        await asyncio.sleep(0)
        if not self._lengths:
            raise FleetError("no engine is left")
        answers = scored_group(0, [0] * len(self._lengths), lengths=self._lengths).group.rollouts
        return RolloutGroup(prompt=prompt, rollouts=answers)


class LengthScorer:
    """Scores a rollout by its length."""

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        scores = tuple(Score(value=len(rollout.token_ids), components={}) for rollout in group.rollouts)
        return ScoredGroup(group=group, scores=scores)


PROMPT = scored_group(4, [0]).group.prompt


def test_every_group_has_one_greedy_rollout_and_its_score() -> None:
    async def produce() -> ScoredGroup:
        group = await WithGreedyRollout(Answers([3, 4]), Answers([7])).generate(PROMPT)
        return await WithGreedyScore(LengthScorer()).score(group)

    scored = asyncio.run(produce())
    assert [score.value for score in scored.scores] == [3, 4]
    assert scored.baseline == Score(value=7, components={})
    assert scored.group.prompt is PROMPT
    assert [len(rollout.token_ids) for rollout in scored.group.rollouts] == [3, 4]


@pytest.mark.parametrize(("sampled", "greedy"), [([], [7]), ([3, 4], [])])
def test_a_failure_of_either_is_the_failure_of_the_group(sampled: list[int], greedy: list[int]) -> None:
    with pytest.raises(FleetError, match="no engine is left"):
        asyncio.run(WithGreedyRollout(Answers(sampled), Answers(greedy)).generate(PROMPT))


def test_a_group_without_a_greedy_rollout_is_a_bug() -> None:
    group = replace(scored_group(4, [0]).group, baseline=None)
    with pytest.raises(AssertionError, match=r"train\.parquet:4 has no greedy rollout"):
        asyncio.run(WithGreedyScore(LengthScorer()).score(group))
