"""From what a run tells to the numbers people watch: the sink that fills the meter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from megarl.observe import catalogue as names
from megarl.observe.catalogue import Metric
from megarl.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    EngineChanged,
    Evaluated,
    Published,
    PublishFailed,
    Record,
    Restarted,
    RunStarted,
    StepFinished,
    Warned,
)
from megarl.observe.meter import Meter
from megarl.observe.progress import Progress, advance
from megarl.observe.standing import Standing
from megarl.observe.summary import Flow, RolloutSummary, StepSummary
from megarl.results import EvalResult, PublishResult, TrainingWork

OF_UPDATE: Mapping[str, Metric] = {
    "loss": names.LOSS,
    "grad_norm": names.GRAD_NORM,
    "learning_rate": names.LEARNING_RATE,
    "entropy": names.ENTROPY,
    "clip_fraction": names.CLIP,
    "approx_kl": names.UPDATE_KL,
    "mismatch_mean": names.MISMATCH_MEAN,
    "mismatch_max": names.MISMATCH_MAX,
    "mismatch_kl": names.MISMATCH_KL,
    "mismatch_k3": names.MISMATCH_K3,
    "mismatch_chi2": names.MISMATCH_CHI2,
    "engine_mismatch": names.ENGINE_MISMATCH,
    "policy_drift": names.POLICY_DRIFT,
    "behind_fraction": names.BEHIND,
    "effective_sample_ratio": names.EFFECTIVE_SAMPLES,
    "rejected_fraction": names.REJECTED,
    "reference_kl": names.REFERENCE_KL,
    "num_loss_tokens": names.LOSS_TOKENS,
    "num_micro_batches": names.MICRO_BATCHES,
}
"""By field of UpdateStats."""
OF_CRITIC: Mapping[str, Metric] = {
    "loss": names.VALUE_LOSS,
    "grad_norm": names.VALUE_GRAD_NORM,
    "learning_rate": names.VALUE_LEARNING_RATE,
    "clip_fraction": names.VALUE_CLIP,
    "value_mean": names.VALUE_MEAN,
    "return_mean": names.RETURN_MEAN,
    "explained_variance": names.EXPLAINED_VARIANCE,
}
"""By field of CriticStats."""
OF_ROLLOUTS: Mapping[str, Metric] = {
    "reward_mean": names.REWARD_MEAN,
    "reward_std": names.REWARD_STD,
    "reward_min": names.REWARD_MIN,
    "reward_max": names.REWARD_MAX,
    "num_single_groups": names.SINGLE_GROUPS,
    "response_tokens_mean": names.RESPONSE_MEAN,
    "response_tokens_max": names.RESPONSE_MAX,
    "truncated_ratio": names.TRUNCATED,
    "empty_ratio": names.EMPTY,
    "repetition_ratio": names.REPETITION,
}
"""By field of RolloutSummary."""
OF_USAGE: Mapping[str, Metric] = {
    "resident_bytes": names.RESIDENT,
    "host_available_bytes": names.HOST_AVAILABLE,
    "host_total_bytes": names.HOST_TOTAL,
    "gpu_allocated_bytes": names.GPU_ALLOCATED,
    "gpu_reserved_bytes": names.GPU_RESERVED,
    "gpu_total_bytes": names.GPU_TOTAL,
}
"""By field of RankUsage."""


class Metrics:
    """A sink: a record sets what it knows. `earlier` are the records of a run that this one continues."""

    def __init__(self, meter: Meter, *, earlier: Iterable[Record] = ()) -> None:
        self._meter = meter
        self._progress = Progress()
        self._standing = Standing()
        self._engines: dict[str, str] = {}
        """The state of each."""
        self._serving: set[str] = set()
        for record in earlier:
            self._standing.record(record)

    def record(self, record: Record) -> None:  # noqa: C901
        self._progress = advance(self._progress, record)
        self._standing.record(record)
        meter = self._meter
        match record.event:
            case RunStarted(resumed_step=resumed_step):
                meter.set(names.RUN_START, record.time.timestamp())
                meter.set(names.STEP, resumed_step)
                meter.set(names.CHECKPOINT_STEP, resumed_step)
            case StepFinished() as finished:
                meter.set(names.LAST_STEP, record.time.timestamp())
                self._record_time(finished)
                self._record_step(finished.summary)
                self._record_run(record)
            case Published(result=result):
                self._record_publish(result)
            case PublishFailed():
                meter.add(names.PUBLISH_FAILURES, 1)
            case EngineChanged() as changed:
                self._record_engine(changed)
            case Restarted(role=role):
                meter.add(names.RESTARTS, 1, role)
            case Evaluated(step=step, result=evaluation):
                meter.set(names.EVAL_STEP, step)
                self._record_evaluation(evaluation)
            case CheckpointSaved() as saved:
                meter.set(names.CHECKPOINT_STEP, saved.step)
                meter.set(names.CHECKPOINT_TIME, record.time.timestamp())
                meter.set(names.CHECKPOINT_BLOCKING, saved.blocking_seconds)
                meter.set(names.CHECKPOINT_SECONDS, saved.seconds)
                meter.set(names.CHECKPOINT_BYTES, saved.num_bytes)
            case CheckpointFailed():
                meter.add(names.CHECKPOINT_FAILURES, 1)
            case Warned():
                meter.add(names.WARNINGS, 1)

    def close(self) -> None:
        """Nothing to close: the registry dies with the run, the endpoint has an owner of its own."""

    def _record_time(self, finished: StepFinished) -> None:
        summary, phase_seconds = finished.summary, finished.phase_seconds
        for phase, seconds in phase_seconds.items():
            self._meter.add(names.PHASE_SECONDS, seconds, phase)
        self._meter.set(names.STEP_SECONDS, summary.seconds)
        if "evaluate" in phase_seconds:
            self._meter.set(names.EVAL_SECONDS, phase_seconds["evaluate"])
        if summary.flow is not None:
            self._record_flow(summary.flow, summary.seconds)
        update_s = phase_seconds.get("update", 0.0)
        if summary.work is not None and update_s > 0:
            self._record_work(summary.work, update_s)

    def _record_flow(self, flow: Flow, seconds: float) -> None:
        self._meter.set(names.STALENESS_MEAN, flow.age_mean)
        self._meter.set(names.STALENESS_MAX, flow.age_max)
        if seconds > 0:
            self._meter.set(names.TRAINER_WAIT, min(1.0, flow.trainer_wait_s / seconds))
            self._meter.set(names.PRODUCER_WAIT, min(1.0, flow.producer_wait_s / seconds))

    def _record_work(self, work: TrainingWork, seconds: float) -> None:
        self._meter.set(names.TRAIN_FLOPS, work.flops / seconds)
        if work.peak_flops_per_second is not None:
            self._meter.set(names.MFU, work.flops / seconds / work.peak_flops_per_second)

    def _record_run(self, record: Record) -> None:
        """What the step means for the run."""
        known = {
            names.REMAINING: self._progress.eta_s,
            names.EFFECTIVE_TIME: self._standing.effective_time_ratio(record.time),
            names.MISMATCH_BASELINE: self._standing.mismatch_baseline,
        }
        for metric, value in known.items():
            if value is not None:
                self._meter.set(metric, value)

    def _record_step(self, summary: StepSummary) -> None:
        meter = self._meter
        meter.set(names.STEP, summary.step)
        meter.set(names.ACTOR_VERSION, summary.version)
        meter.set(names.EPOCH, summary.epoch)
        meter.set(names.PROMPT_TOKENS, summary.prompt_tokens_mean)
        meter.set(names.TOKENS_PER_SECOND, summary.tokens_per_second)
        meter.add(names.TRAINED_TOKENS, summary.num_tokens)
        meter.add(names.TRAINED_PROMPTS, summary.num_prompts)
        meter.add(names.SKIPPED_UPDATES, summary.num_skipped_updates)
        if summary.kl_coef is not None:
            meter.set(names.KL_COEFFICIENT, summary.kl_coef)
        if summary.update is not None:
            self._set_fields(summary.update, OF_UPDATE)
        if summary.critic is not None:
            self._set_fields(summary.critic, OF_CRITIC)
        for role, usage in summary.usage.items():
            self._set_fields(usage, OF_USAGE, role)
        if summary.rollouts is not None:
            self._record_rollouts(summary.rollouts)

    def _record_rollouts(self, rollouts: RolloutSummary) -> None:
        meter = self._meter
        self._set_fields(rollouts, OF_ROLLOUTS)
        meter.add(names.MASKED_ROLLOUTS, rollouts.num_masked_rollouts)
        meter.add(names.REWARD_OUTLIERS, rollouts.num_reward_outliers)
        for component, mean in rollouts.component_means.items():
            meter.set(names.REWARD_COMPONENT, mean, component)
        meter.set(names.ZERO_SIGNAL, rollouts.num_zero_signal_groups / rollouts.num_groups)
        meter.add(names.ZERO_SIGNAL_STEPS, int(not rollouts.has_signal))
        for cause, number in rollouts.dropped_groups.items():
            meter.add(names.DROPPED_GROUPS, number, cause)
        if rollouts.tokens_by_version:
            meter.set(names.OLDEST_VERSION, min(rollouts.tokens_by_version))

    def _record_publish(self, result: PublishResult) -> None:
        meter = self._meter
        meter.add(names.PUBLISHES, 1)
        meter.set(names.ROLLOUT_VERSION, result.version)
        meter.set(names.PUBLISH_SECONDS, result.seconds)
        meter.set(names.PUBLISH_TOTAL, result.num_bytes)
        meter.set(names.PUBLISH_BYTES, result.busiest_bytes)
        meter.set(names.PUBLISH_FLOOR, result.floor_bytes)
        meter.set(names.PUBLISHED_ENGINES, result.num_engines)
        for engine in self._serving:
            meter.set(names.ENGINE_VERSION, result.version, engine)

    def _record_engine(self, changed: EngineChanged) -> None:
        meter, engine = self._meter, str(changed.index)
        states_before = set(self._engines.values())
        self._engines[engine] = changed.state
        if changed.is_running:
            meter.set(names.ENGINE_VERSION, changed.version, engine)
        else:
            meter.forget(names.ENGINE_VERSION, engine)
        self._serving = self._serving | {engine} if changed.is_serving else self._serving - {engine}
        counts = Counter(self._engines.values())
        for state in states_before | set(counts):
            meter.set(names.ENGINES, counts[state], state)

    def _record_evaluation(self, result: EvalResult) -> None:
        for name, value in result.numbers.items():
            self._meter.set(names.EVAL, value, name)
        for source in result.main.by_source:
            for name, value in result.numbers_of(source).items():
                self._meter.set(names.EVAL_SOURCE, value, name, source)

    def _set_fields(self, values: object, metrics: Mapping[str, Metric], *labels: str) -> None:
        """Fields that are None are not known."""
        for field, metric in metrics.items():
            value = getattr(values, field)
            if value is not None:
                self._meter.set(metric, value, *labels)
