"""A scorer of whole groups and a generator around the engines' (`megarl.stages`).

Needs `megarl data make arithmetic --out data/arithmetic`.
"""

from collections import Counter
from pathlib import Path

import megarl
from megarl.types import RolloutGroup, Score, ScoredGroup

RECIPES = Path(__file__).parents[1] / "recipes"


class MajorityScorer:
    """Self-consistency: a response scores the share of its group that gives the same answer. Needs no ground truth."""

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        answers = [rollout.text.strip() for rollout in group.rollouts]
        votes = Counter(answers)
        scores = tuple(Score(value=votes[answer] / len(answers), components={}) for answer in answers)
        return ScoredGroup(group=group, scores=scores)


class CountingGenerator:
    """Passes every prompt on; the place for retrieval, tools, or a cache."""

    def __init__(self, inner):
        self._inner = inner
        self.num_prompts = 0

    async def generate(self, prompt):
        self.num_prompts += 1
        return await self._inner.generate(prompt)


if __name__ == "__main__":
    result = megarl.train(
        RECIPES / "quickstart.yaml",
        set={
            "run.name": "own_stages",
            "run.steps": 1,
            "model.path": "data/arithmetic/model",
            "train.prompts_per_step": 4,
            "evaluation": None,
            "data.eval": [],
        },
        scorer=MajorityScorer,
        generator=CountingGenerator,
    )
    print("mean share of the majority:", result.history.reward.values)
