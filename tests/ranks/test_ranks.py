"""Shares of a step on real Ray actors: each reaches its ranks alone, and columns stay where they were computed."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import ray
import torch

from megarl.algo.advantage import Outcomes
from megarl.algo.estimators import choose_estimator
from megarl.algo.token_credit import CreditTask
from megarl.cluster.local_ray import private_ray
from megarl.cluster.worker_group import WorkerDiedError
from megarl.config.algorithm import GaeConfig
from megarl.config.load import load_recipe
from megarl.config.recipe import StragglerConfig
from megarl.config.roles import ModelParallelConfig
from megarl.data.packing import Packing
from megarl.data.shares import make_shares, unpack
from megarl.env import trainer_environment
from megarl.errors import MachineError, WorkerError
from megarl.families import PUBLIC_MODELS
from megarl.observe.events import Record, Straggled
from megarl.observe.observer import Observer
from megarl.ranks.calls import ModelCalls
from megarl.ranks.ranks import RankGroup, RankHost
from megarl.serving.stragglers import watched_ranks
from megarl.system.run_lock import run_lock
from megarl.tokens import SampleColumn
from megarl.tools.quickstart.arithmetic import make_arithmetic
from megarl.train.rank_spec import RankSpec
from megarl.types import ONE_POLICY, TrainBatch, TrainSample
from tests.cluster.worker_setup import quick_ray
from tests.run.runs import write_recipe
from tests.system.test_run_lock import ELSEWHERE, write
from tests.train.samples import make_samples

with private_ray():
    # Ray reads its environment when it is imported, here as in a run.
    import ray

    from megarl.cluster.cluster import open_cluster
    from megarl.ranks.forward_passes import assign_credit
    from megarl.ranks.rank_process import ALWAYS
    from megarl.ranks.ranks import BESIDE_TRAINING, RankGroup, RankHost
    from megarl.ranks.remote_columns import RemoteColumn, RemotePart
    from megarl.ranks.start import rank_log_name
    from megarl.train.rank import ModelRank
    from megarl.train.rank_spec import RankSpec

if TYPE_CHECKING:
    from megarl.train.topology import Topology

SPLIT = ModelParallelConfig(tensor=2)
WORLD = 4
PACKING = Packing(
    data_parallel=2, tokens_per_micro_batch=40, samples_per_update=None, pad_multiple=1, micro_batch_multiple=1
)


class EchoRank(ModelRank):
    """A rank without a model, which answers with the engine's log-probabilities."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec

    def echo(self, batch: TrainBatch) -> SampleColumn | None:
        if self._spec.rank % SPLIT.tensor:
            return None
        columns = [[item.rollout_logprobs for item in each.micro_batches] for each in batch.mini_batches]
        return unpack(batch, columns)

    def differences(self, batch: TrainBatch) -> tuple[int, float]:
        """Return how many samples the rank got, and how far `values` are from the engine's log-probabilities."""
        items = [item for each in batch.mini_batches for item in each.micro_batches]
        worst = [float(np.abs(item.values - item.rollout_logprobs).max()) for item in items if item.values is not None]
        return sum(int((item.sample_ids >= 0).sum()) for item in items), max(worst)


def build(spec: RankSpec) -> EchoRank:
    return EchoRank(spec)


def spec(world: int) -> RankSpec:
    shape: object = None
    return RankSpec(
        rank=0,
        world=world,
        master_address="",
        master_port=0,
        device="cpu",
        split=SPLIT,
        shape=shape,  # type: ignore[arg-type]  # there is no model
        seed=0,
        timeout_s=300,
    )


