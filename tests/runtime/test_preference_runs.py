"""The kinds that learn from preferences, each in a whole run with a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.runtime.runs import run

KINDS = {
    "online_dpo": ("roles.reference={}", "algorithm={kind: online_dpo}"),
    "ipo": ("roles.reference={}", "algorithm={kind: online_dpo, preference: ipo, kl: {kind: reward, coef: 1.0}}"),
    "sppo": ("algorithm={kind: sppo}", "train.prompts_per_update=4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_from_preferences(kind: str, tmp_path: Path) -> None:
    make_arithmetic(tmp_path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    done = run(tmp_path, kind, *KINDS[kind])
    assert done.exit_code == 0, done.output
    updates = [event.summary.update for event in done.steps]
    assert len(updates) == 2
    assert all(update is not None and update.grad_norm > 0 and update.mismatch_max < 1e-4 for update in updates)
