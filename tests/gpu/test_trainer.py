"""A trainer rank on a GPU against the Hugging Face model on the same GPU."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config.algorithm import SftConfig
from megarl.config.roles import ActorConfig, OptimizerConfig
from megarl.data.packing import Packing
from megarl.tokens import Content, assemble
from megarl.train.actor import ActorRank
from megarl.train.rank_spec import RankSpec
from megarl.types import DEMONSTRATION, FinishReason, Rollout, TrainBatch, TrainSample
from tests.filled_shares import pack
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.gpu

LENGTHS = ((3, 40), (17, 5), (60, 90))


def sample_of(random: np.random.Generator, num_prompt: int, num_response: int) -> TrainSample:
    rollout = Rollout(
        content=Content(
            token_ids=random.integers(3, 99, num_response, dtype=np.int32),
            logprobs=np.zeros(num_response, dtype=np.float32),
            text="",
        ),
        versions=np.full(num_response, DEMONSTRATION, dtype=np.int32),
        loss_mask=np.ones(num_response, dtype=np.bool_),
        finish_reason=FinishReason.STOP,
    )
    return TrainSample(
        prompt_ids=random.integers(3, 99, num_prompt, dtype=np.int32),
        rollout=rollout,
        advantages=np.ones(num_response, dtype=np.float32),
    )


def packed_samples() -> TrainBatch:
    random = np.random.default_rng(0)
    return packed([sample_of(random, *lengths) for lengths in LENGTHS])


def packed(samples: list[TrainSample]) -> TrainBatch:
    packing = Packing(
        data_parallel=1, tokens_per_micro_batch=160, samples_per_update=None, pad_multiple=8, micro_batch_multiple=1
    )
    (batch,) = pack(samples, packing, temperature=1.0)
    return batch


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_logprobs_are_those_of_transformers_and_training_raises_them(family: str, tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path / "model", family, tied=family == "qwen2")
    random = np.random.default_rng(0)
    samples = [sample_of(random, *lengths) for lengths in LENGTHS]
    batch = packed(samples)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    spec = RankSpec(
        rank=0,
        world=1,
        master_address="127.0.0.1",
        master_port=port,
        device="cuda",
        split=ActorConfig(pool="gpu"),
        shape=shape,
        seed=1,
        timeout_s=60,
    )
    trainer = ActorRank(
        spec, algorithm=SftConfig(kind="sft"), optimizer=OptimizerConfig(learning_rate=1e-3), total_steps=10
    )
    try:
        trainer.load(tmp_path / "model")
        numbers = trainer.logprobs(batch)
        assert numbers is not None
        found = assemble([numbers])
        # The trainer's own weights, rounded as it holds them; everything else in float32.
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).float().cuda()
        for sample, logprobs in zip(samples, found, strict=True):
            ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.rollout.token_ids.tolist()], device="cuda")
            with torch.no_grad():
                log_probs = model(ids[None]).logits[0].log_softmax(dim=-1)
            expected = log_probs[len(sample.prompt_ids) - 1 : -1].gather(1, ids[len(sample.prompt_ids) :, None])[:, 0]
            np.testing.assert_allclose(logprobs, expected.cpu().numpy(), atol=0.15)
        stats = [trainer.update(batch).stats for _ in range(10)]
        losses = [found.loss for found in stats if found is not None]
        assert losses[-1] < losses[0] - 0.1, losses
    finally:
        trainer.close()
