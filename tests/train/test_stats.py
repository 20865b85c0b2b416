from __future__ import annotations

from dataclasses import fields

import pytest

from megarl.results import CriticStats, UpdateStats
from megarl.train.critic import CRITIC
from megarl.train.stats import ACTOR, Statistics

OF_EVERY_UPDATE = {"loss", "grad_norm", "learning_rate"}
COUNTS = {"num_loss_tokens", "num_sequences", "num_micro_batches"}
OF_ROUTERS = {"replayed_fraction", "routing_disagreement"}


@pytest.mark.parametrize(
    ("table", "result", "others"),
    [(ACTOR, UpdateStats, OF_EVERY_UPDATE | COUNTS | OF_ROUTERS), (CRITIC, CriticStats, OF_EVERY_UPDATE)],
)
def test_every_field_has_one_formula(
    table: Statistics[object, object], result: type[UpdateStats | CriticStats], others: set[str]
) -> None:
    formulas = [name for name in [*table.means, *table.maxima, *table.formulas] if not name.startswith("_")]
    assert sorted([*formulas, *others]) == sorted(field.name for field in fields(result))
