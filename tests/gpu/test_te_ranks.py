"""Layers of Transformer Engine divided over NCCL ranks that share one card give the loss and gradients of one rank.

With `-o log_cli=true -o log_cli_level=INFO` it shows losses and gradient norms of every case.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.kernels import is_deepep_found, is_te_installed
from megarl.config.lora import ATTENTION_MODULES, LoraConfig
from megarl.config.roles import ActorConfig
from megarl.tokens import assemble
from tests.gpu.one_card import Peer, card
from tests.gpu.test_context import Account, run_on, shares_of, take_steps
from tests.tiny_models import write_random_adapter, write_tiny_model

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_te_installed(), reason="Transformer Engine is not installed"),
]

LENGTHS = ((30, 200), (5, 77), (300, 100))
Keys = dict[str, object]
TE: Keys = {"kernels": "te"}
FP8: Keys = {"precision": "fp8"}
PARTS: Keys = {"tensor": 2, "is_sequence_parallel": True}
EXPERTS: Keys = {**PARTS, "expert": 2, "expert_tensor": 1}
WITH_DEEPEP = pytest.mark.skipif(not is_deepep_found(), reason="Megatron finds no DeepEP")


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Peer]]:
    with card(4, connections=8) as found:
        yield found


@pytest.mark.parametrize(
    ("family", "kernels", "split", "is_adapted", "tolerance"),
    [
        ("qwen2", TE, PARTS, False, 0.02),
        ("qwen2", FP8, PARTS, False, 0.1),
        ("qwen2", FP8, {"pipeline": 2}, False, 0.1),
        ("qwen2", FP8, {**PARTS, "context": 2}, False, 0.1),
        ("qwen3_moe", TE, EXPERTS, False, 0.05),
        pytest.param("qwen3_moe", TE, {**EXPERTS, "dispatcher": "deepep"}, False, 0.05, marks=WITH_DEEPEP),
        ("qwen3_moe", FP8, EXPERTS, False, 0.15),
        ("qwen2_moe", TE, EXPERTS, False, 0.05),
        ("qwen2", TE, PARTS, True, 0.02),
        ("qwen2", FP8, {**PARTS, "pipeline": 2}, True, 0.1),
        ("qwen3_moe", FP8, EXPERTS, True, 0.15),
    ],
    ids=[
        *["TP2-SP", "TP2-SP-fp8", "PP2-fp8", "TP2-SP-CP2-fp8", "TP2-EP2", "TP2-EP2-deepep", "TP2-EP2-fp8"],
        "TP2-EP2-shared",
        *["TP2-SP-adapted", "TP2-SP-PP2-fp8-adapted", "TP2-EP2-fp8-adapted"],
    ],
)
def test_ranks_that_share_layers_of_transformer_engine_agree_with_one(
    family: str, kernels: Keys, split: Keys, is_adapted: bool, tolerance: float, peers: list[Peer], tmp_path: Path
) -> None:
    shape = write_tiny_model(tmp_path / "model", family)
    lora = None
    if is_adapted:
        lora = LoraConfig(rank=4, alpha=6, modules=ATTENTION_MODULES, path=tmp_path / "adapter")
        write_random_adapter(tmp_path / "adapter", tmp_path / "model", lora.modules)
    found: list[tuple[Account, np.ndarray]] = []
    for keys in (kernels, {**kernels, **split}):
        actor = ActorConfig.model_validate({"pool": "gpu", **keys})
        answers = run_on(
            peers, actor.model_parallel, take_steps, tmp_path / "model", shape, shares_of(LENGTHS, actor), actor, lora
        )
        accounts = [answer for answer in answers if isinstance(answer, Account)]
        logprobs = assemble([account.numbers for account in accounts if account.numbers is not None])
        logger.info("%s %s: %s", family, keys, replace(accounts[0], numbers=None))
        found.append((accounts[0], np.concatenate(logprobs)))
    (alone, expected), (shared, mine) = found
    differences = np.abs(mine - expected)
    logger.info("logprobs differ by %.4f, at most %.4f", differences.mean(), differences.max())
    np.testing.assert_allclose(shared.losses, alone.losses, rtol=tolerance / 10)
    np.testing.assert_allclose(shared.grad_norms, alone.grad_norms, rtol=tolerance)
    assert differences.mean() < tolerance
