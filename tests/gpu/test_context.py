"""Context-parallel ranks that share one card give the loss and the gradients of one rank with whole sequences.

The plan is compared with the memory they take, and with that of experts. The exchanges of Transformer Engine are tried
where it is installed. With `-o log_cli=true -o log_cli_level=INFO` it shows losses, gradient norms and memory of every
case.
"""

from __future__ import annotations

import gc
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.algorithm import SftConfig
from megarl.config.kernels import is_te_installed
from megarl.config.lora import LoraConfig
from megarl.config.roles import ActorConfig, OptimizerConfig
from megarl.data.context_parts import zigzag
from megarl.data.packing import Packing
from megarl.families import PUBLIC_MODELS
from megarl.families.shape import ModelShape
from megarl.planner.activations import ModelWork, activation_bytes, head_bytes
from megarl.tokens import SampleColumn, assemble
from megarl.train.actor import ActorRank
from megarl.train.attention import PackedAttention, packed_sequences
from megarl.train.rank_spec import RankSpec
from megarl.train.topology import initialize, shut_down
from megarl.types import FloatArray, TrainBatch
from tests.filled_shares import pack
from tests.gpu.one_card import Peer, card
from tests.gpu.test_trainer import sample_of
from tests.tiny_models import write_tiny_model

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.gpu
WITH_TE = pytest.mark.skipif(not is_te_installed(), reason="Transformer Engine is not installed")

TIMEOUT_S = 120.0
PATIENCE_S = 240.0
LEARNING_RATE = 1e-4
CASES = {
    "16k": ((14_000, 2_300), (900, 55), (3, 20)),
    "64k": ((60_000, 5_000), (301, 99)),
}
"""Tokens of prompt and response of each sequence of a pack."""
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
ATTENTION_LENGTHS = (4096, 64, 1600, 800, 16)


@dataclass(frozen=True, kw_only=True)
class Account:
    """The numbers of one rank."""

    numbers: SampleColumn | None
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    peak_bytes: int
    passing_bytes: int
    """Peak of the second step beyond what was allocated before it."""


def take_steps(
    rank: int,
    world: int,
    port: int,
    folder: Path | None,
    shape: ModelShape,
    batch: TrainBatch,
    actor: ActorConfig,
    lora: LoraConfig | None = None,
) -> Account:
    """Score the batch and train on it twice."""
    gc.collect()  # a trainer that this process had before: usage is that of the fullest rank
    torch.cuda.empty_cache()
    spec = RankSpec(
        rank=rank,
        world=world,
        master_address="127.0.0.1",
        master_port=port,
        device="cuda",
        split=actor,
        shape=shape,
        seed=1,
        timeout_s=TIMEOUT_S,
        lora=lora,
    )
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE)
    trainer = ActorRank(spec, algorithm=SftConfig(kind="sft"), optimizer=optimizer, total_steps=2)
    try:
        if folder is not None:
            trainer.load(folder)
        torch.cuda.reset_peak_memory_stats()
        numbers = trainer.logprobs(batch)
        first = trainer.update(batch)
        held = torch.cuda.memory_allocated()
        second = trainer.update(batch)
        stats = [result.stats for result in (first, second) if result.stats is not None]
        peaks = [result.usage["actor"].gpu_allocated_bytes or 0 for result in (first, second)]
        return Account(
            numbers=numbers,
            losses=tuple(each.loss for each in stats),
            grad_norms=tuple(each.grad_norm for each in stats),
            peak_bytes=peaks[0],
            passing_bytes=peaks[1] - held,
        )
    finally:
        trainer.close()


