"""A driver names the methods of its ranks without what they are made of."""

from __future__ import annotations

import pytest

from megarl.ranks.calls import ActorCalls, CriticCalls, ModelCalls, PolicyCalls, TrainedCalls
from megarl.ranks.publishing import PublishingActor
from megarl.train.critic import CriticRank, ImplicitRewardRank
from megarl.train.frozen import ReferenceRank, TeacherRank
from megarl.train.rank import ModelRank
from megarl.train.trained import TrainedRank

RANKS: list[tuple[type, type]] = [
    (ModelCalls, ModelRank),
    (TrainedCalls, TrainedRank),
    (ActorCalls, PublishingActor),
    (CriticCalls, CriticRank),
    (CriticCalls, ImplicitRewardRank),
    (PolicyCalls, ReferenceRank),
    (PolicyCalls, TeacherRank),
]


@pytest.mark.parametrize(("calls", "rank"), RANKS, ids=lambda each: each.__name__)
def test_ranks_have_every_method_that_is_called(calls: type, rank: type) -> None:
    methods = {name for base in calls.__mro__ for name in vars(base) if not name.startswith("_")}
    assert methods
    assert methods <= set(dir(rank))
