"""Engines with drafts on one GPU: publishes go to the policy alone, and tokens come from its distribution."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from bench.drafts import measure_drafts
from bench.figures import Failure, Figure

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

OPTIONS: dict[str, object] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "cuda_graph_backend_prefill": "disabled",
}
TOLERANCE = 0.1
"""Between log-probabilities of one token in two passes in bfloat16."""


def test_drafts_change_how_fast_tokens_come_and_not_which(tmp_path: Path) -> None:
    facts: dict[str, object] = {}
    figures: list[Figure] = []

    async def measure() -> None:
        async for outcome in measure_drafts("qwen2.5-7b", tmp_path, OPTIONS):
            logger.info("%s", outcome)
            assert not isinstance(outcome, Failure), outcome.reason
            if isinstance(outcome, Figure):
                figures.append(outcome)
            else:
                facts.update(outcome)

    asyncio.run(measure())
    for name in ("model", "ngram", "eagle"):
        distribution, scored = facts[f"drafts, {name}, distribution"], facts[f"drafts, {name}, scored again"]
        assert isinstance(distribution, dict)
        assert isinstance(scored, dict)
        assert distribution["is of one distribution"], distribution
        assert scored["99 % are below"] < TOLERANCE, scored
    ratios = {figure.key: figure.ratio for figure in figures}
    assert min(ratios["drafts, model, 32"], ratios["drafts, eagle, 32"]) >= 1.4, ratios
