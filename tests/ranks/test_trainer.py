"""Who is asked what, who learns when, and what is kept of a step that could not be trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from megarl.algo.algorithm import PolicyGradient
from megarl.algo.held_credit import CreditTask
from megarl.config.algorithm import GaeConfig
from megarl.data.shares import Share
from megarl.errors import NumericsError
from megarl.ranks.ranks import HeldNumbers
from megarl.ranks.trainer import (
    Held,
    HeldCredit,
    ModelQuestion,
    ModelQuestions,
    ModelsTrainer,
    TrainedActor,
    TrainedCritic,
)
from megarl.results import CriticResult, CriticStats, RankUsage, TrainingWork, UpdateResult
from megarl.tokens import RolloutSums
from megarl.types import Estimates, FloatArray, PolicyVersion, TrainSample
from tests.algo.groups import scored_group
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
USAGE = RankUsage(resident_bytes=1, host_available_bytes=1, host_total_bytes=2)


def pack(samples: Sequence[TrainSample]) -> Iterator[Share]:
    assert samples
    yield Share(
        row_ids=(),
        sample_ids=(),
        prompt_ids=np.zeros(0, np.int32),
        prompt_bounds=(),
        bounds=(),
        num_episode_loss_tokens=(),
        are_whole=(),
        columns={},
        sources=(),
        places=(),
        widths={},
        has_routes=False,
        updates=(),
        temperature=1.0,
    )


class Numbers(HeldNumbers):
    """Numbers that lie in this process."""

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


class FakeActor:
    def __init__(self, *, num_skipped: int = 0, error: NumericsError | None = None) -> None:
        self.num_updates = 0
        self._num_skipped = num_skipped
        self._error = error
        self.held: list[Held] = []

    async def update(self, shares: Iterator[Share], held: Held) -> UpdateResult:
        assert len(list(shares)) == 1
        self.held.append(held)
        if self._error is not None:
            raise self._error
        self.num_updates += 1
        return UpdateResult(
            version=PolicyVersion(self.num_updates),
            stats=None,
            num_skipped_updates=self._num_skipped,
            usage={"actor": USAGE},
        )

    async def logprobs(self, shares: Iterator[Share]) -> HeldNumbers:
        return Numbers(np.full(2, -0.5, np.float32))


class FakeCritic:
    def __init__(self) -> None:
        self.num_updates = 0
        self.held: list[Held] = []

    async def update(self, shares: Iterator[Share], held: Held) -> CriticResult:
        self.held.append(held)
        self.num_updates += 1
        return CriticResult(stats=VALUE_STATS)


def trainer(
    folder: Path,
    actor: FakeActor,
    *,
    critic: FakeCritic | None = None,
    warmup_steps: int = 0,
    questions: ModelQuestions | None = None,
    num_steps: int = 0,
    version: int = 0,
) -> ModelsTrainer:
    trained = None
    if critic is not None:
        trained = TrainedCritic(update=critic.update, pack=pack, warmup_steps=warmup_steps)
    return ModelsTrainer(
        actor=TrainedActor(
            update=actor.update,
            pack=pack,
            logprobs=ModelQuestion(ask=actor.logprobs, pack=pack),
            measure_work=lambda _, usage: TrainingWork(flops=1.0, peak_flops_per_second=None),
        ),
        critic=trained,
        questions=questions or ModelQuestions(),
        num_steps=num_steps,
        version=PolicyVersion(version),
        skipped_folder=folder,
    )


def test_nothing_is_asked_that_nobody_needs(tmp_path: Path) -> None:
    assert asyncio.run(trainer(tmp_path, FakeActor()).estimate([scored_group(0, [1, 0])])) == Estimates()


def asking(numbers: Numbers, *, is_for_credit: bool = True) -> ModelQuestion:
    async def ask(shares: Iterator[Share]) -> HeldNumbers:
        assert len(list(shares)) == 1
        return numbers

    return ModelQuestion(ask=ask, pack=pack, is_for_credit=is_for_credit)


def test_only_what_is_needed_is_asked(tmp_path: Path) -> None:
    answer = (np.zeros(2, np.float32), np.ones(3, np.float32))
    asked = ModelQuestions(values=asking(Numbers(*answer)))
    estimates = asyncio.run(trainer(tmp_path, FakeActor(), questions=asked).estimate([scored_group(0, [1, 0])]))
    assert estimates == Estimates(values=answer)


def test_numbers_that_only_an_update_needs_do_not_pass_through_the_driver(tmp_path: Path) -> None:
    reference, values = Numbers(np.zeros(2, np.float32)), Numbers(np.ones(2, np.float32))
    asked = ModelQuestions(reference_logprobs=asking(reference, is_for_credit=False), values=asking(values))
    actor, critic = FakeActor(), FakeCritic()
    training = trainer(tmp_path, actor, critic=critic, questions=asked)

    async def steps() -> Estimates:
        estimates = await training.estimate([scored_group(0, [1, 0])])
        await training.update(make_samples(2, vocab=9))
        await training.update(make_samples(2, vocab=9))
        return estimates

    estimates = asyncio.run(steps())
    assert estimates.reference_logprobs is None
    assert (reference.num_fetched, values.num_fetched) == (0, 1)
    # The second step was not asked about: it gets nothing of the first.
    assert actor.held == [{"reference_logprobs": reference}, {}]
    assert critic.held == [{"values": values}, {}]


def test_credit_that_ranks_assign_goes_to_the_updates_and_not_through_the_driver(tmp_path: Path) -> None:
    group = scored_group(0, [1, 0])
    lengths = [rollout.num_tokens for rollout in group.group.rollouts]
    values, advantages, returns = (Numbers(*(np.full(n, number, np.float32) for n in lengths)) for number in (0, 1, 2))
    sums = RolloutSums(counts=np.ones(2), kl=None, advantages=np.ones(2))
    algorithm = PolicyGradient(GaeConfig(kind="gae"), max_response_tokens=10)
    asked: list[tuple[HeldNumbers, Held]] = []

    async def assign(task: CreditTask, own: HeldNumbers, numbers: Held) -> tuple[RolloutSums, dict[str, HeldNumbers]]:
        asked.append((own, numbers))
        return sums, {"advantages": advantages, "returns": returns}

    credit = HeldCredit(task=algorithm.credit_task, assign=assign, name="values")
    questions = ModelQuestions(values=asking(values, is_for_credit=False), credit=credit)
    actor, critic = FakeActor(num_skipped=1), FakeCritic()
    training = trainer(tmp_path, actor, critic=critic, questions=questions)

    async def step() -> Estimates:
        estimates = await training.estimate([group])
        await training.update(algorithm.assign([group], estimates))
        return estimates

    assert asyncio.run(step()) == Estimates(sums=sums)
    assert asked == [(values, {"values": values})]
    assert actor.held == [{"advantages": advantages}]
    assert critic.held == [{"values": values, "returns": returns}]
    assert (values.num_fetched, advantages.num_fetched) == (0, 0)
    # The rollouts of a skipped update are written with the numbers that only ranks had.
    (row, _) = pq.read_table(tmp_path / "step_000001.parquet").to_pylist()
    assert [row[name][0] for name in ("values", "advantages", "returns")] == [0, 1, 2]


@pytest.mark.parametrize(("num_steps", "expected"), [(0, [0, 0, 1]), (2, [3, 4, 5])], ids=["new", "resumed"])
def test_only_the_critic_learns_while_it_warms_up(tmp_path: Path, num_steps: int, expected: list[int]) -> None:
    actor, critic = FakeActor(), FakeCritic()
    actor.num_updates = 2 if num_steps else 0
    version = actor.num_updates
    training = trainer(tmp_path, actor, critic=critic, warmup_steps=2, num_steps=num_steps, version=version)

    async def steps() -> list[UpdateResult]:
        return [await training.update(make_samples(2, vocab=9)) for _ in range(3)]

    results = asyncio.run(steps())
    assert [result.version for result in results] == expected
    assert all(result.critic == VALUE_STATS for result in results)
    assert critic.num_updates == 3
    assert actor.num_updates == expected[-1]


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