def attend(rank: int, world: int, port: int, exchange: str | None) -> list[FloatArray]:
    """Return this rank's positions, outputs and gradients of attention over sequences that all ranks share."""
    topology = initialize(
        ActorConfig(pool="gpu", context=world),
        rank=rank,
        world=world,
        master_address="127.0.0.1",
        master_port=port,
        device="cuda",
        seed=1,
        timeout_s=TIMEOUT_S,
    )
    try:
        starts = np.cumsum([0, *ATTENTION_LENGTHS]).astype(np.int32)
        mine = zigzag(starts, world)[rank] if world > 1 else np.arange(starts[-1])
        generator = torch.Generator("cuda").manual_seed(3)
        whole = [
            torch.randn(int(starts[-1]), heads, HEAD_DIM, generator=generator, device="cuda").bfloat16()
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        ]
        query, key, value, grad = (tensor[torch.from_numpy(mine).cuda()] for tensor in whole)
        inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HEADS * HEAD_DIM,
            num_attention_heads=HEADS,
            num_query_groups=KV_HEADS,
            kv_channels=HEAD_DIM,
            context_parallel_size=world,
            attention_dropout=0.0,
            bf16=True,
        )
        attention = PackedAttention(
            config=config,
            layer_number=1,
            attn_mask_type=None,
            attention_type="self",
            cp_comm_type=exchange,
            softmax_scale=None,
            pg_collection=None,
        )
        sequences = packed_sequences(starts, topology)
        output = attention(*inputs, None, attn_mask_type=None, attention_bias=None, packed_seq_params=sequences)
        output.backward(grad)
        gradients = [tensor.grad for tensor in inputs]
        return [mine, *(tensor.detach().float().cpu().numpy() for tensor in (output, *gradients) if tensor is not None)]
    finally:
        shut_down()


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Peer]]:
    with card(4, connections=8) as found:
        yield found


def run_on(peers: list[Peer], world: int, function: object, *arguments: object) -> list[object]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for rank, peer in enumerate(peers[:world]):
        peer.begin(function, rank, world, port, *arguments)  # type: ignore[arg-type]
    answers = [peer.result(PATIENCE_S) for peer in peers[:world]]
    for rank, answer in enumerate(answers):
        assert answer is not None, f"rank {rank} of {world} did not answer"
        assert not isinstance(answer, str), f"rank {rank} of {world}: {answer}"
    return answers


@pytest.mark.parametrize(
    ("context", "exchange"),
    [
        (2, None),
        (4, None),
        pytest.param(2, "p2p", marks=WITH_TE),
        pytest.param(4, "p2p", marks=WITH_TE),
        pytest.param(2, "a2a", marks=WITH_TE),
    ],
)
def test_attention_over_shared_sequences_equals_attention_over_whole_ones(
    peers: list[Peer], context: int, exchange: str | None
) -> None:
    (alone,) = run_on(peers, 1, attend, None)
    parts = run_on(peers, context, attend, exchange)
    for place, name in enumerate(("output", "grad query", "grad key", "grad value"), 1):
        expected = alone[place]  # type: ignore[index]
        found = np.empty_like(expected)
        for part in parts:
            found[part[0]] = part[place]  # type: ignore[index]
        error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        logger.info("attention context=%d %s: %s differs by %.2e", context, exchange, name, error)
        assert error < 1e-2, f"{name} differs by {error:.2e}"


def shares_of(lengths: tuple[tuple[int, int], ...], actor: ActorConfig) -> TrainBatch:
    random = np.random.default_rng(0)
    samples = [sample_of(random, *each) for each in lengths]
    packing = Packing(
        data_parallel=1,
        tokens_per_micro_batch=1 << 17,
        samples_per_update=None,
        pad_multiple=actor.pack_multiple,
        sequence_multiple=actor.sequence_multiple,
        micro_batch_multiple=1,
    )
    (batch,) = pack(samples, packing, temperature=1.0)
    return batch


