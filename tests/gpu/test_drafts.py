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

    async def measure() -> None:
        async for outcome in measure_drafts("qwen2.5-7b", tmp_path, OPTIONS):
            logger.info("%s", outcome)
            assert not isinstance(outcome, Failure), outcome.reason
            if not isinstance(outcome, Figure):
                facts.update(outcome)

    asyncio.run(measure())
    for name in ("none", "model", "ngram", "eagle"):
        scored = facts[f"drafts, {name}, scored again"]
        assert isinstance(scored, dict)
        assert scored["are the policy's"], (name, scored)
        assert scored["99 % are within"] < TOLERANCE, (name, scored)
