"""Values as a run would tell them, for the tests of observe and cli."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from megarl.config.recipe import Recipe
from megarl.data.evaluation_files import Generation
from megarl.observe.event_file import EVENTS_FILE
from megarl.observe.event_log import EventLog
from megarl.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    EngineChanged,
    Evaluated,
    Event,
    PhaseEnded,
    PhaseStarted,
    Published,
    PublishFailed,
    Record,
    Restarted,
    RunFinished,
    RunStarted,
    RunStatus,
    StepFinished,
    Warned,
)
from megarl.observe.summary import EpisodeSummary, Flow, RewardOutlier, RolloutSummary, StepSummary
from megarl.results import EvalResult, Grade, Grades, PublishResult, RankUsage, TrainingWork, UpdateStats
from megarl.types import (
    DEMONSTRATION,
    FinishReason,
    PolicyVersion,
    RolloutGroup,
    Score,
    ScoredGroup,
    TrainSample,
)
from tests.values import make_prompt, make_rollout

BEGAN = datetime(2026, 1, 1, 12, tzinfo=UTC)


def make_recipe(folder: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "sample", "steps": 2, "device": "cpu", "folder": folder},
            "model": {"path": "model"},
            "data": {"train": ["train.parquet"]},
            "pools": {"train": {"gpus_per_node": 1}},
            "roles": {"actor": {"pool": "train"}},
            "algorithm": {"kind": "sft"},
            "train": {"prompts_per_step": 8},
        }
    )


class ListSink:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.is_closed = False

    def record(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.is_closed = True

    @property
    def events(self) -> list[Event]:
        return [record.event for record in self.records]

    @property
    def warnings(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Warned)]


def update_stats(*, loss: float = 0.5) -> UpdateStats:
    return UpdateStats(
        loss=loss,
        grad_norm=1.25,
        learning_rate=3e-4,
        entropy=0.75,
        clip_fraction=0.125,
        approx_kl=0.002,
        mismatch_mean=1e-6,
        mismatch_max=1e-5,
        mismatch_kl=0.0,
        mismatch_k3=0.0,
        mismatch_chi2=0.0,
        effective_sample_ratio=1.0,
        rejected_fraction=0.0,
        reference_kl=0.002,
        num_loss_tokens=96,
        num_sequences=16,
        num_micro_batches=2,
        engine_mismatch=5e-7,
        policy_drift=2e-6,
        behind_fraction=0.25,
        teacher_kl=0.125,
        replayed_fraction=0.75,
        routing_disagreement={"0": 0.03125},
    )


def rank_usage() -> RankUsage:
    return RankUsage(
        resident_bytes=1 << 30,
        host_available_bytes=8 << 30,
        host_total_bytes=16 << 30,
        gpu_allocated_bytes=40 << 30,
        gpu_reserved_bytes=60 << 30,
        gpu_total_bytes=80 << 30,
        gpu_name="NVIDIA H100",
    )


def step_summary(
    step: int,
    *,
    reward: float | None = 0.5,
    loss: float = 0.5,
    num_zero_signal_groups: int = 2,
    dropped_groups: Mapping[str, int] | None = None,
    reward_min: float = 0.0,
    outlier: RewardOutlier | None = None,
) -> StepSummary:
    """Of eight groups."""
    rollouts = RolloutSummary(
        num_groups=8,
        num_zero_signal_groups=num_zero_signal_groups,
        num_single_groups=1,
        num_masked_rollouts=0,
        dropped_groups=dropped_groups or {},
        reward_mean=reward or 0.0,
        reward_std=0.25,
        reward_min=reward_min,
        reward_median=0.5,
        reward_max=1.0,
        num_reward_outliers=0 if outlier is None else 3,
        first_outlier=outlier,
        tokens_by_version={step - 1: 96},
        component_means={"format": 0.9},
        response_tokens_mean=3.5,
        response_tokens_max=5,
        truncated_ratio=0.0625,
        empty_ratio=0.125,
        repetition_ratio=0.25,
        episodes=EpisodeSummary(
            endings={"answered": 30, "length": 2},
            turns_mean=1.5,
            calls_mean=0.5,
            rows_mean=1.25,
            given_tokens_ratio=0.25,
            tool_seconds_mean=0.125,
            num_retries=1,
        ),
    )
    return StepSummary(
        step=step,
        version=PolicyVersion(step),
        update=update_stats(loss=loss),
        critic=None,
        num_skipped_updates=0,
        kl_coef=None,
        rollouts=None if reward is None else rollouts,
        epoch=0,
        num_prompts=8,
        prompt_tokens_mean=4.0,
        num_tokens=2400,
        work=TrainingWork(flops=1e9, peak_flops_per_second=1e10, num_tokens=2400, num_shared_tokens=600),
        usage={"actor": rank_usage()},
        flow=Flow(trainer_wait_s=1.5, producer_wait_s=0.5, num_ready=4, num_under_way=4, age_mean=0.5, age_max=1),
        seconds=2.0,
        tokens_per_second=1200.0,
        cached_prompt_ratio=0.75,
        tokens_per_pass=2.5,
    )


def step_finished(step: int, *, reward: float | None = 0.5, loss: float = 0.5) -> StepFinished:
    summary = step_summary(step, reward=reward, loss=loss)
    return StepFinished(summary=summary, phase_seconds={"generate": 1.5, "update": 0.5})


def run_started(*, steps: int = 4, resumed_step: int = 0) -> RunStarted:
    return RunStarted(
        name="sample",
        folder="runs/sample",
        algorithm="grpo",
        steps=steps,
        megarl_version="0.0.0",
        metrics_url="http://127.0.0.1:1234/metrics",
        resumed_step=resumed_step,
        recipe={"run": {"name": "sample", "steps": steps}, "pools": None},
    )


def grades(accuracy: float, *, rollouts_per_prompt: int = 1, pass_at: Mapping[int, float] | None = None) -> Grades:
    grade = Grade(
        num_prompts=64,
        rollouts_per_prompt=rollouts_per_prompt,
        score_mean=accuracy,
        accuracy=accuracy,
        majority=accuracy,
        pass_at=pass_at or {},
    )
    return Grades(overall=grade, by_source={"arithmetic": grade})


def evaluated(step: int, accuracy: float, *, sampled: Grades | None = None) -> Evaluated:
    result = EvalResult(version=PolicyVersion(step), greedy=grades(accuracy), sampled=sampled)
    return Evaluated(step=step, result=result)


def generation(
    *,
    response: str = "7",
    prompt: str = "what is 3 + 4?",
    prediction: str | None = "7",
    is_right: bool = True,
    is_greedy: bool = True,
    index: int = 0,
    data_source: str = "arithmetic",
    images: tuple[str, ...] = (),
) -> Generation:
    return Generation(
        prompt_uid="eval.parquet:3",
        data_source=data_source,
        is_greedy=is_greedy,
        index=index,
        is_right=is_right,
        score=float(is_right),
        components={"format": 0.5},
        prediction=prediction,
        ground_truth="7",
        finish_reason=FinishReason.STOP,
        num_tokens=2,
        prompt=prompt,
        images=images,
        response=response,
    )


def published(version: int) -> Published:
    return Published(
        result=PublishResult(
            version=PolicyVersion(version),
            num_bytes=4096,
            busiest_bytes=2048,
            floor_bytes=1024,
            seconds=0.25,
            num_engines=2,
            num_adapters=2,
            max_adapters=3,
        )
    )


def engine_changed(index: int, state: str = "healthy", *, version: int = 0) -> EngineChanged:
    """One that is `healthy` serves, one that is `dead` has no process."""
    return EngineChanged(
        index=index,
        state=state,
        is_serving=state == "healthy",
        is_running=state != "dead",
        version=PolicyVersion(version),
        address=f"127.0.0.1:{30000 + index}",
    )


def checkpoint_saved(step: int) -> CheckpointSaved:
    return CheckpointSaved(
        step=step,
        path=f"runs/sample/checkpoints/step_{step:06d}",
        num_bytes=4096,
        blocking_seconds=0.25,
        seconds=1.5,
    )


def one_of_each() -> list[Event]:
    return [
        run_started(),
        PhaseStarted(phase="start"),
        PhaseEnded(phase="start", seconds=0.5),
        engine_changed(0),
        published(0),
        PublishFailed(version=PolicyVersion(1), reason="engine 0: model.norm.weight differs"),
        Restarted(role="rollout", index=0, reason="exited with SIGKILL"),
        evaluated(0, 0.25, sampled=grades(0.5, rollouts_per_prompt=2, pass_at={1: 0.5, 2: 0.75})),
        step_finished(1),
        step_finished(2, reward=None),
        Warned(text='a "quoted" [warning]\nwith two lines'),
        checkpoint_saved(2),
        CheckpointFailed(step=3, reason="No space left on device"),
        RunFinished(status=RunStatus.FAILED, reason="engine 0 died"),
    ]


def records(events: Sequence[Event], *, seconds_apart: float = 10) -> list[Record]:
    return [
        Record(sequence=index, time=BEGAN + timedelta(seconds=index * seconds_apart), event=event)
        for index, event in enumerate(events)
    ]


def write_events(folder: Path, events: Sequence[Event]) -> Path:
    """Write the events of a run into its folder, ten seconds apart."""
    log = EventLog(folder / EVENTS_FILE)
    for record in records(events):
        log.record(record)
    log.close()
    return folder


def scored_group(
    rewards: Sequence[float],
    *,
    lengths: Sequence[int],
    finish: FinishReason = FinishReason.STOP,
    version: int = 3,
    number: int = 0,
) -> ScoredGroup:
    """A group on a prompt of four tokens."""
    prompt = make_prompt(number, token_ids=range(4), data_source="arithmetic", ground_truth="7")
    rollouts = tuple(make_rollout([0] * length, version=version, finish_reason=finish) for length in lengths)
    scores = tuple(Score(value=reward, components={"exact": reward}) for reward in rewards)
    return ScoredGroup(group=RolloutGroup(prompt=prompt, rollouts=rollouts), scores=scores)


def demonstration_group(*, lengths: Sequence[int]) -> ScoredGroup:
    return scored_group([0.0] * len(lengths), lengths=lengths, version=DEMONSTRATION)


def train_samples(groups: Sequence[ScoredGroup]) -> list[TrainSample]:
    """Each rollout's credit is its score less the mean of its group, on every token."""
    return [
        TrainSample(
            prompt_ids=scored.group.prompt.token_ids,
            rollout=rollout,
            advantages=np.full(len(rollout.token_ids), score.value - _mean(scored), dtype=np.float32),
        )
        for scored in groups
        for rollout, score in zip(scored.group.rollouts, scored.scores, strict=True)
    ]


def _mean(scored: ScoredGroup) -> float:
    return float(np.mean([score.value for score in scored.scores]))
