"""Every metric of a run, as data: name, kind, unit, labels, meaning. Nobody invents a name anywhere else.

Prometheus, the loggers, the dashboards, the alerts and docs/metrics.md are made from this table. Every metric also has
the label `run`. Names end in their unit; `limit` bounds how many values a metric's labels may take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "megarl_"
RUN_LABEL = "run"

Kind = Literal["gauge", "counter", "histogram"]
Section = Literal[
    "run", "data", "reward", "rollout", "fleet", "publish", "trainer", "critic", "eval", "checkpoint", "machine"
]
Unit = Literal["", "seconds", "bytes", "ratio", "tokens", "steps", "groups", "nats", "per_second"]

MAX_SERIES = 2000
"""Of one process, whatever a run does."""

_SHORT_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)
_LONG_S = (0.05, 0.2, 1.0, 5.0, 20.0, 60.0, 300.0, 1800.0)
_MAX_ENGINES = 256
_MAX_ROLES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """Each is itself and no other: looking one up must not take as long as comparing all of it."""

    name: str
    """Without the prefix and without the `_total` of a counter."""
    kind: Kind
    section: Section
    unit: Unit
    text: str
    labels: tuple[str, ...] = ()
    """Besides `run`."""
    limit: int = 1
    """Sets of label values; what comes after them is counted in `refused_series`, not shown."""
    known: tuple[str, ...] = ()
    """Values of the one label that are 0 from the start: Prometheus sees no growth of what was not there before."""
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """As Prometheus stores it; a histogram has `_bucket`, `_sum` and `_count` behind this."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    @property
    def stored_names(self) -> tuple[str, ...]:
        """What a query may ask for."""
        if self.kind == "histogram":
            return tuple(f"{self.full_name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.full_name,)

    @property
    def max_series(self) -> int:
        # A histogram has a bucket without an upper bound, a sum and a count.
        return self.limit * (len(self.buckets) + 3 if self.kind == "histogram" else 1)


def _gauge(section: Section, name: str, text: str, *labels: str, unit: Unit = "", limit: int = 1) -> Metric:
    return Metric(name=name, kind="gauge", section=section, unit=unit, text=text, labels=labels, limit=limit)


def _counter(
    section: Section,
    name: str,
    text: str,
    label: str | None = None,
    *,
    unit: Unit = "",
    limit: int = 1,
    known: tuple[str, ...] = (),
) -> Metric:
    labels = () if label is None else (label,)
    return Metric(
        name=name, kind="counter", section=section, unit=unit, text=text, labels=labels, limit=limit, known=known
    )


def _histogram(section: Section, name: str, text: str, *, buckets: tuple[float, ...]) -> Metric:
    return Metric(name=name, kind="histogram", section=section, unit="seconds", text=text, buckets=buckets)


BUILD_INFO = _gauge(
    "run", "build_info", "1, with the versions that run", "megarl", "python", "torch", "megatron_core", "sglang", "ray"
)
RUN_INFO = _gauge("run", "run_info", "1, with what is run", "algorithm", "model", "device")
RUN_STEPS = _gauge("run", "run_steps", "Steps the recipe asks for", unit="steps")
RUN_GPUS = _gauge("run", "run_gpus", "GPUs, on CPU processes, of all pools")
RUN_START = _gauge("run", "run_start_timestamp_seconds", "When this process began, since the epoch", unit="seconds")
STEP = _gauge("run", "step", "Steps finished")
LAST_STEP = _gauge("run", "last_step_timestamp_seconds", "When the last step finished, since the epoch", unit="seconds")
STEP_SECONDS = _gauge("run", "step_seconds", "Duration of the last step", unit="seconds")
REMAINING = _gauge("run", "remaining_seconds", "Until the last step, at the mean pace so far", unit="seconds")
PHASE_SECONDS = _counter(
    "run",
    "phase_seconds",
    "Time spent in each phase",
    "phase",
    unit="seconds",
    limit=12,
    known=("start", "generate", "assign", "update", "publish", "evaluate", "save"),
)
EFFECTIVE_TIME = _gauge(
    "run",
    "effective_time_ratio",
    "Seconds of steps that count, over all time since the run was first started (ETTR)",
    unit="ratio",
)
TRAINER_WAIT = _gauge(
    "run", "trainer_wait_ratio", "Share of the last step in which the trainer waited for rollouts", unit="ratio"
)
PRODUCER_WAIT = _gauge(
    "run", "producer_wait_ratio", "Share of it in which the mean producer waited for the trainer", unit="ratio"
)
TRAINED_TOKENS = _counter("run", "trained_tokens", "Prompt and response tokens trained on", unit="tokens")
TOKENS_PER_SECOND = _gauge("run", "tokens_per_second", "Tokens of the last step over its duration", unit="per_second")
WARNINGS = _counter("run", "warnings", "Warnings shown")
REFUSED_SERIES = _counter("run", "refused_series", "Values that were not exported, for they had too many labels")

EPOCH = _gauge("data", "epoch", "How often the data had been read before the last step's newest prompt")
DATA_PROMPTS = _gauge("data", "data_prompts", "Prompts in the training data")
DATA_DROPPED = _gauge("data", "data_dropped_prompts", "Prompts of the training data that were too long")
TRAINED_PROMPTS = _counter("data", "trained_prompts", "Groups trained on")
PROMPT_TOKENS = _gauge("data", "prompt_mean_tokens", "Mean length of a prompt of the last step", unit="tokens")

REWARD_MEAN = _gauge("reward", "reward_mean", "Mean reward of the last step's rollouts")
REWARD_STD = _gauge("reward", "reward_std", "Standard deviation of the last step's rewards")
REWARD_MIN = _gauge("reward", "reward_min", "Lowest reward of the last step")
REWARD_MAX = _gauge("reward", "reward_max", "Highest reward of the last step")
REWARD_COMPONENT = _gauge(
    "reward", "reward_component_mean", "Mean of each component of the score", "component", limit=64
)
REWARD_OUTLIERS = _counter("reward", "reward_outliers", "Rewards beyond 6 robust deviations of their step")
MASKED_ROLLOUTS = _counter("reward", "masked_rollouts", "Rollouts of trained groups that nobody could score")
REWARD_SECONDS = _histogram("reward", "reward_seconds", "Time to score one rollout, waiting included", buckets=_SHORT_S)
REWARD_FAILURES = _counter(
    "reward",
    "reward_failures",
    "Rollouts that the reward gave no score",
    "cause",
    limit=16,
    known=("error", "late", "worker_died"),
)
ZERO_SIGNAL = _gauge("reward", "zero_signal_group_ratio", "Share of groups from which nothing is learned", unit="ratio")
ZERO_SIGNAL_STEPS = _counter("reward", "zero_signal_steps", "Steps in which no group has signal", unit="steps")
SINGLE_GROUPS = _gauge("reward", "single_rollout_groups", "Groups of one rollout in the last step", unit="groups")

RESPONSE_MEAN = _gauge("rollout", "response_mean_tokens", "Mean length of a response", unit="tokens")
RESPONSE_MAX = _gauge("rollout", "response_max_tokens", "Longest response of the last step", unit="tokens")
TRUNCATED = _gauge("rollout", "response_truncated_ratio", "Share of responses cut at the length limit", unit="ratio")
EMPTY = _gauge("rollout", "response_empty_ratio", "Share of responses of at most one token", unit="ratio")
REPETITION = _gauge(
    "rollout",
    "response_repetition_ratio",
    "Share of 4-token windows that occurred before in the same response, of up to 64 responses",
    unit="ratio",
)
GENERATED_ROLLOUTS = _counter("rollout", "generated_rollouts", "Rollouts generated to train on")
GENERATED_TOKENS = _counter("rollout", "generated_tokens", "Tokens of these rollouts", unit="tokens")
GROUP_SECONDS = _histogram(
    "rollout", "group_seconds", "Time to generate the rollouts of one prompt, waiting included", buckets=_LONG_S
)
GROUP_TAIL = _gauge("rollout", "group_tail_ratio", "Slowest group since the step before, over the median", unit="ratio")
RETRIES = _counter(
    "rollout",
    "rollout_retries",
    "Requests sent again, by kind of error",
    "cause",
    limit=16,
    known=("EngineError", "EngineLostError", "BadReplyError", "WrongVersionError"),
)
DROPPED_GROUPS = _counter(
    "rollout",
    "dropped_groups",
    "Groups generated and not trained on, by cause",
    "cause",
    unit="groups",
    limit=16,
    known=("equal", "masked"),
)
QUEUE = _gauge("rollout", "queue_groups", "Scored groups that wait to be trained on", unit="groups")
QUEUE_CAPACITY = _gauge("rollout", "queue_capacity_groups", "The most that may wait or be under way", unit="groups")
UNDER_WAY = _gauge("rollout", "under_way_groups", "Groups being generated or scored", unit="groups")
STALENESS_MEAN = _gauge(
    "rollout", "staleness_mean_steps", "Steps between a trained token's policy and the trained one", unit="steps"
)
STALENESS_MAX = _gauge("rollout", "staleness_max_steps", "The same for the oldest token of the step", unit="steps")
STALENESS_LIMIT = _gauge("rollout", "staleness_limit_steps", "What the recipe allows", unit="steps")
OLDEST_VERSION = _gauge("rollout", "oldest_trained_version", "Oldest policy that chose a token of the last step")

ENGINES = _gauge("fleet", "engines", "Engines by what they are doing", "state", limit=12)
ENGINE_VERSION = _gauge(
    "fleet", "engine_weight_version", "Version that each engine serves", "engine", limit=_MAX_ENGINES
)
ENGINE_REQUESTS = _gauge("fleet", "engine_requests", "Requests that each engine works on", "engine", limit=_MAX_ENGINES)
RESTARTS = _counter(
    "fleet",
    "restarts",
    "Processes that were started again, by role",
    "role",
    limit=_MAX_ROLES,
    known=("rollout", "trainers"),
)

ACTOR_VERSION = _gauge("publish", "actor_weight_version", "Version the trainer holds")
ROLLOUT_VERSION = _gauge("publish", "rollout_weight_version", "Version committed on the engines")
PUBLISHES = _counter("publish", "publishes", "Versions published")
PUBLISH_FAILURES = _counter("publish", "publish_failures", "Publishes that were taken back")
PUBLISH_SECONDS = _gauge("publish", "publish_seconds", "Duration of the last publish", unit="seconds")
PUBLISH_BYTES = _gauge(
    "publish", "publish_bytes", "Bytes that the busiest rank moved in the last publish", unit="bytes"
)
PUBLISH_FLOOR = _gauge("publish", "publish_floor_bytes", "The least it could have moved", unit="bytes")
PUBLISH_TOTAL = _gauge("publish", "publish_total_bytes", "Bytes that all engines received in it", unit="bytes")
PUBLISHED_ENGINES = _gauge("publish", "published_engines", "Engines that took the last publish")

LOSS = _gauge("trainer", "loss", "Loss of the last update")
GRAD_NORM = _gauge("trainer", "grad_norm", "Gradient norm before clipping")
LEARNING_RATE = _gauge("trainer", "learning_rate", "Learning rate of the last update")
ENTROPY = _gauge("trainer", "entropy_nats", "Mean entropy of the policy over loss tokens", unit="nats")
CLIP = _gauge("trainer", "clip_ratio", "Share of loss tokens whose ratio was clipped", unit="ratio")
UPDATE_KL = _gauge("trainer", "update_kl_nats", "KL between the policy before and after the update", unit="nats")
MISMATCH_MEAN = _gauge("trainer", "mismatch_mean", "Mean |p_train - p_rollout| over loss tokens")
MISMATCH_MAX = _gauge("trainer", "mismatch_max", "Largest |p_train - p_rollout| of the last step")
ENGINE_MISMATCH = _gauge("trainer", "engine_mismatch_mean", "The same over tokens of the version that was trained")
POLICY_DRIFT = _gauge("trainer", "policy_drift_mean", "The same over tokens of earlier versions")
BEHIND = _gauge("trainer", "behind_ratio", "Share of loss tokens that earlier versions chose", unit="ratio")
MISMATCH_BASELINE = _gauge("trainer", "mismatch_baseline", "Median of engine_mismatch_mean over the first 8 steps")
MISMATCH_KL = _gauge("trainer", "mismatch_kl_nats", "KL(rollout || train) by its plain estimate k1", unit="nats")
MISMATCH_K3 = _gauge("trainer", "mismatch_k3_nats", "KL(rollout || train) by its estimate k3", unit="nats")
MISMATCH_CHI2 = _gauge("trainer", "mismatch_chi2", "Mean squared p_train / p_rollout, minus 1")
EFFECTIVE_SAMPLES = _gauge(
    "trainer", "effective_sample_ratio", "Share of loss tokens left after weighing by that ratio", unit="ratio"
)
REJECTED = _gauge(
    "trainer", "rejected_ratio", "Share of loss tokens that the rollout correction took out", unit="ratio"
)
REFERENCE_KL = _gauge("trainer", "reference_kl_nats", "KL(policy || reference) over loss tokens", unit="nats")
KL_COEFFICIENT = _gauge("trainer", "kl_coefficient", "What the distance from the reference costs")
SKIPPED_UPDATES = _counter("trainer", "skipped_updates", "Updates whose loss or gradient was not finite")
LOSS_TOKENS = _gauge("trainer", "loss_tokens", "Tokens in the loss of the last step", unit="tokens")
MICRO_BATCHES = _gauge("trainer", "micro_batches", "Micro-batches of one data-parallel rank in the last step")
TRAIN_FLOPS = _gauge(
    "trainer", "train_flops_per_second", "Model FLOP of the last step's updates over their time", unit="per_second"
)
MFU = _gauge("trainer", "mfu_ratio", "The same over what the actor's GPUs can do at most", unit="ratio")

VALUE_LOSS = _gauge("critic", "value_loss", "Loss of the critic's last updates")
VALUE_GRAD_NORM = _gauge("critic", "value_grad_norm", "Gradient norm of the critic before clipping")
VALUE_LEARNING_RATE = _gauge("critic", "value_learning_rate", "Learning rate of the critic's last update")
VALUE_CLIP = _gauge("critic", "value_clip_ratio", "Share of values whose change was clipped", unit="ratio")
VALUE_MEAN = _gauge("critic", "value_mean", "Mean value of the last step's tokens before its updates")
RETURN_MEAN = _gauge("critic", "return_mean", "Mean return of the last step's tokens")
EXPLAINED_VARIANCE = _gauge(
    "critic", "explained_variance_ratio", "Share of the returns' variance that the critic foresaw", unit="ratio"
)

EVAL = _gauge("eval", "eval", "Numbers of the last evaluation: accuracy, score, pass@4 and so on", "number", limit=32)
EVAL_SOURCE = _gauge("eval", "eval_by_source", "The same, per data source", "number", "source", limit=256)
EVAL_STEP = _gauge("eval", "eval_step", "Step after which the last evaluation ran")
EVAL_SECONDS = _gauge("eval", "eval_seconds", "Duration of the last evaluation", unit="seconds")

CHECKPOINT_STEP = _gauge("checkpoint", "checkpoint_step", "Step of the newest complete checkpoint, 0 without one")
CHECKPOINT_TIME = _gauge(
    "checkpoint",
    "checkpoint_timestamp_seconds",
    "When the newest complete one was there, since the epoch",
    unit="seconds",
)
CHECKPOINT_INTERVAL = _gauge("checkpoint", "checkpoint_interval_steps", "Steps between two saves", unit="steps")
CHECKPOINT_BLOCKING = _gauge(
    "checkpoint", "checkpoint_blocking_seconds", "How long training stood still for the last", unit="seconds"
)
CHECKPOINT_SECONDS = _gauge(
    "checkpoint", "checkpoint_seconds", "Duration of the whole save, most of it behind training", unit="seconds"
)
CHECKPOINT_BYTES = _gauge("checkpoint", "checkpoint_bytes", "Size of the last checkpoint", unit="bytes")
CHECKPOINT_FREE = _gauge("checkpoint", "checkpoint_free_bytes", "Free on the disk of the run folder", unit="bytes")
CHECKPOINT_FAILURES = _counter("checkpoint", "checkpoint_failures", "Saves that failed")

HOST_TOTAL = _gauge(
    "machine",
    "host_memory_total_bytes",
    "Of the node where a role has least available",
    "role",
    unit="bytes",
    limit=_MAX_ROLES,
)
HOST_AVAILABLE = _gauge(
    "machine",
    "host_memory_available_bytes",
    "Without swapping, on the node of a role that has least",
    "role",
    unit="bytes",
    limit=_MAX_ROLES,
)
RESIDENT = _gauge(
    "machine",
    "resident_memory_bytes",
    "Host memory of a role's largest process",
    "role",
    unit="bytes",
    limit=_MAX_ROLES,
)
GPU_ALLOCATED = _gauge(
    "machine",
    "gpu_memory_allocated_bytes",
    "Peak of tensors in the last step, on the fullest rank",
    "role",
    unit="bytes",
    limit=_MAX_ROLES,
)
GPU_RESERVED = _gauge(
    "machine",
    "gpu_memory_reserved_bytes",
    "Peak that the allocator held, on the fullest rank",
    "role",
    unit="bytes",
    limit=_MAX_ROLES,
)
GPU_TOTAL = _gauge(
    "machine", "gpu_memory_total_bytes", "Of one GPU of the role", "role", unit="bytes", limit=_MAX_ROLES
)

METRICS: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric))
"""In the order above."""
