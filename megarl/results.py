"""Results of updating, publishing and evaluating: the numbers that a step reports. No torch, no engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megarl.types import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """Statistics of the actor's updates of one step: means over the updates, each over all loss tokens.

    A statistic is one field here, its formula in `train.stats` and, to be shown, a metric in `observe.catalogue`.
    """

    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    entropy: float
    clip_fraction: float
    """Share of loss tokens whose loss was set by the clip."""
    approx_kl: float
    """KL(policy before this update || policy), estimate k3."""
    mismatch_mean: float
    """Mean |p_train - p_rollout|: how far trainer and engine disagree about the same tokens."""
    mismatch_max: float
    mismatch_kl: float
    """KL(rollout || train), estimate k1: the plain mean of the log ratio."""
    mismatch_k3: float
    """KL(rollout || train), estimate k3: never negative."""
    mismatch_chi2: float
    """Mean of the squared ratio p_train / p_rollout, minus 1: grows first when a few tokens are far off."""
    effective_sample_ratio: float
    """Effective share of the loss tokens when they are weighted by p_train / p_rollout, cut off at 2; 1 is all."""
    rejected_fraction: float
    """Share of loss tokens that the rollout correction removed."""
    reference_kl: float | None
    """KL(policy || reference), by the estimate that the loss uses; None if the loss has no such term."""
    num_loss_tokens: int
    num_sequences: int
    num_micro_batches: int
    """Per data-parallel rank."""
    engine_mismatch: float | None = None
    """`mismatch_mean` over the tokens that the policy before the step chose: trainer and engine disagree about the same
    weights. None if there are none."""
    policy_drift: float | None = None
    """`mismatch_mean` over the tokens that earlier policies chose: it includes how far the policy has moved since."""
    behind_fraction: float = 0.0
    """Share of loss tokens that earlier policies chose."""
    teacher_kl: float | None = None
    """Distance from the teacher that `algorithm.distillation` lowers: KL(policy || teacher) by estimate k1, or
    KL(teacher || policy) over the teacher's likeliest tokens. None without a teacher."""
    replayed_fraction: float | None = None
    """Share of the trained positions, prompts included, with the experts of the engine; None in a dense model."""
    routing_disagreement: Mapping[str, float] = field(default_factory=dict)
    """Share of replayed tokens that the trainer's own router had sent to another expert, by layer from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStats:
    """Statistics of the critic's updates of one step: means over the updates, each over all loss tokens."""

    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    clip_fraction: float
    """Share of loss tokens whose loss was set by the clip around the old value."""
    value_mean: float
    """Mean of the values before the step's first update."""
    return_mean: float
    explained_variance: float
    """1 - var(return - value) / var(return), with the values before the step's first update; 0 or less is no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStats:
    """Statistics of the updates of the model that drafts: means over the updates, each over all loss tokens."""

    loss: float
    """Cross-entropy with the policy's responses: their own entropy, and the distance from the policy."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceStats:
    """Means over pairs of answers, with the rewards that the model before the step gives them implicitly."""

    num_pairs: int
    loss: float
    accuracy: float
    """Share of pairs whose better answer has the higher reward."""
    margin: float
    """The reward of the better answer, less that of the worse one."""
    chosen_reward: float
    rejected_reward: float

    @classmethod
    def merge(cls, parts: Sequence[PreferenceStats]) -> PreferenceStats:
        """Return the means over the pairs of all parts."""
        total = sum(part.num_pairs for part in parts)
        names = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")
        means = {name: sum(part.num_pairs * getattr(part, name) for part in parts) / total for name in names}
        return cls(num_pairs=total, **means)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUsage:
    """Memory of the machines of one model's ranks: each number is that of the worst rank."""

    resident_bytes: int
    host_available_bytes: int
    host_total_bytes: int
    gpu_allocated_bytes: int | None = None
    """Peak since the update before. This and the next three are None on CPU."""
    gpu_reserved_bytes: int | None = None
    gpu_total_bytes: int | None = None
    gpu_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWork:
    """The computation of the actor's updates of one step."""

    flops: float
    """Forward and backward passes of the model, without recomputation."""
    peak_flops_per_second: float | None
    """All ranks of the actor together; None if the GPU's peak is unknown."""
    num_tokens: int = 0
    """Tokens of all rows that are trained on; 0 in events of earlier versions."""
    num_shared_tokens: int = 0
    """Tokens that are computed with another row, which begins with them too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticResult:
    stats: CriticStats | None
    """None if no update was applied."""
    num_skipped_updates: int = 0
    usage: RankUsage | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    version: PolicyVersion
    stats: UpdateStats | None
    """None if no update of the actor was applied, as while only the critic learns."""
    critic: CriticStats | None = None
    draft: DraftStats | None = None
    """None if the model that drafts has not learned in this step."""
    preference: PreferenceStats | None = None
    """The step's pairs; None if the algorithm compares none."""
    num_skipped_updates: int = 0
    """Updates of all models that were not applied, because loss or gradient was not finite."""
    work: TrainingWork | None = None
    usage: Mapping[str, RankUsage] = field(default_factory=dict, compare=False)
    """By role that was updated."""
    warnings: tuple[str, ...] = ()
    """Sentences for the user about this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorState:
    """The state of the watch over the mismatch between trainer and engine, saved in checkpoints."""

    worst_reported: float = 0.0
    """The highest threshold reported so far."""
    has_switched_correction_on: bool = False
    baseline_sum: float = 0.0
    """Sum of the mismatch over the steps of the baseline, if the recipe asks for one."""
    num_baseline_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishResult:
    version: PolicyVersion
    num_bytes: int
    """Bytes received by all engines together."""
    busiest_bytes: int = 0
    """Bytes sent or received by the rank that moves most."""
    floor_bytes: int = 0
    """Lower bound of `busiest_bytes`."""
    seconds: float
    num_engines: int
    num_adapters: int | None = None
    """Versions of the adapter that one engine had at most, before old ones were unloaded; None for whole models."""
    max_adapters: int | None = None
    """Versions that an engine has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """Grade of the answers to some prompts, with the same number of rollouts each."""

    num_prompts: int
    rollouts_per_prompt: int
    score_mean: float
    accuracy: float
    """mean@n: share of rollouts that are right."""
    majority: float
    """majority@n: share of prompts whose most frequent answer is right."""
    pass_at: Mapping[int, float]
    """By k: probability that at least one of k rollouts is right, an unbiased estimate from all rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grades:
    overall: Grade
    by_source: Mapping[str, Grade]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Grades of the answers to held-out prompts: greedy, sampled or both; and the loss of held-out demonstrations."""

    version: PolicyVersion
    """Oldest version that chose a token."""
    greedy: Grades | None
    sampled: Grades | None
    newest_version: PolicyVersion | None = None
    """Newest version that chose a token, if versions were published during the evaluation."""
    held_out_loss: float | None = None
    """Mean loss of the imitated tokens of held-out demonstrations, where an sft run has some."""
    held_out_pairs: PreferenceStats | None = None
    """How the model orders held-out pairs, where a run on pairs has some."""

    @property
    def main(self) -> Grades | None:
        """The greedy answers if there are any, else the sampled ones; None if nothing was generated."""
        return self.greedy or self.sampled

    @property
    def accuracy(self) -> float:
        return self.numbers["accuracy"]

    @property
    def numbers(self) -> dict[str, float]:
        """All numbers over all prompts by name: `accuracy` and `score` of answers, then `mean@8`, `pass@4` and so on;
        `held_out_loss` and `perplexity` of demonstrations; `pair_accuracy`, `pair_loss` and `pair_margin` of pairs."""
        numbers = {} if self.main is None else self.numbers_of(None)
        if self.held_out_pairs is not None:
            pairs = self.held_out_pairs
            numbers |= {"pair_accuracy": pairs.accuracy, "pair_loss": pairs.loss, "pair_margin": pairs.margin}
        if self.held_out_loss is not None:
            # Above this loss the perplexity is no float any more.
            numbers |= {"held_out_loss": self.held_out_loss, "perplexity": math.exp(min(self.held_out_loss, 700.0))}
        return numbers

    def numbers_of(self, source: str | None) -> dict[str, float]:
        """Return the numbers of answers to one data source; None is all sources."""
        assert self.main is not None, f"version {self.version} was evaluated without an answer"
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
