"""The loop against fakes of its seams: who waits for whom, and what happens when one of them fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TypeVar

import numpy as np
import pytest

from megarl.errors import FleetError, QuarantineError
from megarl.observe.events import Sink, StepFinished, Warned
from megarl.observe.observer import Observer
from megarl.results import EvalResult, PublishResult, UpdateResult
from megarl.rollout.groups import SampledGroups
from megarl.rollout.task import AnsweredPrompt, RolloutTask, Sampling
from megarl.run.buffer import Buffer
from megarl.run.evaluate import Evaluation, Evaluator
from megarl.run.loop import Loop, Start
from megarl.serving.phases import SharedPhases
from megarl.stages import Phases, SeparatePhases, Stages
from megarl.types import (
    Estimates,
    PolicyVersion,
    Prompt,
    RolloutGroup,
    Score,
    ScoredGroup,
    TrainSample,
)
from tests.observe.samples import ListSink, evaluated, update_stats
from tests.values import make_prompt, make_rollout

Result = TypeVar("Result")

TASK = RolloutTask(sampling=Sampling.greedy(max_response_tokens=4), seed=1)
NEW = Start(step=0, version=PolicyVersion(0))


class FakeCluster(Iterator[Prompt]):
    """Every seam in one object, so that it sees the order of all calls."""

    def __init__(
        self,
        *,
        keeps: Callable[[int], bool] = lambda position: True,
        fails_at: int = -1,
        poison: Callable[[int], bool] = lambda position: False,
        seconds: Callable[[int], float] = lambda position: 0.001 * (position % 3),
        update_seconds: float = 0.005,
    ) -> None:
        """`seconds` are those that a prompt takes to be answered, by its position."""
        self.served = PolicyVersion(-1)
        self.trained: list[list[int]] = []
        self.worst_staleness = 0
        self.calls: list[str] = []
        self.saved: list[tuple[int, int, bool]] = []
        """Step, how many prompts were drawn by then, whether it was the last."""
        self.marked = (0, 0)
        self._position = -1
        self._version = 0
        self._num_dropped = 0
        self._keeps = keeps
        self._fails_at = fails_at
        self._poison = poison
        self.asked: list[int] = []
        self._seconds = seconds
        self._update_seconds = update_seconds

    def resume(self, *, version: int, num_drawn: int = 0) -> None:
        self._version = version
        self._position = num_drawn - 1

    def __next__(self) -> Prompt:
        self._position += 1
        return make_prompt(self._position)

    async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
        return AnsweredPrompt(scored=await self.score(await self.generate(prompt)), seconds=0.0)

    async def announce(self) -> None: ...

    async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
        return []

    async def generate(self, prompt: Prompt) -> RolloutGroup:
        version = self.served
        assert version >= 0, "generated before anything was published"
        await asyncio.sleep(self._seconds(prompt.position))
        self.asked.append(prompt.position)
        if self._poison(prompt.position):
            raise QuarantineError(f"prompt {prompt.uid}, rollout 0: 2 engines were lost: ...")
        if prompt.position == self._fails_at:
            raise FleetError("no engine left")
        rollout = make_rollout([2], version=version)
        return RolloutGroup(prompt=prompt, rollouts=(rollout, rollout))

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        return ScoredGroup(group=group, scores=(Score(value=1.0, components={}), Score(value=0.0, components={})))

    def keeps(self, group: ScoredGroup) -> bool:
        is_kept = self._keeps(group.group.prompt.position)
        self._num_dropped += not is_kept
        return is_kept

    def take_dropped(self) -> dict[str, int]:
        num_dropped, self._num_dropped = self._num_dropped, 0
        return {"odd": num_dropped}

    kl_coef: float | None = None

    async def estimate(self, groups: Sequence[ScoredGroup]) -> Estimates:
        return Estimates()

    def assign(self, groups: Sequence[ScoredGroup], estimates: Estimates) -> list[TrainSample]:
        self.trained.append([scored.group.prompt.position for scored in groups])
        for scored in groups:
            for rollout in scored.group.rollouts:
                self.worst_staleness = max(self.worst_staleness, self._version - int(rollout.versions.min()))
        return [
            TrainSample(
                prompt_ids=scored.group.prompt.token_ids,
                rollout=rollout,
                advantages=np.ones(len(rollout.token_ids), dtype=np.float32),
            )
            for scored in groups
            for rollout in scored.group.rollouts
        ]

    async def update(self, samples: Sequence[TrainSample]) -> UpdateResult:
        self.calls.append("update")
        await asyncio.sleep(self._update_seconds)
        self._version += 1
        return UpdateResult(version=PolicyVersion(self._version), stats=update_stats())

    async def publish(self, version: PolicyVersion) -> PublishResult:
        self.calls.append(f"publish {version}")
        self.served = version
        return PublishResult(version=version, num_bytes=0, seconds=0.0, num_engines=1)

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *error: object) -> None:
        self.calls.append("drain")

    async def unless_leaving(self, work: Coroutine[object, object, Result]) -> Result:
        return await work

    unless_held = unless_leaving

    def mark(self, step: int) -> None:
        self.marked = (step, self._position + 1)

    def evaluated(self, step: int, result: EvalResult) -> None: ...

    async def after_step(self, step: int, *, is_last: bool) -> None:
        assert self.marked == (step, self._position + 1)
        self.saved.append((*self.marked, is_last))

    async def sleep(self, *, releases_weights: bool) -> None:
        assert not releases_weights
        self.calls.append("sleep")

    async def take_weights(self) -> None: ...

    @property
    def reachable(self) -> list[object]:
        return [self]

    async def any_reachable(self) -> list[object]:
        return self.reachable

    async def wake(self) -> None:
        self.calls.append("wake")


def run(
    cluster: FakeCluster,
    *,
    num_steps: int,
    max_staleness: int = 0,
    phases: Phases | None = None,
    start: Start = NEW,
    sinks: Sequence[Sink] = (),
    evaluator: Evaluator | None = None,
) -> None:
    async def main() -> None:
        observer = Observer(sinks)
        stages = Stages(
            prompts=cluster,
            groups=SampledGroups(cluster, TASK, observer),
            algorithm=cluster,
            trainer=cluster,
            publisher=cluster,
            phases=phases or SeparatePhases(),
        )
        buffer = Buffer(prompts_per_step=4, max_staleness=max_staleness, versions=[start.version])
        evaluation = None
        if evaluator is not None:
            evaluation = Evaluation(
                evaluator=evaluator,
                phases=stages.phases,
                observer=observer,
                saver=cluster,
                is_synchronous=buffer.is_synchronous,
            )
        loop = Loop(
            stages,
            buffer=buffer,
            evaluation=evaluation,
            saver=cluster,
            observer=observer,
            start=start,
            num_steps=num_steps,
        )
        await asyncio.wait_for(loop.run(), timeout=60)

    asyncio.run(main())


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_never_trains_on_older_than_allowed(max_staleness: int) -> None:
    cluster = FakeCluster()
    run(cluster, num_steps=8, max_staleness=max_staleness)
    assert cluster.worst_staleness == max_staleness


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_generating_and_training_overlap_where_they_may(max_staleness: int) -> None:
    class Watched(FakeCluster):
        num_beside = 0
        """Prompts that were answered during updates."""

        async def update(self, samples: Sequence[TrainSample]) -> UpdateResult:
            before = len(self.asked)
            update = await super().update(samples)
            self.num_beside += len(self.asked) - before
            return update

    cluster = Watched(update_seconds=0.05)
    run(cluster, num_steps=4, max_staleness=max_staleness)
    assert (cluster.num_beside > 0) is (max_staleness > 0)


def test_a_step_tells_who_waited_for_whom_and_how_old_its_tokens_are() -> None:
    sink = ListSink()
    run(FakeCluster(seconds=lambda position: 0.02, update_seconds=0.0), num_steps=4, max_staleness=1, sinks=[sink])
    flows = [event.summary.flow for event in sink.events if isinstance(event, StepFinished)]
    assert all(flow is not None and flow.trainer_wait_s + flow.producer_wait_s > 0 for flow in flows)
    assert [flow.age_max for flow in flows if flow] == [0, 1, 1, 1]
    assert [flow.age_mean for flow in flows if flow] == [0, 1, 1, 1]


class SlowEvaluator(Evaluator):
    """Answers only when the third step is trained, if it may."""

    def __init__(self, cluster: FakeCluster, *, waits: bool) -> None:
        self.finished: list[tuple[int, int]] = []
        """The step it is about, and how many were trained by then."""
        self._cluster = cluster
        self._waits = waits

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return step == 1 or is_last

    async def evaluate(self, step: int, version: PolicyVersion) -> EvalResult:
        while self._waits and len(self._cluster.trained) < 3:
            await asyncio.sleep(0.001)
        self.finished.append((step, len(self._cluster.trained)))
        return evaluated(step, 0.5).result


def test_an_evaluation_does_not_stop_training_that_goes_on_beside_generating() -> None:
    cluster = FakeCluster()
    evaluator = SlowEvaluator(cluster, waits=True)
    run(cluster, num_steps=6, max_staleness=1, evaluator=evaluator)
    (first, num_trained), last = evaluator.finished
    assert first == 1
    assert num_trained >= 3
    assert last == (6, 6)


def test_an_evaluation_takes_its_turn_where_generating_and_training_do() -> None:
    cluster = FakeCluster()
    evaluator = SlowEvaluator(cluster, waits=False)
    run(cluster, num_steps=6, evaluator=evaluator)
    assert evaluator.finished == [(1, 1), (6, 6)]


def test_an_evaluation_that_fails_beside_training_ends_the_run() -> None:
    class Broken(SlowEvaluator):
        async def evaluate(self, step: int, version: PolicyVersion) -> EvalResult:
            raise FleetError("no engine left")

    cluster = FakeCluster()
    with pytest.raises(FleetError, match="no engine left"):
        run(cluster, num_steps=6, max_staleness=1, evaluator=Broken(cluster, waits=False))


@pytest.mark.timeout(60)
def test_a_loop_of_no_steps_publishes_and_ends() -> None:
    cluster = FakeCluster()
    run(cluster, num_steps=0)
    assert cluster.calls == ["publish 0"]
    assert cluster.saved == []


def test_every_version_is_published_before_the_next_step() -> None:
    cluster = FakeCluster()
    run(cluster, num_steps=3)
    assert cluster.calls == ["publish 0", "update", "publish 1", "update", "publish 2", "update", "publish 3", "drain"]


def test_groups_that_are_not_kept_are_replaced_in_stream_order() -> None:
    cluster = FakeCluster(keeps=lambda position: position % 2 == 0)
    run(cluster, num_steps=2)
    assert cluster.trained == [[0, 2, 4, 6], [8, 10, 12, 14]]


def test_a_step_tells_what_was_dropped_for_it_and_which_policy_it_is_about() -> None:
    sink = ListSink()
    run(FakeCluster(keeps=lambda position: position % 2 == 0), num_steps=2, sinks=[sink])
    rollouts = [event.summary.rollouts for event in sink.events if isinstance(event, StepFinished)]
    assert [item.dropped_groups for item in rollouts if item] == [{"odd": 3}, {"odd": 4}]
    assert [item.tokens_by_version for item in rollouts if item] == [{0: 8}, {1: 8}]


def test_a_quarantined_prompt_costs_its_group_and_not_the_run() -> None:
    cluster, sink = FakeCluster(poison=lambda position: position in (1, 2)), ListSink()
    run(cluster, num_steps=2, sinks=[sink])
    assert [position for step in cluster.trained for position in step] == [0, 3, 4, 5, 6, 7, 8, 9]
    first, _ = (event.summary for event in sink.events if isinstance(event, StepFinished))
    assert first.rollouts is not None
    assert first.rollouts.dropped_groups["quarantined"] == 2
    told = [event.text for event in sink.events if isinstance(event, Warned) and "quarantined" in event.text]
    assert told[0] == "quarantined, its group is dropped: prompt train.parquet:1, rollout 0: 2 engines were lost: ..."


async def test_a_quarantined_prompt_is_not_asked_again_in_the_next_epoch() -> None:
    cluster = FakeCluster(poison=lambda position: True)
    cluster.served = PolicyVersion(0)
    groups, prompt = SampledGroups(cluster, TASK, Observer(())), next(cluster)
    for _ in range(2):
        assert await groups.scored_group(prompt) is None
    assert groups.take_dropped() == {"quarantined": 2}
    assert groups.take_dropped() == {}
    assert cluster.asked == [0]


def test_a_run_whose_few_prompts_are_all_in_quarantine_ends() -> None:
    async def ask(num_prompts: int, num_times: int) -> None:
        cluster = FakeCluster(poison=lambda position: True)
        cluster.served = PolicyVersion(0)
        groups, prompts = SampledGroups(cluster, TASK, Observer(())), [next(cluster) for _ in range(num_prompts)]
        for _ in range(num_times):
            for prompt in prompts:
                assert await groups.scored_group(prompt) is None

    asyncio.run(ask(3, 5))
    with pytest.raises(FleetError, match=r"all prompts that are left are in quarantine \(3\)"):
        asyncio.run(ask(3, 20))


def test_a_run_whose_prompts_all_fail_ends() -> None:
    with pytest.raises(FleetError, match=r"17 prompts in a row have no answer; the last: prompt \S+, rollout 0"):
        run(FakeCluster(poison=lambda position: position > 3), num_steps=2)


def test_no_prompt_is_drawn_after_the_last_step() -> None:
    cluster = FakeCluster()
    run(cluster, num_steps=3)
    assert next(cluster).position == 3 * 4


def test_a_step_is_saved_before_prompts_of_the_next_are_drawn() -> None:
    cluster = FakeCluster(keeps=lambda position: position % 2 == 0)
    run(cluster, num_steps=3)
    assert cluster.saved == [(1, 7, False), (2, 15, False), (3, 23, True)]


def test_a_resumed_loop_publishes_what_it_has_and_goes_on_as_the_whole_one_though_prompts_are_dropped() -> None:
    def keeps(position: int) -> bool:
        return position % 5 not in {1, 2}

    whole = FakeCluster(keeps=keeps)
    run(whole, num_steps=4)
    _, num_drawn, _ = whole.saved[1]
    resumed = FakeCluster(keeps=keeps)
    resumed.resume(version=2, num_drawn=num_drawn)
    run(resumed, num_steps=4, start=Start(step=2, version=PolicyVersion(2)))
    assert resumed.trained == whole.trained[2:]
    assert resumed.saved == whole.saved[2:]
    assert resumed.calls == ["publish 2", *whole.calls[whole.calls.index("publish 2") + 1 :]]


def test_engines_of_a_shared_pool_sleep_while_the_trainer_works() -> None:
    cluster = FakeCluster()
    run(cluster, num_steps=2, phases=SharedPhases(cluster))
    assert cluster.calls == [
        *("publish 0", "sleep", "update", "publish 1"),
        *("wake", "sleep", "update", "publish 2", "drain"),
    ]


def test_a_failing_producer_ends_the_run_with_its_own_error() -> None:
    cluster = FakeCluster(fails_at=5)
    with pytest.raises(FleetError, match="no engine left"):
        run(cluster, num_steps=3)
    assert cluster.calls[-1] == "drain"
    assert len(cluster.trained) == 1


def test_a_failing_step_ends_the_run_with_its_own_error() -> None:
    class Broken(FakeCluster):
        async def update(self, samples: Sequence[TrainSample]) -> UpdateResult:
            raise FleetError("broken on purpose")

    with pytest.raises(FleetError, match="broken on purpose"):
        run(Broken(), num_steps=3)


def test_the_seconds_of_a_step_include_the_time_in_which_devices_change_hands() -> None:
    class SlowToWake(FakeCluster):
        async def wake(self) -> None:
            await asyncio.sleep(0.2)

    sink = ListSink()
    cluster = SlowToWake()
    began = time.monotonic()
    run(cluster, num_steps=3, phases=SharedPhases(cluster), sinks=[sink])
    seconds = [event.summary.seconds for event in sink.events if isinstance(event, StepFinished)]
    assert all(step_s >= 0.2 for step_s in seconds[1:])
    assert sum(seconds) <= time.monotonic() - began, "each step has a clock of its own"