@pytest.mark.parametrize("case", CASES)
def test_a_long_context_has_the_same_loss_whole_and_shared(peers: list[Peer], case: str, tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path / "model", "qwen2", tied=False, heads=4, kv_heads=2)
    shape = replace(shape, max_context_tokens=1 << 17)
    expected: tuple[Account, tuple[FloatArray, ...]] | None = None
    exchanged = (
        ActorConfig(pool="gpu", context=2, context_exchange="ring"),
        ActorConfig(pool="gpu", context=4, context_exchange="ring"),
        ActorConfig(pool="gpu", context=2, context_exchange="all_to_all"),
        ActorConfig(pool="gpu", context=2, tensor=2, is_sequence_parallel=True, context_exchange="ring"),
    )
    for actor in (
        ActorConfig(pool="gpu"),
        ActorConfig(pool="gpu", context=2),
        ActorConfig(pool="gpu", context=4),
        ActorConfig(pool="gpu", context=2, tensor=2, is_sequence_parallel=True),
        *(exchanged if is_te_installed() else ()),
    ):
        batch = shares_of(CASES[case], actor)
        answers = run_on(peers, actor.model_parallel, take_steps, tmp_path / "model", shape, batch, actor)
        accounts = [answer for answer in answers if isinstance(answer, Account)]
        logprobs = assemble([account.numbers for account in accounts if account.numbers is not None])
        first = accounts[0]
        split = f"context={actor.context} tensor={actor.tensor} {actor.context_exchange}"
        logger.info("%s %s: %s", case, split, replace(first, numbers=None))
        if expected is None:
            expected = first, logprobs
            continue
        alone, whole = expected
        np.testing.assert_allclose(first.losses, alone.losses, rtol=2e-4)
        np.testing.assert_allclose(first.grad_norms, alone.grad_norms, rtol=2e-2)
        for found, right in zip(logprobs, whole, strict=True):
            assert np.abs(found - right).mean() < 5e-3
            np.testing.assert_allclose(found, right, atol=0.1)


def test_the_plan_knows_the_memory_of_shared_sequences(peers: list[Peer]) -> None:
    shape = replace(PUBLIC_MODELS["qwen2.5-7b"], num_layers=4, vocab=32_000, max_context_tokens=1 << 17)
    recomputed: dict[str, object] = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    splits: list[dict[str, object]] = [{}, {"context": 2}, {"context": 4}, {"context": 4, "megatron": recomputed}]
    if is_te_installed():
        splits += [{"context": 2, "context_exchange": "ring"}, {"context": 4, "context_exchange": "ring"}]
        splits += [{"context": 2, "context_exchange": "all_to_all"}]
    ratios = {}
    for keys in splits:
        actor = ActorConfig.model_validate({"pool": "gpu", **keys})
        batch = shares_of(((30_000, 1_500), (700, 500)), actor)
        answers = run_on(peers, actor.model_parallel, take_steps, None, shape, batch, actor)
        measured = max(answer.passing_bytes for answer in answers if isinstance(answer, Account))
        num_tokens = len(batch.mini_batches[0].micro_batches[0].token_ids)
        work = ModelWork.of(shape, actor, tokens_per_micro_batch=num_tokens, device="cuda")
        planned = activation_bytes(work, 0) + head_bytes(work, 0)
        ratios[str(keys)] = planned / measured
        logger.info("%s: %.2f GB, planned %.2f", keys, measured / 1e9, planned / 1e9)
    assert all(abs(ratio - 1) < 0.15 for ratio in ratios.values()), ratios


def test_the_plan_knows_the_memory_of_experts(peers: list[Peer]) -> None:
    shape = replace(PUBLIC_MODELS["qwen3-30b-a3b"], num_layers=4, vocab=32_000)
    splits: list[dict[str, object]] = [{"kernels": "local"}]
    if is_te_installed():
        splits += [{"kernels": "te"}, {"kernels": "te", "precision": "fp8"}]
    ratios = {}
    for keys in splits:
        actor = ActorConfig.model_validate({"pool": "gpu", **keys})
        batch = shares_of(((6_000, 3_000), (4_000, 2_500), (700, 500)), actor)
        (answer,) = run_on(peers, 1, take_steps, None, shape, batch, actor)
        assert isinstance(answer, Account)
        num_tokens = len(batch.mini_batches[0].micro_batches[0].token_ids)
        work = ModelWork.of(shape, actor, tokens_per_micro_batch=num_tokens, device="cuda")
        planned = activation_bytes(work, 0) + head_bytes(work, 0)
        ratios[str(keys)] = planned / answer.passing_bytes
        logger.info("%s: %.2f GB, planned %.2f", keys, answer.passing_bytes / 1e9, planned / 1e9)
    assert all(abs(ratio - 1) < 0.15 for ratio in ratios.values()), ratios
