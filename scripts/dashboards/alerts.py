"""The alerts, as Prometheus rules over the catalogue. Each has a chapter in docs/runbook.md.

`page` wakes a person: the run stands still, loses work or trains on nonsense. `warn` can wait until morning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

Severity = Literal["page", "warn"]
RUNBOOK = "docs/runbook.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    name: str
    """In CamelCase, without the common prefix."""
    severity: Severity
    text: str
    """PromQL; has a result where something is wrong."""
    lasting: str
    """How long the condition must hold; `0s` fires at once."""
    summary: str
    """One sentence; Prometheus fills in `{{ $value }}` and labels."""

    @property
    def full_name(self) -> str:
        return f"Megarl{self.name}"

    @property
    def anchor(self) -> str:
        """The anchor of its chapter in the runbook, as Markdown viewers make it."""
        return self.full_name.lower()


ALERTS = (
    Alert(
        name="NoProgress",
        severity="page",
        # A run that has not finished a step yet has no step seconds, and takes as long as it takes to start.
        text="time() - megarl_last_step_timestamp_seconds > 60 + 5 * megarl_step_seconds",
        lasting="2m",
        summary="run {{ $labels.run }}: no step for {{ $value | humanizeDuration }}, five times the usual",
    ),
    Alert(
        name="NeverStarted",
        severity="page",
        text="(time() - megarl_run_start_timestamp_seconds > 3600) unless on (run) megarl_step_seconds",
        lasting="5m",
        summary="run {{ $labels.run }}: no step in the {{ $value | humanizeDuration }} since it was started",
    ),
    Alert(
        name="ThroughputDrop",
        severity="warn",
        text=(
            "avg_over_time(megarl_tokens_per_second[15m])"
            " < 0.7 * quantile_over_time(0.5, megarl_tokens_per_second[3h] offset 15m)"
        ),
        lasting="15m",
        summary="run {{ $labels.run }}: {{ $value | humanize }} tokens/s, less than 70 % of the three hours before",
    ),
    Alert(
        name="StaleWeights",
        severity="page",
        text="megarl_staleness_max_steps > megarl_staleness_limit_steps + 1",
        lasting="0s",
        summary="run {{ $labels.run }}: trained on tokens {{ $value }} steps old, more than the recipe allows",
    ),
    Alert(
        name="EngineStale",
        severity="warn",
        text=("megarl_rollout_weight_version - on (run) group_right megarl_engine_weight_version > 0"),
        lasting="10m",
        summary="run {{ $labels.run }}: engine {{ $labels.engine }} is {{ $value }} updates behind and gets no request",
    ),
    Alert(
        name="PublishFailed",
        severity="page",
        text="increase(megarl_publish_failures_total[15m]) > 0",
        lasting="0s",
        summary="run {{ $labels.run }}: a version was not published; it is sent again, and its engines wait for it",
    ),
    Alert(
        name="PublishSlow",
        severity="warn",
        text=(
            "megarl_publish_seconds > 0.2 * megarl_step_seconds"
            " and megarl_publish_seconds > 3 * quantile_over_time(0.5, megarl_publish_seconds[3h] offset 15m)"
        ),
        lasting="15m",
        summary="run {{ $labels.run }}: a publish takes {{ $value | humanizeDuration }}, three times as long as before",
    ),
    Alert(
        name="Mismatch",
        severity="warn",
        text="avg_over_time(megarl_engine_mismatch_mean[10m]) > clamp_min(3 * megarl_mismatch_baseline, 0.01)",
        lasting="10m",
        summary="run {{ $labels.run }}: trainer and engines differ by {{ $value | humanize }}, three times as at first",
    ),
    Alert(
        name="MismatchSevere",
        severity="page",
        text="megarl_engine_mismatch_mean > 0.1",
        lasting="0s",
        summary="run {{ $labels.run }}: engines do not serve what is trained, differing by {{ $value | humanize }}",
    ),
    Alert(
        name="KlBlowUp",
        severity="page",
        text=(
            "megarl_update_kl_nats > 0.1"
            " or (megarl_reference_kl_nats > 0.5"
            " and megarl_reference_kl_nats > 10 * quantile_over_time(0.5, megarl_reference_kl_nats[3h] offset 15m))"
        ),
        lasting="10m",
        summary="run {{ $labels.run }}: the policy moves by {{ $value | humanize }} nats",
    ),
    Alert(
        name="EntropyCollapse",
        severity="warn",
        text="megarl_entropy_nats < 0.3 * quantile_over_time(0.5, megarl_entropy_nats[3h] offset 15m)",
        lasting="15m",
        summary="run {{ $labels.run }}: entropy is {{ $value | humanize }} nats, a third of what it was",
    ),
    Alert(
        name="RewardHacking",
        severity="warn",
        text=(
            '(deriv(megarl_reward_mean[2h]) > 0 and on (run) deriv(megarl_eval{number="accuracy"}[2h]) < 0)'
            " and on (run) (megarl_response_repetition_ratio > 0.2"
            " or megarl_response_mean_tokens"
            " > 1.5 * quantile_over_time(0.5, megarl_response_mean_tokens[2h] offset 2h))"
        ),
        lasting="30m",
        summary="run {{ $labels.run }}: the reward rises while held-out accuracy falls and responses grow or repeat",
    ),
    Alert(
        name="DegenerateResponses",
        severity="warn",
        text="megarl_response_empty_ratio > 0.5 or megarl_response_repetition_ratio > 0.5",
        lasting="15m",
        summary="run {{ $labels.run }}: half of what the policy writes is empty or repeats itself",
    ),
    Alert(
        name="NonFinite",
        severity="page",
        text="increase(megarl_skipped_updates_total[15m]) > 0",
        lasting="0s",
        summary="run {{ $labels.run }}: an update was skipped, its loss or gradient was not finite",
    ),
    Alert(
        name="GradientSpike",
        severity="warn",
        text="megarl_grad_norm > 10 * quantile_over_time(0.5, megarl_grad_norm[3h] offset 5m)",
        lasting="5m",
        summary="run {{ $labels.run }}: the gradient norm is {{ $value | humanize }}, ten times what it was",
    ),
    Alert(
        name="CriticUseless",
        severity="warn",
        text="megarl_explained_variance_ratio < 0",
        lasting="1h",
        summary="run {{ $labels.run }}: the critic's explained variance is {{ $value | humanize }}, a constant's is 0",
    ),
    Alert(
        name="ZeroVarianceGroups",
        severity="warn",
        text="megarl_zero_signal_group_ratio > 0.8",
        lasting="30m",
        summary="run {{ $labels.run }}: {{ $value | humanizePercentage }} of the groups teach nothing",
    ),
    Alert(
        name="Truncation",
        severity="warn",
        text="megarl_response_truncated_ratio > 0.3",
        lasting="30m",
        summary="run {{ $labels.run }}: {{ $value | humanizePercentage }} of the responses are cut at the length limit",
    ),
    Alert(
        name="EngineDown",
        severity="page",
        text='sum by (run) (megarl_engines{state=~"dead|restarting"}) / sum by (run) (megarl_engines) > 0.25',
        lasting="5m",
        summary="run {{ $labels.run }}: {{ $value | humanizePercentage }} of the engines are gone",
    ),
    Alert(
        name="RestartLoop",
        severity="page",
        text="increase(megarl_restarts_total[30m]) > 3",
        lasting="0s",
        summary="run {{ $labels.run }}: {{ $labels.role }} started again {{ $value | humanize }} times in 30 minutes",
    ),
    Alert(
        name="Straggler",
        severity="warn",
        text="increase(megarl_stragglers_total[1h]) > 0",
        lasting="0s",
        summary="run {{ $labels.run }}: a process of {{ $labels.role }} was named slow {{ $value | humanize }} times",
    ),
    Alert(
        name="NodeExcluded",
        severity="warn",
        text="megarl_excluded_nodes > 0",
        lasting="0s",
        summary="run {{ $labels.run }}: {{ $value }} node(s) get no engine any more after repeated faults",
    ),
    Alert(
        name="RolloutRetries",
        severity="warn",
        text=(
            "sum by (run) (rate(megarl_rollout_retries_total[15m]))"
            " > 0.05 * sum by (run) (rate(megarl_generated_rollouts_total[15m]))"
        ),
        lasting="10m",
        summary="run {{ $labels.run }}: more than 5 % of the requests to engines are sent again",
    ),
    Alert(
        name="RewardErrors",
        severity="warn",
        text=(
            "sum by (run) (rate(megarl_reward_failures_total[15m]))"
            " > 0.01 * (sum by (run) (rate(megarl_reward_seconds_count[15m]))"
            " + sum by (run) (rate(megarl_reward_failures_total[15m])))"
        ),
        lasting="5m",
        summary="run {{ $labels.run }}: more than 1 % of the rollouts get no score",
    ),
    Alert(
        name="GroupsDropped",
        severity="warn",
        text=(
            "sum by (run) (rate(megarl_dropped_groups_total[30m]))"
            " > 2 * sum by (run) (rate(megarl_trained_prompts_total[30m]))"
        ),
        lasting="30m",
        summary="run {{ $labels.run }}: for each group that is trained on, more than two are thrown away",
    ),
    Alert(
        name="QueueStarved",
        severity="warn",
        text=(
            "avg_over_time(megarl_trainer_wait_ratio[30m]) > 0.5"
            " and on (run) megarl_staleness_limit_steps > 0 and on (run) megarl_queue_groups == 0"
        ),
        lasting="15m",
        summary="run {{ $labels.run }}: the trainer waits for rollouts {{ $value | humanizePercentage }} of the time",
    ),
    Alert(
        name="QueueFull",
        severity="warn",
        text=(
            "avg_over_time(megarl_producer_wait_ratio[30m]) > 0.5"
            " and on (run) megarl_staleness_limit_steps > 0"
            " and on (run) megarl_queue_groups > 0.5 * megarl_queue_capacity_groups"
        ),
        lasting="15m",
        summary="run {{ $labels.run }}: the engines wait for the trainer {{ $value | humanizePercentage }} of the time",
    ),
    Alert(
        name="CheckpointTooOld",
        severity="page",
        text="megarl_step - megarl_checkpoint_step > 2 * megarl_checkpoint_interval_steps",
        lasting="5m",
        summary="run {{ $labels.run }}: {{ $value }} steps since the newest checkpoint, more than two intervals",
    ),
    Alert(
        name="CheckpointOverdue",
        severity="page",
        # A run that saves hourly saves every step if steps are longer.
        text=(
            "time() - (megarl_checkpoint_timestamp_seconds or megarl_run_start_timestamp_seconds)"
            " > 2 * (megarl_checkpoint_interval_seconds + megarl_step_seconds)"
        ),
        lasting="5m",
        summary="run {{ $labels.run }}: no checkpoint for {{ $value | humanizeDuration }}, and one is due every hour",
    ),
    Alert(
        name="CheckpointFailed",
        severity="page",
        text="increase(megarl_checkpoint_failures_total[1h]) > 0",
        lasting="0s",
        summary="run {{ $labels.run }}: a checkpoint was not saved",
    ),
    Alert(
        name="DiskFills",
        severity="page",
        text="megarl_checkpoint_free_bytes < 2 * megarl_checkpoint_bytes",
        lasting="0s",
        summary="run {{ $labels.run }}: {{ $value | humanize1024 }}B free, less than the next two checkpoints need",
    ),
    Alert(
        name="GpuMemoryHigh",
        severity="warn",
        text="megarl_gpu_memory_allocated_bytes / megarl_gpu_memory_total_bytes > 0.95",
        lasting="10m",
        summary="run {{ $labels.run }}: {{ $labels.role }} fills its GPUs to {{ $value | humanizePercentage }}",
    ),
    Alert(
        name="GpuErrors",
        severity="page",
        text=(
            "megarl_gpu_uncorrected_errors - megarl_gpu_uncorrected_errors offset 15m > 0"
            " or megarl_gpu_xid_errors - megarl_gpu_xid_errors offset 15m > 0"
        ),
        lasting="0s",
        summary="run {{ $labels.run }}: {{ $value }} new errors of GPUs; the warnings of the run name node and GPU",
    ),
    Alert(
        name="GpuNeedsReset",
        severity="warn",
        text="megarl_gpu_needs_reset > 0",
        lasting="0s",
        summary="run {{ $labels.run }}: {{ $value }} GPUs have rows of memory that only a reset replaces",
    ),
    Alert(
        name="GpuThrottled",
        severity="warn",
        text="megarl_gpu_throttled > 0",
        lasting="10m",
        summary="run {{ $labels.run }}: {{ $value }} GPUs are slowed down by heat or power; every step waits for them",
    ),
    Alert(
        name="HostMemoryHigh",
        severity="page",
        text="megarl_host_memory_available_bytes / megarl_host_memory_total_bytes < 0.05",
        lasting="5m",
        summary="run {{ $labels.run }}: {{ $value | humanizePercentage }} of {{ $labels.role }}'s host memory is left",
    ),
    Alert(
        name="TargetDown",
        severity="page",
        text='up{job=~"megarl|sglang"} == 0',
        lasting="2m",
        summary="run {{ $labels.run }}: {{ $labels.job }} at {{ $labels.instance }} does not answer Prometheus",
    ),
)


def to_rules() -> dict[str, JsonValue]:
    """Return the content of a rule file."""
    return {"groups": [{"name": "megarl", "rules": list(_rules())}]}


def _rules() -> Iterator[JsonValue]:
    for alert in ALERTS:
        yield {
            "alert": alert.full_name,
            "expr": alert.text,
            "for": alert.lasting,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "runbook": f"{RUNBOOK}#{alert.anchor}"},
        }
