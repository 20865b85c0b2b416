"""Twenty steps of each family that is not one of Llama's, Qwen2 or Qwen3, on one card that trainer and engine share."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future

import pytest

from tests.gpu.family_runs import MODELS, FamilyRun, train_all

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

NUM_STEPS = 20
MOST_KL = 0.015
MIXTURES = ("glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "qwen3_5_moe_text")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Future[FamilyRun]]:
    folder = tmp_path_factory.mktemp("families")
    return train_all(MODELS, folder, steps=NUM_STEPS, device="cuda", say=lambda outcome: logger.info("%s", outcome))


@pytest.mark.parametrize("family", MODELS)
def test_twenty_steps_in_bfloat16_with_an_engine_that_agrees(
    family: str, runs: Mapping[str, Future[FamilyRun]]
) -> None:
    """The canary compares engine and trainer after every publish."""
    run = runs[family].result()
    assert run.error is None
    assert run.warnings == ()
    assert len(run.updates) == NUM_STEPS
    assert run.mismatch_kl < MOST_KL
    assert all(update.grad_norm > 0 for update in run.updates)
    replayed = {update.replayed_fraction for update in run.updates}
    assert replayed == ({1.0} if family in MIXTURES else {None}), replayed
