"""Which forward passes run, which model learns when, and what is written of a step that could not be trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from megarl.algo.algorithm import PolicyGradient
from megarl.algo.imitation import Sft
from megarl.algo.token_credit import CreditTask
from megarl.config.algorithm import GaeConfig
from megarl.data.packing import Packing
from megarl.data.shares import ModelPacking, Share
from megarl.errors import NumericsError
from megarl.families import PUBLIC_MODELS
from megarl.planner.flops import sequence_cost
from megarl.ranks import forward_passes
from megarl.ranks.calls import ModelCalls
from megarl.ranks.forward_passes import Columns, ForwardPasses
from megarl.ranks.packings import ModelPackings
from megarl.ranks.ranks import RankGroup
from megarl.ranks.remote_columns import RemoteColumn
from megarl.ranks.start import Trainers
from megarl.ranks.trainer import ModelsTrainer, training_work
from megarl.results import CriticResult, CriticStats, DraftStats, RankUsage, TrainingWork, UpdateResult, UpdateStats
from megarl.tokens import ColumnName, RolloutSums
from megarl.types import Estimates, FloatArray, PolicyVersion
from tests.algo.groups import scored_group
from tests.observe.samples import update_stats
from tests.ranks.local_ranks import LocalRanks
from tests.train.samples import make_samples

VALUE_STATS = CriticStats(
    loss=0.1,
    grad_norm=1.0,
    learning_rate=1e-5,
    clip_fraction=0.0,
    value_mean=0.0,
    return_mean=0.5,
    explained_variance=0.0,
)
UPDATE_STATS = update_stats(loss=3.5)
USAGE = RankUsage(resident_bytes=1, host_available_bytes=1, host_total_bytes=2)


PACKING = ModelPacking(
    packing=Packing(
        data_parallel=1, tokens_per_micro_batch=64, samples_per_update=None, pad_multiple=1, micro_batch_multiple=1
    ),
    temperature=1.0,
)
PACKINGS = ModelPackings(actor=PACKING, reference=PACKING, critic=PACKING, drafter=PACKING)


class LocalColumn(RemoteColumn):
    """A column in this process."""

    def __init__(self, *arrays: FloatArray) -> None:
        super().__init__(role="actor", parts=(), timeout_s=60)
        object.__setattr__(self, "arrays", arrays)
        object.__setattr__(self, "num_fetched", 0)

    arrays: tuple[FloatArray, ...]
    num_fetched: int

    async def fetch(self) -> tuple[FloatArray, ...]:
        object.__setattr__(self, "num_fetched", self.num_fetched + 1)
        return self.arrays

    async def select(self, sample_ids: Collection[int]) -> dict[int, FloatArray]:
        return {index: self.arrays[index] for index in sample_ids}


NOTHING = LocalColumn()


class FakeActor:
    def __init__(
        self,
        *,
        num_skipped: int = 0,
        error: NumericsError | None = None,
        reference: LocalColumn = NOTHING,
        stats: UpdateStats | None = None,
    ) -> None:
        self.num_updates = 0
        self._num_skipped = num_skipped
        self._error = error
        self._reference = reference
        self._stats = stats
        self.prompts: list[list[int]] = []
        self.columns: list[Columns] = []

    async def update(self, shares: Iterator[Share], columns: Columns) -> UpdateResult:
        (share,) = shares
        self.prompts.append(share.prompt_ids.tolist())
        self.columns.append(columns)
        if self._error is not None:
            raise self._error
        self.num_updates += 1
        return UpdateResult(
            version=PolicyVersion(self.num_updates),
            stats=self._stats,
            num_skipped_updates=self._num_skipped,
            usage={"actor": USAGE},
        )

    async def reference_logprobs(self, shares: Iterator[Share]) -> RemoteColumn:
        assert len(list(shares)) == 1
        return self._reference


class FakeCritic:
    def __init__(self, values: LocalColumn = NOTHING) -> None:
        self.num_updates = 0
        self.columns: list[Columns] = []
        self._values = values

    async def values(self, shares: Iterator[Share]) -> RemoteColumn:
        assert len(list(shares)) == 1
        return self._values

    async def update(self, shares: Iterator[Share], columns: Columns) -> CriticResult:
        self.columns.append(columns)
        self.num_updates += 1
        return CriticResult(stats=VALUE_STATS)


def trainer(
    folder: Path,
    actor: FakeActor,
    *,
    critic: FakeCritic | None = None,
    warmup_steps: int = 0,
    has_reference: bool = False,
    fetched: Collection[ColumnName] = (),
    algorithm: Sft | PolicyGradient | None = None,
    num_steps: int = 0,
    version: int = 0,
    drafter: FakeActor | None = None,
    draft_every_steps: int | None = None,
) -> ModelsTrainer:
    trainers = Trainers(
        actor=LocalRanks(actor),
        critic=None if critic is None else LocalRanks(critic, role="critic"),
        reference=None,
        drafter=None if drafter is None else LocalRanks(drafter, role="drafter"),
    )
    algorithm = algorithm or Sft()
    passes = ForwardPasses(
        trainers=trainers,
        packings=PACKINGS,
        algorithm=algorithm,
        has_reference=has_reference,
        fetched=frozenset(fetched),
    )
    return ModelsTrainer(
        trainers=trainers,
        packings=PACKINGS,
        passes=passes if critic is not None or has_reference else None,
        algorithm=algorithm,
        epochs=1,
        num_steps=num_steps,
        version=PolicyVersion(version),
        skipped_folder=folder,
        warmup_steps=warmup_steps,
        refresh_every_steps=None,
        draft_every_steps=draft_every_steps,
    )


def test_no_forward_pass_is_run_that_nothing_needs(tmp_path: Path) -> None:
    assert asyncio.run(trainer(tmp_path, FakeActor()).estimate([scored_group(0, [1, 0])])) == Estimates()


def test_a_column_that_the_driver_needs_is_fetched(tmp_path: Path) -> None:
    arrays = (np.zeros(2, np.float32), np.ones(3, np.float32))
    training = trainer(tmp_path, FakeActor(), critic=FakeCritic(LocalColumn(*arrays)), fetched=["values"])
    assert asyncio.run(training.estimate([scored_group(0, [1, 0])])) == Estimates(values=arrays)


async def test_columns_that_only_an_update_needs_do_not_pass_through_the_driver(tmp_path: Path) -> None:
    reference, values = LocalColumn(np.zeros(2, np.float32)), LocalColumn(np.ones(2, np.float32))
    actor, critic = FakeActor(reference=reference), FakeCritic(values)
    training = trainer(tmp_path, actor, critic=critic, has_reference=True, fetched=["values"])

    estimates = await training.estimate([scored_group(0, [1, 0])])
    await training.update(make_samples(2, vocab=9))
    await training.update(make_samples(2, vocab=9))
    assert estimates.reference_logprobs is None
    assert (reference.num_fetched, values.num_fetched) == (0, 1)
    # No forward pass was run for the second step: it gets nothing of the first.
    assert actor.columns == [{"reference_logprobs": reference}, {}]
    assert critic.columns == [{"values": values}, {}]


async def test_credit_that_ranks_assign_goes_to_the_updates_and_not_through_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = scored_group(0, [1, 0])
    lengths = [rollout.num_tokens for rollout in group.group.rollouts]
    values, advantages, returns = (
        LocalColumn(*(np.full(length, number, np.float32) for length in lengths)) for number in (0, 1, 2)
    )
    sums = RolloutSums(counts=np.ones(2), kl=None, advantages=np.ones(2))
    algorithm = PolicyGradient(GaeConfig(kind="gae"), max_response_tokens=10)
    assigned: list[tuple[str, RemoteColumn, Columns]] = []

    async def assign(
        ranks: RankGroup[ModelCalls], task: CreditTask, own: RemoteColumn, columns: Columns
    ) -> tuple[RolloutSums, Columns]:
        assigned.append((ranks.role, own, columns))
        return sums, {"advantages": advantages, "returns": returns}

    monkeypatch.setattr(forward_passes, "assign_credit", assign)
    actor, critic = FakeActor(num_skipped=1), FakeCritic(values)
    training = trainer(tmp_path, actor, critic=critic, algorithm=algorithm)

    estimates = await training.estimate([group])
    await training.update(algorithm.assign([group], estimates))
    assert estimates == Estimates(sums=sums)
    assert assigned == [("critic", values, {"values": values})]
    assert actor.columns == [{"advantages": advantages}]
    assert critic.columns == [{"values": values, "returns": returns}]
    assert (values.num_fetched, advantages.num_fetched) == (0, 0)
    # The rollouts of a skipped update are written with the columns that only ranks had.
    (row, _) = pq.read_table(tmp_path / "step_000001.parquet").to_pylist()
    assert [row[name][0] for name in ("values", "advantages", "returns")] == [0, 1, 2]


@pytest.mark.parametrize(("num_steps", "expected"), [(0, [0, 0, 1]), (2, [3, 4, 5])], ids=["new", "resumed"])
async def test_only_the_critic_learns_while_it_warms_up(tmp_path: Path, num_steps: int, expected: list[int]) -> None:
    actor, critic = FakeActor(), FakeCritic()
    actor.num_updates = 2 if num_steps else 0
    version = actor.num_updates
    training = trainer(tmp_path, actor, critic=critic, warmup_steps=2, num_steps=num_steps, version=version)

    results = [await training.update(make_samples(2, vocab=9)) for _ in range(3)]
    assert [result.version for result in results] == expected
    assert all(result.critic == VALUE_STATS for result in results)
    assert critic.num_updates == 3
    assert actor.num_updates == expected[-1]


@pytest.mark.parametrize(("num_steps", "expected"), [(0, [False, False, True]), (2, [True, False, False])])
async def test_a_draft_learns_after_every_so_many_steps(tmp_path: Path, num_steps: int, expected: list[bool]) -> None:
    drafter = FakeActor(stats=UPDATE_STATS)
    training = trainer(tmp_path, FakeActor(), drafter=drafter, draft_every_steps=3, num_steps=num_steps)

    results = [await training.update(make_samples(2, vocab=9)) for _ in range(3)]
    learned = DraftStats(
        loss=UPDATE_STATS.loss, grad_norm=UPDATE_STATS.grad_norm, learning_rate=UPDATE_STATS.learning_rate
    )
    assert [result.draft for result in results] == [learned if learns else None for learns in expected]
    assert [sorted(result.usage) for result in results] == [["actor", *(["drafter"] * learns)] for learns in expected]
    assert all(result.stats is None for result in results)
    assert drafter.num_updates == 1
    assert [result.version for result in results] == [1, 2, 3]


async def test_a_draft_learns_what_sglang_shows_it_which_is_all_but_the_first_token(tmp_path: Path) -> None:
    actor, drafter = FakeActor(), FakeActor(stats=UPDATE_STATS)
    training = trainer(tmp_path, actor, drafter=drafter, draft_every_steps=1)
    samples = make_samples(1, vocab=9)
    await training.update([*samples, replace(samples[0], returns=None)])  # both have one prompt
    assert actor.prompts == [samples[0].prompt_ids.tolist()]
    assert drafter.prompts == [samples[0].prompt_ids[1:].tolist()]


def test_rollouts_of_skipped_updates_are_kept_for_people(tmp_path: Path) -> None:
    samples = make_samples(3, vocab=9)
    result = asyncio.run(trainer(tmp_path, FakeActor(num_skipped=1)).update(samples))
    (warning,) = result.warnings
    path = tmp_path / "step_000001.parquet"
    assert warning == (
        f"step 1: 1 updates were skipped, their loss or gradient was not finite; the rollouts are in {path}"
    )
    table = pq.read_table(path).to_pylist()
    assert [row["token_ids"] for row in table] == [sample.rollout.token_ids.tolist() for sample in samples]
    assert [row["advantages"] for row in table] == [sample.advantages.tolist() for sample in samples]


def test_a_folder_that_cannot_be_written_costs_the_rollouts_and_not_the_run(tmp_path: Path) -> None:
    blocked = tmp_path / "skipped"
    blocked.write_text("a file where the folder should be")
    result = asyncio.run(trainer(blocked, FakeActor(num_skipped=1)).update(make_samples(3, vocab=9)))
    (warning,) = result.warnings
    path = blocked / "step_000001.parquet"
    assert warning.endswith(f"; the rollouts are lost: {path}: cannot be written: File exists")


def test_rollouts_that_end_a_run_are_kept_too(tmp_path: Path) -> None:
    broken = FakeActor(error=NumericsError("step 8: the loss is nan"))
    with pytest.raises(NumericsError, match=r"the loss is nan; the rollouts are in .*step_000008\.parquet"):
        asyncio.run(trainer(tmp_path, broken, num_steps=7).update(make_samples(3, vocab=9)))
    assert (tmp_path / "step_000008.parquet").exists()


COST = sequence_cost(PUBLIC_MODELS["qwen2.5-7b"])


def work_of(
    lengths: list[int], *, shared: list[int] | None = None, epochs: int = 1, num_ranks: int = 1, gpu: str | None = None
) -> TrainingWork:
    usage = RankUsage(resident_bytes=1, host_available_bytes=1, host_total_bytes=2, gpu_name=gpu)
    return training_work(lengths, usage, cost=COST, epochs=epochs, num_ranks=num_ranks, shared=shared or [])


def test_a_beginning_that_is_computed_once_is_counted_once() -> None:
    apart, together = work_of([300, 200]), work_of([300, 200], shared=[150])
    assert apart.flops - together.flops == pytest.approx(work_of([150]).flops)
    assert (apart.num_tokens, apart.num_shared_tokens) == (500, 0)
    assert (together.num_tokens, together.num_shared_tokens) == (500, 150)


def test_a_token_costs_six_per_weight_and_a_long_sequence_more() -> None:
    short = work_of([10]).flops / 10
    long = work_of([8192]).flops / 8192
    # 7.07e9 weights are multiplied with: the embedding is only looked up.
    assert short == pytest.approx(6 * 7.07e9, rel=0.01)
    assert long - short == pytest.approx(3 * 2 * 28 * 28 * 128 * (8192 - 10))


def test_all_sequences_count_in_every_epoch() -> None:
    one = work_of([10])
    two = work_of([10, 10], epochs=3, num_ranks=2, gpu="NVIDIA H100 80GB HBM3")
    assert two.flops == 2 * 3 * one.flops
    assert (one.peak_flops_per_second, two.peak_flops_per_second) == (None, 2 * 989e12)


def test_the_peak_of_a_gpu_that_is_not_known_is_not_guessed() -> None:
    assert work_of([10], gpu="NVIDIA H200").peak_flops_per_second == 989e12
    assert work_of([10], gpu="Some Accelerator").peak_flops_per_second is None
