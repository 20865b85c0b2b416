"""What is learned from a step: one tagged section per estimator, and within it the loss and what goes with it."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megarl.config.section import Section

Aggregation: TypeAlias = Literal[
    "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
]

_ClipLow = Annotated[float, Field(gt=0, le=1)]


class PpoLossConfig(Section):
    kind: Literal["ppo"]
    clip_low: _ClipLow = 0.2
    clip_high: PositiveFloat = 0.2
    """Above `clip_low` it leaves unlikely tokens room to grow; DAPO has 0.28."""
    clip_dual: Annotated[float, Field(gt=1)] = 3.0
    """Bound on the loss where the advantage is negative and the ratio large."""


class GspoLossConfig(Section):
    """One ratio per sequence, the geometric mean of its tokens': far narrower clips than PPO's."""

    kind: Literal["gspo"]
    clip_low: _ClipLow = 3e-4
    clip_high: PositiveFloat = 4e-4


class CispoLossConfig(Section):
    """Clips the weight of a token, never its gradient."""

    kind: Literal["cispo"]
    clip_low: _ClipLow = 0.2
    clip_high: PositiveFloat = 0.2


class GpgLossConfig(Section):
    """The plain policy gradient: no ratio, no clip."""

    kind: Literal["gpg"]


class SapoLossConfig(Section):
    """A soft gate instead of a clip; the higher the temperature, the sooner it closes."""

    kind: Literal["sapo"]
    tau_positive: PositiveFloat = 1.0
    tau_negative: PositiveFloat = 1.05
    """Where the advantage is not positive."""


class GmpoLossConfig(Section):
    """The geometric mean of a sequence's ratios, each clipped in log space."""

    kind: Literal["gmpo"]
    clip_low: PositiveFloat = 0.4
    clip_high: PositiveFloat = 0.4


LossConfig: TypeAlias = Annotated[
    PpoLossConfig | GspoLossConfig | CispoLossConfig | GpgLossConfig | SapoLossConfig | GmpoLossConfig,
    Field(discriminator="kind"),
]


class TisConfig(Section):
    """Weigh what was sampled by p_train / p_rollout, cut off at `max_weight`."""

    kind: Literal["tis"]
    level: Literal["token", "sequence"] = "token"
    max_weight: PositiveFloat = 2.0


class IcepopConfig(Section):
    """The same weight where it lies within the bounds; what lies outside leaves the loss."""

    kind: Literal["icepop"]
    level: Literal["token", "sequence"] = "token"
    min_weight: NonNegativeFloat = 0.5
    max_weight: PositiveFloat = 5.0


class MaskConfig(Section):
    """No weight: tokens, or whole sequences by their mean, leave the loss where `measure` is out of bounds."""

    kind: Literal["mask"]
    level: Literal["token", "sequence"] = "token"
    measure: Literal["k1", "k2", "k3"] = "k3"
    """Of KL(rollout || train). k1 has a sign: it is positive where the engine was surer than the trainer."""
    lowest: float | None = None
    highest: float


CorrectionConfig: TypeAlias = Annotated[TisConfig | IcepopConfig | MaskConfig, Field(discriminator="kind")]


class MismatchBaselineConfig(Section):
    """Thresholds as multiples of the run's own mismatch, the mean over its first steps; until then nothing is above."""

    steps: PositiveInt = 10
    warn_times: Annotated[float, Field(gt=1)] = 3.0
    act_times: Annotated[float, Field(gt=1)] = 10.0
    lowest: PositiveFloat = 1e-4
    """A baseline below this counts as this: multiples of rounding errors mean nothing."""


class MismatchConfig(Section):
    """How far trainer and engine may be apart, as the mean of |p_train - p_rollout| over a step's loss tokens."""

    warn_above: PositiveFloat = 0.005
    act_above: PositiveFloat = 0.01
    baseline: MismatchBaselineConfig | None = None
    """Instead of these two: for engines that are never close, such as FP8, where a change is what matters."""
    action: Literal["warn", "correct", "stop"] = "warn"
    """`correct` switches `correction: {kind: tis}` on for the rest of the run; `stop` ends it before the update."""


