"""Values as a run would tell them, for the tests of observe and cli."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import numpy as np

from megarl.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    Event,
    PhaseStarted,
    Published,
    Record,
    RunFinished,
    RunStarted,
    RunStatus,
    StepFinished,
    Warned,
)
from megarl.observe.summary import RolloutSummary, StepSummary
from megarl.types import (
    DEMONSTRATION,
    EvalResult,
    FinishReason,
    PolicyVersion,
    Prompt,
    PublishResult,
    Rollout,
    RolloutGroup,
    Score,
    ScoredGroup,
    UpdateStats,
)

BEGAN = datetime(2026, 1, 1, 12, tzinfo=UTC)


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
    )


def step_summary(step: int, *, reward: float | None = 0.5, loss: float = 0.5) -> StepSummary:
    rollouts = RolloutSummary(
        num_groups=8,
        num_zero_signal_groups=2,
        reward_mean=reward or 0.0,
        reward_std=0.25,
        component_means={"format": 0.9},
        response_tokens_mean=3.5,
        response_tokens_max=5,
        truncated_ratio=0.0625,
    )
    return StepSummary(
        step=step,
        version=PolicyVersion(step),
        update=update_stats(loss=loss),
        critic=None,
        num_skipped_updates=0,
        kl_coef=None,
        rollouts=None if reward is None else rollouts,
        num_tokens=2400,
        seconds=2.0,
        tokens_per_second=1200.0,
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


def evaluated(step: int, accuracy: float) -> Evaluated:
    result = EvalResult(
        version=PolicyVersion(step), num_prompts=64, accuracy=accuracy, by_source={"arithmetic": accuracy}
    )
    return Evaluated(step=step, result=result)


def published(version: int) -> Published:
    return Published(result=PublishResult(version=PolicyVersion(version), num_bytes=4096, seconds=0.25, num_engines=2))


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
        published(0),
        evaluated(0, 0.25),
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


def scored_group(
    rewards: Sequence[float],
    *,
    lengths: Sequence[int],
    finish: FinishReason = FinishReason.STOP,
    version: int = 3,
) -> ScoredGroup:
    """A group on a prompt of four tokens."""
    prompt = Prompt(
        uid="train.parquet:0",
        position=0,
        epoch=0,
        token_ids=np.arange(4, dtype=np.int32),
        data_source="arithmetic",
        ground_truth="7",
        extra_info={},
    )
    rollouts = tuple(
        Rollout(
            token_ids=np.zeros(length, dtype=np.int32),
            logprobs=np.zeros(length, dtype=np.float32),
            versions=np.full(length, version, dtype=np.int32),
            loss_mask=np.ones(length, dtype=np.bool_),
            finish_reason=finish,
            text="",
        )
        for length in lengths
    )
    scores = tuple(Score(value=reward, components={"exact": reward}) for reward in rewards)
    return ScoredGroup(group=RolloutGroup(prompt=prompt, rollouts=rollouts), scores=scores)


def demonstration_group(*, lengths: Sequence[int]) -> ScoredGroup:
    return scored_group([0.0] * len(lengths), lengths=lengths, version=DEMONSTRATION)
