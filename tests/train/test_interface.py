"""A driver names the methods of its ranks without what they are made of."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megarl.ranks.publishing import PublishingActor, PublishingCalls
from megarl.train.critic import CriticRank, ImplicitRewardRank
from megarl.train.interface import (
    ActorCalls,
    CriticCalls,
    ImplicitRewardCalls,
    ModelCalls,
    ReferenceCalls,
    TeacherCalls,
    TrainedCalls,
)
from megarl.train.rank import ModelRank, ReferenceRank, TeacherRank
from megarl.train.trained import TrainedRank

MADE_OF: dict[type, type] = {
    ModelCalls: ModelRank,
    TrainedCalls: TrainedRank,
    ActorCalls: PublishingActor,
    PublishingCalls: PublishingActor,
    CriticCalls: CriticRank,
    ImplicitRewardCalls: ImplicitRewardRank,
    ReferenceCalls: ReferenceRank,
    TeacherCalls: TeacherRank,
}


def test_a_driver_does_not_load_megatron() -> None:
    """Ranks do. It was six of the ten seconds that a driver took to load, which a killed command waits for."""
    code = "import sys, megarl.run.run; sys.exit('megatron' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("calls", MADE_OF, ids=lambda calls: calls.__name__)
def test_ranks_have_every_method_that_is_asked_of_them(calls: type) -> None:
    asked = {name for base in calls.__mro__ for name in vars(base) if not name.startswith("_")}
    assert asked
    assert asked <= set(dir(MADE_OF[calls]))