@pytest.fixture(scope="module")
def folder(real_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    tmp_path = tmp_path_factory.mktemp("ranks")
    make_arithmetic(tmp_path / "arithmetic", num_train=8, num_sft=8, num_eval=8)
    recipe = load_recipe(write_recipe(tmp_path, "ranks"))
    Path(recipe.run_folder).mkdir(parents=True)
    with private_ray(), quick_ray(), open_cluster(recipe.run, recipe.pools, address=None):
        yield tmp_path


def start_hosts(count: int, logs: Sequence[Path] = ()) -> list[ray.actor.ActorHandle]:
    """Start ranks without a device, as `ranks.start` does, with these logs."""
    remote = ray.remote(num_cpus=0, concurrency_groups={BESIDE_TRAINING: 1, ALWAYS: 2})(RankHost)
    environment = {"env_vars": trainer_environment("cpu")}
    return [remote.options(runtime_env=environment).remote(None, log) for log, _ in zip_longest(logs, range(count))]


async def test_ranks_get_their_share_and_columns_stay_with_those_that_computed_them(folder: Path) -> None:
    samples = make_samples(9, vocab=50)
    workers = start_hosts(WORLD)
    group: RankGroup[EchoRank] = RankGroup(
        "actor", workers, split=SPLIT, timeout_s=300, run_folder=folder, device_lock=asyncio.Lock()
    )
    await group.start(build, spec(WORLD))
    column = await group.compute_column(EchoRank.echo, make_shares(samples, PACKING, temperature=1.0))
    # One rank of each of the two replicas answers.
    assert len(column.parts) == PACKING.data_parallel
    assert sorted(i for part in column.parts for i in part.sample_ids) == list(range(len(samples)))
    for array, sample in zip(await column.fetch(), samples, strict=True):
        np.testing.assert_array_equal(array, sample.rollout.logprobs)
    # Other micro-batches: the numbers of a rank come from both replicas.
    narrow = Packing(
        data_parallel=2, tokens_per_micro_batch=20, samples_per_update=4, pad_multiple=1, micro_batch_multiple=1
    )
    shares = make_shares(samples, narrow, temperature=1.0)
    results: list[tuple[int, float]] = await group._compute_shares("differences", shares, {"values": column})
    counts = [count for count, _ in results]
    assert counts[0] == counts[1]
    assert counts[2] == counts[3]
    assert counts[0] + counts[2] == len(samples)
    assert [worst for _, worst in results] == [0.0] * WORLD
    await compare_credit(group, column, samples)
    await group.end()


async def compare_credit(group: RankGroup[EchoRank], values: RemoteColumn, samples: Sequence[TrainSample]) -> None:
    """The ranks assign credit from the values on their nodes, as `estimate` does with all of them."""
    rewards, masks = np.arange(len(samples)) / 4, tuple(sample.rollout.loss_mask for sample in samples)
    outcomes = Outcomes(rewards=rewards, groups=np.arange(len(samples)), loss_masks=masks)
    config = GaeConfig(kind="gae", lam=0.9)
    unscored = 3
    scored = [i for i in range(len(samples)) if i != unscored]
    task = CreditTask.of(config, outcomes, range(len(samples)), kl=None, kl_coef=0.0).among(scored)
    sums, columns = await assign_credit(group, task, values, {"values": values})
    of_scored = replace(
        outcomes,
        rewards=rewards[scored],
        groups=np.arange(len(scored)),
        loss_masks=tuple(masks[i] for i in scored),
        values=tuple(samples[i].rollout.logprobs for i in scored),
    )
    expected = choose_estimator(config)(of_scored)
    advantages, returns = await columns["advantages"].fetch(), await columns["returns"].fetch()
    assert expected.returns is not None
    for place, i in enumerate(scored):
        np.testing.assert_array_equal(advantages[i], expected.advantages[place])
        np.testing.assert_array_equal(returns[i], expected.returns[place])
    assert not advantages[unscored].any()
    assert len(advantages[unscored]) == samples[unscored].rollout.num_tokens
    assert sums.counts.tolist() == [masks[i].sum() for i in scored]
    some = await columns["advantages"].select([5, 0])
    assert set(some) == {0, 5}
    np.testing.assert_array_equal(some[5], advantages[5])


async def _lose() -> SampleColumn:
    raise ray.exceptions.RayError("the owner of the object died")


async def _hang() -> SampleColumn:
    await asyncio.sleep(600)
    raise AssertionError


@pytest.mark.parametrize(("reference", "reason"), [(_lose, "lost with the rank: the owner"), (_hang, "within 0.1 s")])
def test_numbers_that_cannot_be_fetched_are_a_lost_rank(
    reference: Callable[[], Awaitable[SampleColumn]], reason: str
) -> None:
    """The run then starts new ranks."""

    async def fetch() -> None:
        part = RemotePart(sample_ids=frozenset({0}), reference=reference())
        await RemoteColumn(role="actor", parts=(part,), timeout_s=0.1).fetch()

    with pytest.raises(WorkerError, match=f"numbers of actor ranks .*{reason}"):
        asyncio.run(fetch())


class ShoutingRank(EchoRank):
    """A rank whose library prints a warning before its method fails."""

    def fail(self) -> None:
        ctypes.CDLL(None).puts(f"rank {self._spec.rank} NCCL WARN no device".encode())
        ctypes.CDLL(None).fflush(None)
        raise RuntimeError("a CUDA error")


def shouting(spec: RankSpec) -> ShoutingRank:
    return ShoutingRank(spec)


async def test_every_rank_leaves_a_log_with_its_node_its_librarys_warnings_and_its_error(folder: Path) -> None:
    logs = [folder / "ranks" / rank_log_name("actor", rank) for rank in range(2)]
    group: RankGroup[ShoutingRank] = RankGroup(
        "actor", start_hosts(2, logs), split=SPLIT, timeout_s=300, run_folder=folder, device_lock=asyncio.Lock()
    )
    await group.start(shouting, spec(2))
    with pytest.raises(WorkerError, match="a CUDA error"):
        await group.call_to_end(ShoutingRank.fail)
    await group.end()
    assert [log.name for log in logs] == ["rank_0.log", "rank_1.log"]
    for rank, log in enumerate(logs):
        text = log.read_text()
        assert f'"host": "{socket.gethostname()}"' in text
        assert '"NCCL_DEBUG": "WARN"' in text
        assert '"NCCL_CUMEM_ENABLE": "0"' in text
        assert f"rank {rank} NCCL WARN no device" in text
        assert "fail failed\n  Traceback" in text
        assert "RuntimeError: a CUDA error" in text


class BareRank(ModelRank):
    """A rank without a model, which can be measured."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._topology = cast("Topology", SimpleNamespace(device=torch.device("cpu")))
        torch.set_num_threads(1)


def bare(spec: RankSpec) -> BareRank:
    return BareRank(spec)


class Texts:
    """A sink that keeps what is said about slow ranks."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def record(self, record: Record) -> None:
        if isinstance(record.event, Straggled):
            self.texts.append(record.event.text)

    def close(self) -> None: ...


@pytest.mark.fault("a trainer rank that is slow for several windows", "named with its number, its node and its time")
async def test_a_rank_that_gets_a_tenth_of_the_time_is_named(folder: Path) -> None:
    workers = start_hosts(3)
    sink = Texts()

    async def hinder(pid: int) -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.18)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.02)

    group: RankGroup[BareRank] = RankGroup(
        "actor", workers, split=SPLIT, timeout_s=300, run_folder=folder, device_lock=asyncio.Lock()
    )
    await group.start(bare, spec(len(workers)))
    hindering = asyncio.create_task(hinder(group.processes[2].pid))
    config = StragglerConfig(windows=2, window_s=0.5)
    async with watched_ranks(group, config, Observer([sink])), asyncio.timeout(120):
        while not any("actor rank 2 on " in text for text in sink.texts):
            await asyncio.sleep(0.1)
    hindering.cancel()
    await group.end()
    (text,) = [text for text in sink.texts if "actor rank 2 on " in text]
    assert "times the median, for 2 windows of 0.5 s; every step waits for it" in text


