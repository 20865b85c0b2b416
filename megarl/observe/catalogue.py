"""The table of metrics: name, kind, labels, meaning and source of each, and how many series are exported.

No other module defines a metric's name. Prometheus, the loggers, the dashboards, the alerts and docs/metrics.md are
made from this table. Every metric also has the label `run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

PREFIX = "megarl_"
RUN_LABEL = "run"

Kind = Literal["gauge", "counter", "histogram"]
Section = Literal[
    "run", "data", "reward", "rollout", "fleet", "publish", "trainer", "critic", "preference", "eval", "checkpoint",
    "machine",
]  # fmt: skip

MAX_SERIES = 2000
"""Bound on the series of one process."""

_SHORT_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)
_LONG_S = (0.05, 0.2, 1.0, 5.0, 20.0, 60.0, 300.0, 1800.0)
_LABEL_VALUES = {
    "phase": 12, "component": 64, "cause": 16, "state": 12, "engine": 256, "role": 8, "number": 32, "source": 8,
    "sink": 8, "ending": 8, "layer": 128,
}  # fmt: skip
"""Exported values of each label; a label that is not here has one value in a run."""
_UNITS = ("per_second", "seconds", "bytes", "ratio", "tokens", "steps", "groups", "nats")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """One row of the table. Compared by identity, which makes it a cheap dictionary key."""

    name: str
    """Has neither the prefix nor the `_total` of a counter; ends in the unit, if there is one."""
    kind: Kind
    section: Section
    text: str
    labels: tuple[str, ...] = ()
    """All labels but `run`."""
    source: str = ""
    """Field that `Metrics` reads: of a step's summary (`step.`), a publish (`publish.`), an evaluation (`evaluation.`)
    or a saved checkpoint (`save.`). `*` stands for every key of a mapping, the label's value. Empty: set by code."""
    known: tuple[str, ...] = ()
    """Label values exported as 0 from the start: Prometheus sees no increase in a series that did not exist before."""
    buckets: tuple[float, ...] = ()

    @property
    def unit(self) -> str:
        """The unit that the name ends in; empty without one."""
        return next((unit for unit in _UNITS if self.name.endswith(f"_{unit}")), "")

    @property
    def limit(self) -> int:
        """Exported combinations of label values; values of further ones are counted in `refused_series`."""
        return prod(_LABEL_VALUES.get(label, 1) for label in self.labels)

    @property
    def full_name(self) -> str:
        """The name in Prometheus; the series of a histogram append `_bucket`, `_sum` and `_count` to it."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names that a query may use."""
        if self.kind == "histogram":
            return tuple(f"{self.full_name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.full_name,)


def _gauge(section: Section, name: str, text: str, *labels: str, source: str = "") -> Metric:
    return Metric(name=name, kind="gauge", section=section, text=text, labels=labels, source=source)


def _counter(
    section: Section, name: str, text: str, *labels: str, source: str = "", known: tuple[str, ...] = ()
) -> Metric:
    return Metric(name=name, kind="counter", section=section, text=text, labels=labels, source=source, known=known)


def _histogram(section: Section, name: str, text: str, *, buckets: tuple[float, ...]) -> Metric:
    return Metric(name=name, kind="histogram", section=section, text=text, buckets=buckets)


def _rollouts(section: Section, name: str, text: str, *, field: str) -> Metric:
    return _gauge(section, name, text, source=f"step.rollouts.{field}")


def _update(name: str, text: str, *labels: str, field: str) -> Metric:
    return _gauge("trainer", name, text, *labels, source=f"step.update.{field}")


def _numbers(section: Section, *rows: tuple[str, str, str]) -> Iterator[Metric]:
    """Yield the metrics of a step's statistics: name, text and field of each."""
    return (_gauge(section, name, text, source=f"step.{section}.{field}") for name, text, field in rows)


def _saves(*rows: tuple[str, str, str]) -> Iterator[Metric]:
    """Yield the metrics of the last save: name, text and field of each."""
    return (_gauge("checkpoint", f"checkpoint_{name}", text, source=f"save.{field}") for name, text, field in rows)


def _usage(name: str, text: str, *, field: str) -> Metric:
    return _gauge("machine", name, text, "role", source=f"step.usage.*.{field}")


BUILD_INFO = _gauge(
    "run", "build_info", "1; the labels are versions", "megarl", "python", "torch", "megatron_core", "sglang", "ray"
)
RUN_INFO = _gauge("run", "run_info", "1; the labels describe the run", "algorithm", "model", "device")
RUN_STEPS = _gauge("run", "run_steps", "Steps in the recipe")
RUN_GPUS = _gauge("run", "run_gpus", "GPUs of all pools; on CPU, processes")
RUN_START = _gauge("run", "run_start_timestamp_seconds", "Start of this process, since the epoch")
STEP = _gauge("run", "step", "Steps finished", source="step.step")
LAST_STEP = _gauge("run", "last_step_timestamp_seconds", "End of the last step, since the epoch")
STEP_SECONDS = _gauge("run", "step_seconds", "Duration of the last step", source="step.seconds")
REMAINING = _gauge("run", "remaining_seconds", "Time until the last step ends, at the mean pace so far")
GPU_HOURS = _gauge("run", "gpu_hours", "GPU hours of the run so far, over all its starts; none on CPUs")
GPU_HOURS_STEP = _gauge("run", "step_gpu_hours", "GPU hours of the last step")
GPU_HOURS_PROJECTED = _gauge("run", "projected_gpu_hours", "GPU hours at the end of the run, at the mean pace so far")
COST = _gauge("run", "cost", "gpu_hours at the recipe's cluster.gpu_hour_price; none without a price")
COST_STEP = _gauge("run", "step_cost", "step_gpu_hours at that price")
COST_PROJECTED = _gauge("run", "projected_cost", "projected_gpu_hours at that price")
PHASE_SECONDS = _counter(
    "run",
    "phase_seconds",
    "Time spent in each phase",
    "phase",
    known=("start", "generate", "assign", "update", "publish", "evaluate", "save"),
)
EFFECTIVE_TIME = _gauge(
    "run", "effective_time_ratio", "Time of steps that were not lost, over all time since the run first started (ETTR)"
)
TRAINER_WAIT = _gauge("run", "trainer_wait_ratio", "Share of the last step in which the trainer waited for rollouts")
PRODUCER_WAIT = _gauge(
    "run", "producer_wait_ratio", "Share of the last step in which producers waited for the trainer, mean"
)
TRAINED_TOKENS = _counter("run", "trained_tokens", "Prompt and response tokens trained on", source="step.num_tokens")
TOKENS_PER_SECOND = _gauge(
    "run", "tokens_per_second", "Tokens of the last step over its duration", source="step.tokens_per_second"
)
WARNINGS = _counter("run", "warnings", "Warnings shown")
SINK_FAILURES = _counter(
    "run",
    "sink_failures",
    "Events that a file or a display of the run could not take",
    "sink",
    known=("EventLog", "Targets"),
)
REFUSED_SERIES = _counter("run", "refused_series", "Values not exported because their metric has too many label values")

EPOCH = _gauge("data", "epoch", "Epoch of the last step's newest prompt, from 0", source="step.epoch")
DATA_PROMPTS = _gauge("data", "data_prompts", "Prompts in the training data")
DATA_DROPPED = _gauge("data", "data_dropped_prompts", "Prompts of the training data dropped for their length")
TRAINED_PROMPTS = _counter("data", "trained_prompts", "Groups trained on", source="step.num_prompts")
PROMPT_TOKENS = _gauge(
    "data", "prompt_mean_tokens", "Mean length of the last step's prompts", source="step.prompt_tokens_mean"
)

REWARD_MEAN = _rollouts("reward", "reward_mean", "Mean reward of the last step", field="reward_mean")
REWARD_STD = _rollouts("reward", "reward_std", "Standard deviation of the last step's rewards", field="reward_std")
REWARD_MIN = _rollouts("reward", "reward_min", "Lowest reward of the last step", field="reward_min")
REWARD_MAX = _rollouts("reward", "reward_max", "Highest reward of the last step", field="reward_max")
REWARD_COMPONENT = _gauge(
    "reward",
    "reward_component_mean",
    "Mean of each component of the score",
    "component",
    source="step.rollouts.component_means.*",
)
REWARD_OUTLIERS = _counter(
    "reward",
    "reward_outliers",
    "Rewards far from their step's median and from all others",
    source="step.rollouts.num_reward_outliers",
)
MASKED_ROLLOUTS = _counter(
    "reward",
    "masked_rollouts",
    "Rollouts of trained groups that could not be scored",
    source="step.rollouts.num_masked_rollouts",
)
REWARD_SECONDS = _histogram("reward", "reward_seconds", "Time to score one rollout, waiting included", buckets=_SHORT_S)
REWARD_FAILURES = _counter(
    "reward",
    "reward_failures",
    "Rollouts that got no score",
    "cause",
    known=("error", "late", "machine_fault", "worker_died"),
)
JUDGE_ADDRESSED = _counter(
    "reward",
    "judge_addressed",
    "Responses with the texts of control tokens of their judge, which reads them as plain text",
)
ZERO_SIGNAL = _rollouts(
    "reward", "zero_signal_group_ratio", "Share of groups whose advantages are all 0", field="zero_signal_ratio"
)
ZERO_SIGNAL_STEPS = _counter("reward", "zero_signal_steps", "Steps in which every group's advantages are 0")
SINGLE_GROUPS = _rollouts(
    "reward", "single_rollout_groups", "Groups of one rollout in the last step", field="num_single_groups"
)

RESPONSE_MEAN = _rollouts(
    "rollout", "response_mean_tokens", "Mean length of the last step's responses", field="response_tokens_mean"
)
RESPONSE_MAX = _rollouts(
    "rollout", "response_max_tokens", "Longest response of the last step", field="response_tokens_max"
)
TRUNCATED = _rollouts(
    "rollout", "response_truncated_ratio", "Share of responses cut at the length limit", field="truncated_ratio"
)
EMPTY = _rollouts("rollout", "response_empty_ratio", "Share of responses of at most one token", field="empty_ratio")
REPETITION = _rollouts(
    "rollout",
    "response_repetition_ratio",
    "Share of 4-token windows that occurred before in the same response; mean of the first of up to 64 groups",
    field="repetition_ratio",
)
GENERATED_ROLLOUTS = _counter("rollout", "generated_rollouts", "Rollouts generated for training")
GENERATED_TOKENS = _counter("rollout", "generated_tokens", "Tokens generated for training")
GROUP_SECONDS = _histogram(
    "rollout", "group_seconds", "Time to generate the rollouts of one prompt, waiting included", buckets=_LONG_S
)
GROUP_TAIL = _gauge("rollout", "group_tail_ratio", "Time of the slowest group of the last step over the median group's")
RETRIES = _counter(
    "rollout",
    "rollout_retries",
    "Requests sent again, by error class",
    "cause",
    known=("EngineError", "EngineLostError", "BadReplyError", "WrongVersionError", "late"),
)
DROPPED_GROUPS = _counter(
    "rollout",
    "dropped_groups",
    "Groups that the algorithm's filter or the quarantine dropped, by cause",
    "cause",
    source="step.rollouts.dropped_groups.*",
    known=("equal", "masked"),
)
EPISODE_ENDINGS = _counter(
    "rollout", "episodes", "Trained episodes by ending", "ending", source="step.rollouts.episodes.endings.*"
)
EPISODE_TURNS = _rollouts("rollout", "episode_turns_mean", "Responses per episode", field="episodes.turns_mean")
EPISODE_CALLS = _rollouts("rollout", "episode_calls_mean", "Answered turns per episode", field="episodes.calls_mean")
EPISODE_ROWS = _rollouts("rollout", "episode_rows_mean", "Trained sequences per episode", field="episodes.rows_mean")
EPISODE_TOOLS = _rollouts(
    "rollout", "episode_tool_seconds", "Mean time of an episode's calls", field="episodes.tool_seconds_mean"
)
CACHED_PROMPTS = _gauge(
    "rollout",
    "cached_prompt_ratio",
    "Share of the tokens of requests, prompts and histories of episodes, that engines found in their caches",
    source="step.cached_prompt_ratio",
)
TOKENS_PER_PASS = _gauge(
    "rollout",
    "tokens_per_pass",
    "Tokens of a response for each pass of the policy over drafted ones; 1 where no draft is kept",
    source="step.tokens_per_pass",
)
QUEUE = _gauge("rollout", "queue_groups", "Scored groups waiting to be trained on")
QUEUE_CAPACITY = _gauge("rollout", "queue_capacity_groups", "Limit on groups that wait or are in progress")
UNDER_WAY = _gauge("rollout", "under_way_groups", "Groups being generated or scored")
_TEXT = "Steps between the policy that chose a trained token and the trained policy, mean"
STALENESS_MEAN = _gauge("rollout", "staleness_mean_steps", _TEXT, source="step.flow.age_mean")
STALENESS_MAX = _gauge(
    "rollout", "staleness_max_steps", "The same for the oldest token of the step", source="step.flow.age_max"
)
STALENESS_LIMIT = _gauge("rollout", "staleness_limit_steps", "The recipe's train.max_staleness")
OLDEST_VERSION = _rollouts(
    "rollout", "oldest_trained_version", "Oldest policy that chose a token of the last step", field="oldest_version"
)

ENGINES = _gauge("fleet", "engines", "Engines by state", "state")
ENGINE_VERSION = _gauge("fleet", "engine_weight_version", "Version that each engine serves", "engine")
ENGINE_REQUESTS = _gauge("fleet", "engine_requests", "Requests in progress on each engine", "engine")
RESTARTS = _counter("fleet", "restarts", "Processes started again, by role", "role", known=("rollout", "trainers"))
SLOWEST = _gauge("fleet", "slowest_over_median_ratio", "Time of the slowest rank or engine over the median", "role")
STRAGGLERS = _counter("fleet", "stragglers", "Ranks and engines named slow", "role", known=("rollout", "actor"))
EXCLUDED_NODES = _gauge("fleet", "excluded_nodes", "Nodes that get no engine any more after repeated faults")

ACTOR_VERSION = _gauge("publish", "actor_weight_version", "Version that the trainer holds", source="step.version")
ROLLOUT_VERSION = _gauge(
    "publish", "rollout_weight_version", "Version committed on the engines", source="publish.version"
)
PUBLISHES = _counter("publish", "publishes", "Versions published")
PUBLISH_FAILURES = _counter("publish", "publish_failures", "Publishes that failed and were rolled back")
PUBLISH_SECONDS = _gauge("publish", "publish_seconds", "Duration of the last publish", source="publish.seconds")
PUBLISH_BYTES = _gauge(
    "publish", "publish_bytes", "Bytes that the busiest rank moved in the last publish", source="publish.busiest_bytes"
)
PUBLISH_FLOOR = _gauge(
    "publish", "publish_floor_bytes", "Least bytes that the busiest rank could have moved", source="publish.floor_bytes"
)
PUBLISH_TOTAL = _gauge(
    "publish", "publish_total_bytes", "Bytes that all engines received in the last publish", source="publish.num_bytes"
)
PUBLISHED_ENGINES = _gauge("publish", "published_engines", "Engines in the last publish", source="publish.num_engines")
ADAPTERS = _gauge("publish", "adapter_versions", "Versions of an adapter on one engine", source="publish.num_adapters")
MAX_ADAPTERS = _gauge("publish", "adapter_versions_limit", "The most that it may have", source="publish.max_adapters")

LOSS = _update("loss", "Loss of the last step's updates", field="loss")
GRAD_NORM = _update("grad_norm", "Gradient norm before clipping", field="grad_norm")
LEARNING_RATE = _update("learning_rate", "Learning rate of the last update", field="learning_rate")
ENTROPY = _update("entropy_nats", "Mean entropy of the policy over loss tokens", field="entropy")
CLIP = _update("clip_ratio", "Share of loss tokens whose ratio was clipped", field="clip_fraction")
UPDATE_KL = _update("update_kl_nats", "KL between the policy before and after the update", field="approx_kl")
MISMATCH_MEAN = _update("mismatch_mean", "Mean |p_train - p_rollout| over loss tokens", field="mismatch_mean")
MISMATCH_MAX = _update("mismatch_max", "Largest |p_train - p_rollout| of the last step", field="mismatch_max")
ENGINE_MISMATCH = _update(
    "engine_mismatch_mean", "Mean |p_train - p_rollout| over tokens of the trained version", field="engine_mismatch"
)
POLICY_DRIFT = _update(
    "policy_drift_mean", "Mean |p_train - p_rollout| over tokens of earlier versions", field="policy_drift"
)
BEHIND = _update("behind_ratio", "Share of loss tokens of earlier versions", field="behind_fraction")
REPLAYED = _update("replayed_ratio", "Share of trained positions with the engine's experts", field="replayed_fraction")
_TEXT = "Share of replayed tokens that the trainer's own router had sent to another expert"
ROUTING_DISAGREEMENT = _update("routing_disagreement_ratio", _TEXT, "layer", field="routing_disagreement.*")
MISMATCH_BASELINE = _gauge("trainer", "mismatch_baseline", "Median of engine_mismatch_mean over the first 8 steps")
MISMATCH_KL = _update("mismatch_kl_nats", "KL(rollout || train), estimator k1", field="mismatch_kl")
MISMATCH_K3 = _update("mismatch_k3_nats", "KL(rollout || train), estimator k3", field="mismatch_k3")
MISMATCH_CHI2 = _update("mismatch_chi2", "Mean squared p_train / p_rollout, minus 1", field="mismatch_chi2")
EFFECTIVE_SAMPLES = _update(
    "effective_sample_ratio",
    "Effective share of loss tokens when weighted by p_train / p_rollout",
    field="effective_sample_ratio",
)
REJECTED = _update(
    "rejected_ratio", "Share of loss tokens that the rollout correction removed", field="rejected_fraction"
)
REFERENCE_KL = _update("reference_kl_nats", "KL(policy || reference) over loss tokens", field="reference_kl")
TEACHER_KL = _update("teacher_kl_nats", "Distance from the teacher over loss tokens", field="teacher_kl")
KL_COEFFICIENT = _gauge("trainer", "kl_coefficient", "Weight of the KL to the reference", source="step.kl_coef")
SKIPPED_UPDATES = _counter(
    "trainer", "skipped_updates", "Updates whose loss or gradient was not finite", source="step.num_skipped_updates"
)
LOSS_TOKENS = _update("loss_tokens", "Tokens in the loss of the last step", field="num_loss_tokens")
MICRO_BATCHES = _update(
    "micro_batches", "Micro-batches of one data-parallel rank in the last step", field="num_micro_batches"
)
TRAIN_FLOPS = _gauge("trainer", "train_flops_per_second", "Model FLOPs of the last step's updates over their time")
MFU = _gauge("trainer", "mfu_ratio", "train_flops_per_second over the peak of the actor's GPUs")
COMPUTED = _gauge(
    "trainer",
    "computed_tokens_ratio",
    "Share of the tokens of the last step's rows that the actor computed; others begin as a computed row",
    source="step.computed_ratio",
)

VALUE_LOSS, VALUE_GRAD_NORM, VALUE_LEARNING_RATE, VALUE_CLIP, VALUE_MEAN, RETURN_MEAN, EXPLAINED_VARIANCE = _numbers(
    "critic",
    ("value_loss", "Loss of the critic's last updates", "loss"),
    ("value_grad_norm", "Gradient norm of the critic before clipping", "grad_norm"),
    ("value_learning_rate", "Learning rate of the critic's last update", "learning_rate"),
    ("value_clip_ratio", "Share of values whose change was clipped", "clip_fraction"),
    ("value_mean", "Mean value of the last step's tokens before its updates", "value_mean"),
    ("return_mean", "Mean return of the last step's tokens", "return_mean"),
    ("explained_variance_ratio", "Share of the returns' variance that the critic predicted", "explained_variance"),
)
DRAFT_LOSS, DRAFT_GRAD_NORM, DRAFT_LEARNING_RATE = (
    _gauge("trainer", f"draft_{name}", text, source=f"step.draft.{name}")
    for name, text in (
        ("loss", "Cross-entropy of the model that drafts with the responses of the step"),
        ("grad_norm", "Gradient norm of the model that drafts before clipping"),
        ("learning_rate", "Learning rate of its last update"),
    )
)
PAIRS, PAIR_LOSS, PAIR_ACCURACY, PAIR_MARGIN, CHOSEN_REWARD, REJECTED_REWARD = _numbers(
    "preference",
    ("preference_pairs", "Pairs of answers in the last step", "num_pairs"),
    ("preference_loss", "Mean loss of the last step's pairs before its update", "loss"),
    ("preference_accuracy_ratio", "Share of pairs whose better answer has the higher implicit reward", "accuracy"),
    ("preference_margin", "Mean difference of the implicit rewards of a pair", "margin"),
    ("chosen_reward", "Mean implicit reward of the better answers", "chosen_reward"),
    ("rejected_reward", "Mean implicit reward of the worse answers", "rejected_reward"),
)

EVAL = _gauge(
    "eval",
    "eval",
    "Numbers of the last evaluation: accuracy, score, pass@4 and so on",
    "number",
    source="evaluation.numbers.*",
)
EVAL_SOURCE = _gauge("eval", "eval_by_source", "The same per data source", "number", "source")
EVAL_STEP = _gauge("eval", "eval_step", "Step after which the last evaluation ran")
EVAL_SECONDS = _gauge("eval", "eval_seconds", "Duration of the last evaluation")

CHECKPOINT_STEP, CHECKPOINT_BLOCKING, CHECKPOINT_SECONDS, CHECKPOINT_BYTES = _saves(
    ("step", "Step of the newest complete checkpoint, 0 without one", "step"),
    ("blocking_seconds", "Time that the last save stopped training", "blocking_seconds"),
    ("seconds", "Duration of the last save, most of it in the background", "seconds"),
    ("bytes", "Size of the last checkpoint", "num_bytes"),
)
CHECKPOINT_TIME = _gauge(
    "checkpoint", "checkpoint_timestamp_seconds", "Time of the newest complete checkpoint, since the epoch"
)
CHECKPOINT_INTERVAL = _gauge("checkpoint", "checkpoint_interval_steps", "Steps between two saves; none if hourly")
CHECKPOINT_PERIOD = _gauge("checkpoint", "checkpoint_interval_seconds", "Time between two saves; none if by steps")
CHECKPOINT_FREE = _gauge("checkpoint", "checkpoint_free_bytes", "Free space on the disk of the run folder")
CHECKPOINT_FAILURES = _counter("checkpoint", "checkpoint_failures", "Saves that failed")
MIRROR_STEP = _gauge("checkpoint", "mirror_step", "Step of the last checkpoint copied to checkpoint.mirror")
MIRROR_SECONDS = _gauge("checkpoint", "mirror_seconds", "Duration of the last upload, in the background")
MIRROR_FAILURES = _counter("checkpoint", "mirror_failures", "Uploads to checkpoint.mirror that failed")

HOST_TOTAL = _usage(
    "host_memory_total_bytes", "Memory of the role's node with least available", field="host_total_bytes"
)
HOST_AVAILABLE = _usage(
    "host_memory_available_bytes",
    "Available memory, without swapping, of the role's node with least",
    field="host_available_bytes",
)
RESIDENT = _usage("resident_memory_bytes", "Host memory of a role's largest process", field="resident_bytes")
GPU_ALLOCATED = _usage(
    "gpu_memory_allocated_bytes", "Peak of tensors in the last step, on the fullest rank", field="gpu_allocated_bytes"
)
GPU_RESERVED = _usage(
    "gpu_memory_reserved_bytes", "Peak held by the allocator, on the fullest rank", field="gpu_reserved_bytes"
)
GPU_TOTAL = _usage("gpu_memory_total_bytes", "Memory of one GPU of the role", field="gpu_total_bytes")
GPU_ERRORS = _gauge(
    "machine",
    "gpu_uncorrected_errors",
    "Memory errors that ECC could not correct, on all GPUs, since their driver started",
)
GPU_RESETS = _gauge("machine", "gpu_needs_reset", "GPUs that need a reset: rows of their memory are to be replaced")
GPU_THROTTLED = _gauge("machine", "gpu_throttled", "GPUs that heat or their power supply slow down now")
GPU_XIDS = _gauge("machine", "gpu_xid_errors", "Xid messages of drivers since the start, where kernel logs can be read")
GPU_CELSIUS = _gauge("machine", "gpu_temperature_celsius", "The hottest GPU")
GPU_WATTS = _gauge("machine", "gpu_power_watts", "Power of all GPUs together")

METRICS: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric))
"""All metrics, in the order above."""
