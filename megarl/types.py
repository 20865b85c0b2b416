"""The values that travel through one step, in the order they appear. Numpy only: no torch, no engine.

    Prompt -> RolloutGroup -> ScoredGroup -> TrainSample -> TrainBatch -> UpdateResult

Shapes: T tokens of one response, P tokens of its prompt, N packed tokens of one micro-batch, S sequences in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

PolicyVersion = NewType("PolicyVersion", int)
"""How many optimizer steps made these weights; 0 is the model the run started from."""

DEMONSTRATION = PolicyVersion(-1)
"""The version of tokens that come from a data set, not from a policy."""

JsonValue: TypeAlias = "str | int | float | bool | list[JsonValue] | dict[str, JsonValue] | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task, tokenised, at one place of the (shuffled, repeated) stream."""

    uid: str
    """Names the row of the data set; the same in every epoch."""
    position: int
    """How many prompts were drawn before this one since the run began."""
    epoch: int
    token_ids: TokenArray  # [P]
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, JsonValue]
    demonstration: TokenArray | None = None
    """The response of the data set, end token included, where it has one."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One response, token by token, as the engine gave it."""

    token_ids: TokenArray  # [T]
    logprobs: FloatArray  # [T], of the engine, after temperature
    versions: npt.NDArray[np.int32]  # [T], which policy chose each token
    loss_mask: BoolArray  # [T], True where the policy chose the token
    finish_reason: FinishReason
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All rollouts of one prompt."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    baseline: Rollout | None = None
    """A greedy rollout to compare with, where the algorithm asks for one; it is not trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    value: float
    components: Mapping[str, float]
    prediction: str | None = None
    """The final answer the scorer read out of the response, where it says so."""
    is_masked: bool = False
    """Nobody could score the rollout: it counts in no statistics of its group and in no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    group: RolloutGroup
    scores: tuple[Score, ...]
    baseline: Score | None = None
    """Of the group's baseline."""

    def __post_init__(self) -> None:
        num_rollouts = len(self.group.rollouts)
        assert len(self.scores) == num_rollouts, f"{len(self.scores)} scores, {num_rollouts} rollouts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What models say about a step's rollouts before it is trained on: B of [T_i] each, None where nobody asked."""

    logprobs: tuple[FloatArray, ...] | None = None
    """Of the policy as it is trained next."""
    reference_logprobs: tuple[FloatArray, ...] | None = None
    values: tuple[FloatArray, ...] | None = None
    """The reward that the critic expects before each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One rollout with its credit assigned."""

    prompt_ids: TokenArray  # [P]
    rollout: Rollout
    advantages: FloatArray  # [T], 0 where the policy did not choose the token
    old_logprobs: FloatArray | None = None  # [T], of the policy before the step, where somebody has asked it
    reference_logprobs: FloatArray | None = None  # [T], where the loss has a KL term
    values: FloatArray | None = None  # [T], of the critic before the step, where there is one
    returns: FloatArray | None = None  # [T], what the critic learns


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Whole sequences, packed end to end. Position n predicts `targets[n]`, the next token of its sequence.

    Padding, where the micro-batch has some, is one more sequence at the end with an empty loss mask.
    """

    token_ids: TokenArray  # [N]
    sequence_starts: npt.NDArray[np.int32]  # [S + 1], ends with N
    last_ids: TokenArray  # [S], what the last position of each sequence predicts; 0 for padding
    loss_mask: BoolArray  # [N], True where the policy chose `targets[n]`
    rollout_logprobs: FloatArray  # [N], of `targets[n]`
    advantages: FloatArray  # [N]
    old_logprobs: FloatArray | None  # [N], None where the samples have none; so the next three
    reference_logprobs: FloatArray | None  # [N]
    values: FloatArray | None  # [N]
    returns: FloatArray | None  # [N]
    sample_ids: npt.NDArray[np.int32]  # [S], index into the step's samples, -1 for padding
    response_starts: npt.NDArray[np.int32]  # [S], the position that predicts the first response token; padding: N
    versions: npt.NDArray[np.int32] | None = None  # [N], which policy chose `targets[n]`; None where all are of one

    # What follows from the columns is not kept beside them: a step's tokens are a large part of the driver's memory.

    @property
    def targets(self) -> TokenArray:
        """[N], the next token of the same sequence."""
        targets = np.roll(self.token_ids, -1)
        targets[self.sequence_starts[1:] - 1] = self.last_ids
        return targets

    @property
    def positions(self) -> TokenArray:
        """[N], restart at 0 with each sequence."""
        starts = self.sequence_starts
        return np.arange(len(self.token_ids), dtype=np.int32) - np.repeat(starts[:-1], np.diff(starts))


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """What one optimizer update sees, split over the data-parallel ranks.

    The denominators are global: no rank or micro-batch divides by a count of its own.
    """

    shares: tuple[tuple[MicroBatch, ...], ...]
    """One tuple of micro-batches per data-parallel rank; all tuples have one length, all micro-batches one N."""
    num_loss_tokens: int
    num_sequences: int
    """Those with a loss token: a rollout that left the loss is not in its denominator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Everything one step trains on."""

    mini_batches: tuple[MiniBatch, ...]
    temperature: float
    """Log-probabilities are of logits divided by this, as the engine sampled them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """What the actor saw in one step: means over its updates, each over all loss tokens."""

    loss: float
    grad_norm: float
    learning_rate: float
    entropy: float
    clip_fraction: float
    approx_kl: float
    """k3 estimate of KL(policy before this update || policy), over loss tokens."""
    mismatch_mean: float
    """Mean |p_train - p_rollout|: how far trainer and engine disagree about the same tokens."""
    mismatch_max: float
    mismatch_kl: float
    """KL(rollout || train), the plain mean of the log ratio (k1)."""
    mismatch_k3: float
    """The same KL by the estimate that is never negative."""
    mismatch_chi2: float
    """Mean of the squared ratio p_train / p_rollout, minus 1: grows first when a few tokens are far off."""
    effective_sample_ratio: float
    """How many of the loss tokens are worth something after weighing them by that ratio, cut off at 2; 1 is all."""
    rejected_fraction: float
    """Share of loss tokens that the rollout correction took out of the loss."""
    reference_kl: float | None
    """KL(policy || reference) by the estimate the loss uses; None where the loss has no such term."""
    num_loss_tokens: int
    num_sequences: int
    num_micro_batches: int
    engine_mismatch: float | None = None
    """`mismatch_mean` of the tokens that the policy before the step chose: trainer and engine disagree about the same
    weights. None where there are none."""
    policy_drift: float | None = None
    """The same of the tokens that earlier policies chose: besides, the policy has moved since."""
    behind_fraction: float = 0.0
    """Share of loss tokens that earlier policies chose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStats:
    """What the critic saw in one step: means over its updates, each over all loss tokens."""

    loss: float
    grad_norm: float
    learning_rate: float
    clip_fraction: float
    """Share of loss tokens where the clip around the old value set the loss."""
    value_mean: float
    return_mean: float
    explained_variance: float
    """1 - var(return - value) / var(return), before the step's first update: 1 knows all, 0 or less knows nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUsage:
    """What the ranks of one model need of their machines: of each number the worst of all ranks."""

    resident_bytes: int
    host_available_bytes: int
    host_total_bytes: int
    gpu_allocated_bytes: int | None = None
    """The peak since the update before; None on CPU, so the next three."""
    gpu_reserved_bytes: int | None = None
    gpu_total_bytes: int | None = None
    gpu_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWork:
    """What the actor's updates of one step had to compute."""

    flops: float
    """Of the model: forward and backward, without what is computed twice to save memory."""
    peak_flops_per_second: float | None
    """Of all ranks of the actor together; None where nobody states it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticResult:
    stats: CriticStats | None
    """None where no update was applied."""
    num_skipped_updates: int = 0
    usage: RankUsage | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    version: PolicyVersion
    stats: UpdateStats | None
    """The actor's; None where no update of it was applied, as while only the critic learns."""
    critic: CriticStats | None = None
    num_skipped_updates: int = 0
    """Of actor and critic: those whose loss or gradient was not finite. They changed no weight."""
    work: TrainingWork | None = None
    usage: Mapping[str, RankUsage] = field(default_factory=dict, compare=False)
    """By role, of those that were updated."""
    warnings: tuple[str, ...] = ()
    """What people should know about this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishResult:
    version: PolicyVersion
    num_bytes: int
    """Received by all engines together."""
    busiest_bytes: int = 0
    """Sent or received by the rank that moves most."""
    floor_bytes: int = 0
    """What `busiest_bytes` cannot be below."""
    seconds: float
    num_engines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """How well some prompts were answered, with the same number of rollouts each."""

    num_prompts: int
    rollouts_per_prompt: int
    score_mean: float
    accuracy: float
    """mean@n: the share of rollouts that are right."""
    majority: float
    """majority@n: the share of prompts whose most frequent answer is right."""
    pass_at: Mapping[int, float]
    """By k: how likely at least one of k rollouts is right, estimated without bias from all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grades:
    overall: Grade
    by_source: Mapping[str, Grade]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Answers to held-out prompts; at least one of the two ways to answer is there."""

    version: PolicyVersion
    """The first that chose a token."""
    greedy: Grades | None
    sampled: Grades | None
    newest_version: PolicyVersion | None = None
    """The last that did, where later ones were published meanwhile."""

    @property
    def main(self) -> Grades:
        """The greedy answers, where there are some."""
        found = self.greedy or self.sampled
        assert found is not None, f"version {self.version} was evaluated without an answer"
        return found

    @property
    def accuracy(self) -> float:
        return self.main.overall.accuracy

    @property
    def numbers(self) -> dict[str, float]:
        """Everything overall, by the names people know: `accuracy` and `score` always, then `mean@8`, `pass@4` ..."""
        return self.numbers_of(None)

    def numbers_of(self, source: str | None) -> dict[str, float]:
        """The same for one data source; None is all of them."""
        main = _of_source(self.main, source)
        numbers = {"accuracy": main.accuracy, "score": main.score_mean}
        if self.sampled is not None:
            sampled = _of_source(self.sampled, source)
            numbers[f"mean@{sampled.rollouts_per_prompt}"] = sampled.accuracy
            numbers |= {f"pass@{k}": value for k, value in sorted(sampled.pass_at.items())}
            numbers[f"majority@{sampled.rollouts_per_prompt}"] = sampled.majority
        return numbers


def _of_source(grades: Grades, source: str | None) -> Grade:
    return grades.overall if source is None else grades.by_source[source]
