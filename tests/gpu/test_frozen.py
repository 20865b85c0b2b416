"""Frozen models on a GPU: SGLang's spawned workers take our model classes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.config.roles import FrozenRoleConfig
from megarl.engine.client import EngineClient
from megarl.engine.process import EngineProcess, EngineSpec
from megarl.rollout.frozen import classify
from megarl.rollout.teacher import token_scores
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from megarl.types import FloatArray
from tests.engine.engines import engine_spec
from tests.tiny_models import as_classifier, classifier_scores

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SHAPE = TinyShape(hidden=512, ffn_hidden=1024, num_heads=8, num_kv_heads=2)
TOKENS = np.arange(10, 74, dtype=np.int32)
SGLANG: dict[str, object] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
}


def asked(spec: EngineSpec, model: Path, ask: Callable[[EngineClient], Awaitable[FloatArray]]) -> FloatArray:
    """Return the answer of an engine that lives for this question."""
    config = FrozenRoleConfig(pool="gpu", model=model, max_cached_tokens=4096, is_deterministic=True, sglang=SGLANG)
    process = EngineProcess(replace(spec, config=config, device="cuda"))

    async def answer() -> FloatArray:
        await process.wait_ready()
        client = EngineClient(process.endpoint, request_timeout_s=300)
        try:
            return await ask(client)
        finally:
            await client.close()

    process.start()
    try:
        return asyncio.run(answer())
    finally:
        process.stop()


def test_a_teacher_scores_the_whole_row_at_its_temperature(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", SHAPE, seed=1)
    spec = replace(engine_spec(tmp_path / "model", tmp_path), has_float32_head=True, role="teacher.large")

    async def ask(client: EngineClient) -> FloatArray:
        return await token_scores(client, TOKENS, first=1, num_top=SHAPE.vocab, num_spare=0, vocab=SHAPE.vocab)

    rows = {}
    for temperature in (1.0, 0.7):
        numbers = asked(replace(spec, temperature=temperature), tmp_path / "model", ask)
        values, ids = np.split(numbers[:, 1:], 2, axis=1)
        rows[temperature] = torch.zeros(values.shape).scatter(1, torch.from_numpy(ids).long(), torch.from_numpy(values))
        chosen = rows[temperature].gather(1, torch.from_numpy(TOKENS[1:]).long()[:, None])
        np.testing.assert_allclose(chosen.numpy(), numbers[:, :1], atol=1e-5)
    expected = (rows[1.0] / 0.7).log_softmax(dim=-1)
    assert (rows[1.0] - expected).abs().max() > 0.1, "a test of equal rows shows nothing"
    assert (rows[0.7] - expected).abs().max() < 1e-4


def test_a_reward_model_has_no_bias_that_its_folder_does_not_have(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", SHAPE, seed=1)
    model = as_classifier(tmp_path / "model", tmp_path / "classifier", "qwen2")
    texts = [TOKENS[:end].tolist() for end in (8, 16, 32, 64)]
    spec = replace(engine_spec(model, tmp_path), is_classifier=True, role="reward_model.tiny")

    async def ask(client: EngineClient) -> FloatArray:
        return np.array([await classify(client, token_ids) for token_ids in texts], np.float32)

    found, expected = asked(spec, model, ask), classifier_scores(model, texts)
    assert np.ptp(expected) > 0.1, "a test of equal scores shows nothing"
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
