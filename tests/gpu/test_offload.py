"""Release and reload on a GPU: no value is lost, no memory leaks, and others can use what was released."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, TypeAlias

import pytest
import torch

from megarl.config.algorithm import SftConfig
from megarl.config.roles import ActorConfig, OptimizerConfig
from megarl.families import PUBLIC_MODELS
from megarl.families.shape import ModelShape
from megarl.train.actor import ActorRank
from megarl.train.offload import Offload
from megarl.train.rank_spec import RankSpec
from megarl.train.topology import free_cache
from megarl.weights.algebra.plan import Plan, plan
from megarl.weights.algebra.slices import Link, on_gpus
from megarl.weights.executors.digest import check_digests
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.meeting import StoreAddress, StoreServer
from megarl.weights.executors.tensors import torch_dtype
from megarl.weights.executors.transfer import Receiver, Sender
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.gpu.test_trainer import packed_samples
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.gpu

NUM_PHASES = 50
SLACK_BYTES = 96 << 20
"""Allowance for rounding by allocators; less than the size of any model here."""
SHAPE = PUBLIC_MODELS["qwen2.5-0.5b"]
TIMEOUT_S = 60.0
Offloaded: TypeAlias = Literal["nothing", "optimizer", "everything"]


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@contextmanager
def one_rank(folder: Path, shape: ModelShape, *, offload: Offloaded) -> Iterator[ActorRank]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    spec = RankSpec(
        rank=0,
        world=1,
        master_address="127.0.0.1",
        master_port=port,
        device="cuda",
        split=ActorConfig(pool="gpu", offload=offload),
        shape=shape,
        seed=1,
        timeout_s=60,
    )
    trainer = ActorRank(spec, algorithm=SftConfig(kind="sft"), optimizer=OptimizerConfig(), total_steps=100)
    try:
        trainer.load(folder)
        yield trainer
    finally:
        trainer.close()


@pytest.mark.parametrize("offload", ["optimizer", "everything"])
def test_fifty_phases_change_no_bit_and_leak_nothing(offload: Offloaded, tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path / "model", "qwen2", tied=True)
    batch = packed_samples()
    with one_rank(tmp_path / "model", shape, offload=offload) as trainer:
        trainer.update(batch)
        before = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
        moments = {name: shard.moment("exp_avg").clone() for name, shard in trainer._optimizer.shards().items()}
        used = []
        for _ in range(NUM_PHASES):
            trainer.release()
            used.append(used_bytes())
            trainer.reload()
            trainer.logprobs(batch)
        assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.tensors().items())
        states = trainer._optimizer.shards()
        assert all(torch.equal(states[name].moment("exp_avg"), moment) for name, moment in moments.items())
        assert used[-1] - used[2] < SLACK_BYTES
        trainer.update(batch)


def test_an_optimizer_in_host_memory_updates_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = write_tiny_model(tmp_path / "model", "qwen2", tied=True)
    monkeypatch.setattr("megarl.train.offload.PIECE_ELEMENTS", 10_000)
    found: list[dict[str, torch.Tensor]] = []
    offloads: tuple[Offloaded, ...] = ("nothing", "optimizer")
    for offload in offloads:
        with one_rank(tmp_path / "model", shape, offload=offload) as trainer:
            optimizer = trainer._optimizer
            generator = torch.Generator("cuda").manual_seed(1)
            for _ in range(4):
                optimizer.zero_grad()
                for parameter in optimizer.parameters().values():
                    parameter.main_grad.normal_(generator=generator)  # type: ignore[attr-defined]  # Megatron's
                optimizer.step(1e-3)
                optimizer.trim()
            states = {name: shard.moment("exp_avg_sq").cpu() for name, shard in optimizer.shards().items()}
            masters = {f"{name} master": shard.master.cpu() for name, shard in optimizer.shards().items()}
            weights = {f"{name} weight": tensor.cpu() for name, tensor in trainer.tensors().items()}
            found.append({**states, **masters, **weights})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_memory_that_is_given_back_is_free_for_others() -> None:
    device = torch.device("cuda", 0)
    buffer = torch.randn(1 << 28, device=device)
    before, total = used_bytes(), buffer.double().sum()
    offload = Offload(device)
    for _ in range(3):
        offload.release([buffer])
        free_cache(device)
        assert before - used_bytes() > (1 << 30) - SLACK_BYTES
        offload.reload()
        assert buffer.double().sum() == total


def test_what_torch_keeps_for_later_is_free_for_others() -> None:
    block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    before = used_bytes()
    del block
    assert before - used_bytes() < SLACK_BYTES
    free_cache(torch.device("cuda", 0))
    assert before - used_bytes() > (1 << 30) - SLACK_BYTES


def make_plan() -> Plan:
    source = megatron_layout(SHAPE, MegatronParallel(), dtype="bfloat16")
    return plan(source, sglang_layout(SHAPE, tensor=1, dtype="bfloat16"), locations=on_gpus([(0, 0)], [(0, 0)]))


def receive(address: StoreAddress, versions: range, pipe: Connection) -> None:
    """The engine's side: receive every version and return the parameters after it."""
    moves = make_plan()
    tensors = {
        name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device="cuda")
        for name, spec in moves.target.by_rank[0].tensors.items()
    }
    group = TransferGroup.join(address, name="publish", peer=1, num_peers=2, timeout_s=TIMEOUT_S)
    receiver = Receiver(moves, 0, tensors, group, direct=Link.DEVICE, keeps_open=False)
    for version in versions:
        pipe.send(receiver.receive(version))
        torch.cuda.synchronize()
        pipe.send(float(tensors["model.norm.weight"].double().sum()))
    pipe.recv()
    group.close()


def test_weights_that_leave_after_each_publish_are_free_though_another_process_had_them_open() -> None:
    moves = make_plan()
    specs = moves.source.by_rank[0].tensors
    buffer = torch.empty(sum(spec.num_bytes // 2 for spec in specs.values()), dtype=torch.bfloat16, device="cuda")
    weights, start = {}, 0
    for name, spec in specs.items():
        weights[name] = buffer[start : start + spec.num_bytes // 2].view(spec.shape)
        start += spec.num_bytes // 2
    server = StoreServer()
    versions = range(1, 13)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=receive, args=(server.address, versions, there), daemon=True)
    process.start()
    try:
        group = TransferGroup.join(server.address, name="publish", peer=0, num_peers=2, timeout_s=TIMEOUT_S)
        sender = Sender(moves, 0, weights, group, direct=Link.DEVICE, keeps_open=False)
        offload = Offload(torch.device("cuda", 0))
        away = []
        for version in versions:
            buffer.normal_(0.0, 0.02)
            sent = sender.send(version)
            assert here.poll(TIMEOUT_S)
            check_digests([sent], {0: here.recv()})
            assert here.poll(TIMEOUT_S)
            norm = next(name for name in weights if "final_layernorm" in name)
            assert here.recv() == float(weights[norm].double().sum())
            here_used = used_bytes()
            offload.release([buffer])
            free_cache(buffer.device)
            away.append(used_bytes())
            assert here_used - away[-1] > buffer.nbytes - SLACK_BYTES, "the other process still has it open"
            offload.reload()
        assert away[-1] - away[2] < SLACK_BYTES
        here.send(None)
        process.join(TIMEOUT_S)
        group.close()
    finally:
        process.kill()
        process.join()