async def _end() -> int:
    return 1


async def _die() -> int:
    raise ray.exceptions.RayActorError


def test_a_call_to_some_ranks_names_the_one_that_died() -> None:
    async def call() -> None:
        group: RankGroup[ModelCalls] = RankGroup(
            "critic",
            [],
            split=ModelParallelConfig(),
            timeout_s=60,
            run_folder=Path(),
            device_lock=asyncio.Lock(),
        )
        await group.gather("compute_credit", [_end(), _die()], ranks=[0, 2])

    with pytest.raises(WorkerDiedError, match="critic rank 2: died during compute_credit") as raised:
        asyncio.run(call())
    assert raised.value.ranks == (2,)


class CountingRank:
    def __init__(self) -> None:
        self.num_updates = 0

    def update(self) -> int:
        self.num_updates += 1
        return self.num_updates


@pytest.mark.fault("an update of a driver that another has followed arrives late", "refused; the weights stay")
def test_a_rank_refuses_a_driver_that_another_has_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.ranks.rank_process.this_process", lambda: None)
    monkeypatch.setattr("megarl.ranks.rank_process.own_address", lambda _: "127.0.0.1")
    host, rank = RankHost("127.0.0.0/8"), CountingRank()
    host.start(lambda _spec: rank, spec(1))  # type: ignore[arg-type,return-value]
    assert host.run(1, ONE_POLICY, "update") == 1
    host.follow(2)
    shares: list[object] = [[], {}]
    late: list[Callable[[], object]] = [
        lambda: host.run(1, ONE_POLICY, "update"),
        lambda: host.run_share(1, ONE_POLICY, "update", *shares),  # type: ignore[arg-type]
        lambda: host.adopt(1, lambda _rank: True),
        lambda: host.follow(1),
        lambda: host.leave(1),
        lambda: host.compute_credit(1, *shares, frozenset()),  # type: ignore[arg-type,call-arg]
        lambda: host.normalise_credit(1, np.zeros((0, 0))),
    ]
    for call in late:
        with pytest.raises(MachineError, match="driver 2 has taken over"):
            call()
    assert rank.num_updates == 1
    assert host.adopt(2, lambda _rank: True), "a refused call does not count as one that failed"
    assert host.run(2, ONE_POLICY, "update") == 2


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_driver_that_lost_its_run_ends_no_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """It asks them to leave: those that obey no later driver do."""
    killed: list[object] = []
    asked: list[int] = []

    async def leave(token: int) -> None:
        asked.append(token)

    rank = SimpleNamespace(leave=SimpleNamespace(remote=leave))
    monkeypatch.setattr(ray, "kill", lambda worker, no_restart: killed.append(worker))
    with run_lock(tmp_path / "run", beat_s=3600) as holder:
        group: RankGroup[ModelCalls] = RankGroup(
            "actor",
            [rank],  # type: ignore[list-item]
            split=ModelParallelConfig(),
            timeout_s=60,
            run_folder=tmp_path / "run",
            device_lock=asyncio.Lock(),
        )
        assert group.token == holder.token
        if is_lost:
            write(tmp_path / "run", replace(ELSEWHERE, token=99))
        await group.end()
    assert (killed, asked) == (([], [holder.token]) if is_lost else ([rank], []))


def test_no_other_process_can_take_the_port_of_the_rendezvous_before_rank_0_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megarl.ranks.rank_process.own_address", lambda _: "127.0.0.1")
    built: list[RankSpec] = []
    host = RankHost("127.0.0.0/8")
    address, port = host.find_address()
    with pytest.raises(OSError, match="Address already in use"):
        socket.create_server((address, port))
    spec = RankSpec(
        rank=0,
        world=1,
        master_address=address,
        master_port=port,
        device="cpu",
        split=ModelParallelConfig(),
        shape=PUBLIC_MODELS["qwen2.5-7b"],
        seed=0,
        timeout_s=60,
    )
    host.start(lambda spec: built.append(spec), spec)  # type: ignore[arg-type,return-value,func-returns-value]
    assert built[0].listener is not None
    with socket.socket(fileno=built[0].listener) as listener:
        assert listener.getsockname()[:2] == (address, port)