class FilterConfig(Section):
    """Dynamic sampling: a group without signal is replaced by another prompt. Looks at rewards before `overlong`."""

    component: str | None = None
    """The part of the reward to look at; without it the score."""
    tolerance: NonNegativeFloat = 1e-6
    """A group is dropped when its rollouts differ by no more than this."""
    lowest_mean: float | None = None
    highest_mean: float | None = None
    """With `lowest_mean` the band a group's mean must lie in: neither too hard nor too easy."""
    oversampling: Annotated[float, Field(ge=1)] = 1.0
    """Prompts generated at once, as a multiple of those a step needs: fewer rounds where many groups are dropped.
    What is left over is trained first in the next step, and was sampled by an older policy."""
    max_dropped_groups: PositiveInt = 1024
    """This many dropped in a row end the run: nothing is left to learn, or the reward is broken."""


class OverlongConfig(Section):
    """What becomes of responses near or at `sampling.max_response_tokens`."""

    buffer_tokens: PositiveInt | None = None
    """Over the last so many tokens before the limit the reward falls by up to `factor`."""
    factor: PositiveFloat = 1.0
    is_filtered: bool = False
    """Responses cut at the limit leave the loss; their group is still judged with them."""


KlEstimate: TypeAlias = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]


class KlLossConfig(Section):
    """The distance from the reference as a term of the loss."""

    kind: Literal["loss"]
    estimate: KlEstimate = "k3+"
    """Of each token. With a `+` the gradient is that of k2, whose expectation is the gradient of the KL itself."""
    coef: PositiveFloat = 0.001


class AdaptiveKlConfig(Section):
    """Raises the coefficient while the KL is above `target` and lowers it while it is below, by at most 20 %."""

    target: PositiveFloat
    horizon: PositiveFloat = 10_000
    """Sequences over which such a change takes full effect."""


class KlRewardConfig(Section):
    """The distance from the reference taken off the reward of every token, before credit is assigned."""

    kind: Literal["reward"]
    estimate: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Of each token; k1 is unbiased and may be negative."""
    coef: PositiveFloat = 0.001
    """Where `adaptive` starts from."""
    adaptive: AdaptiveKlConfig | None = None


KlConfig: TypeAlias = Annotated[KlLossConfig | KlRewardConfig, Field(discriminator="kind")]


class SftConfig(Section):
    kind: Literal["sft"]


class PolicyGradientConfig(Section):
    """What every estimator over rollouts is combined with."""

    loss: LossConfig = PpoLossConfig(kind="ppo")
    aggregation: Aggregation = "token_mean"
    """How token losses become one number, over all tokens and sequences of an update whatever their split."""
    horizon_tokens: PositiveInt | None = None
    """What `seq_mean_token_sum_norm` divides a sequence's sum by, instead of its length."""
    entropy_coef: NonNegativeFloat = 0.0
    kl: KlConfig | None = None
    """Keeps the policy near `roles.reference`."""
    correction: CorrectionConfig | None = None
    """For tokens the trainer and the engine find differently likely."""
    mismatch: MismatchConfig = MismatchConfig()
    filter: FilterConfig | None = None
    overlong: OverlongConfig | None = None


class GaeConfig(PolicyGradientConfig):
    """PPO: what a critic (`roles.critic`) expects is the baseline of every token. Needs no group."""

    kind: Literal["gae"]
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token the policy chose."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """1 trusts the reward, 0 the critic's next value."""


class GrpoConfig(PolicyGradientConfig):
    kind: Literal["grpo"]
    normalize_std: bool = True
    """Divide by the group's standard deviation; false is Dr. GRPO."""


class GroupConfig(PolicyGradientConfig):
    """Estimators that compare the rollouts of a group and have nothing to set."""

    kind: Literal["rloo", "opo", "gpg", "reinforce_pp_baseline", "grpo_passk"]


class ReinforcePpConfig(PolicyGradientConfig):
    """Rewards to go, normalised over the step: needs no group."""

    kind: Literal["reinforce_pp"]
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token the policy chose."""


class RemaxConfig(PolicyGradientConfig):
    """Rewards to go minus the reward of a greedy rollout, which is generated for every prompt besides its group."""

    kind: Literal["remax"]
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token the policy chose."""


class GdpoConfig(PolicyGradientConfig):
    """Every component of the reward is compared within the group on its own, then they are added up."""

    kind: Literal["gdpo"]
    weights: Annotated[dict[str, float], Field(min_length=1)]
    """Of the components to use; the score itself is not."""


EstimatorConfig: TypeAlias = GaeConfig | GrpoConfig | GroupConfig | ReinforcePpConfig | RemaxConfig | GdpoConfig

AlgorithmConfig: TypeAlias = Annotated[SftConfig | EstimatorConfig, Field(discriminator="kind")]
