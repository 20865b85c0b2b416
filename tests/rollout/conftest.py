from __future__ import annotations

import pytest

from tests.rollout.engines import ServedModel


@pytest.fixture(params=["qwen2_tp1", "qwen3_tp2"])
def served(request: pytest.FixtureRequest) -> ServedModel:
    """Each of the shared engines in turn."""
    model: ServedModel = request.getfixturevalue(request.param)
    return model
