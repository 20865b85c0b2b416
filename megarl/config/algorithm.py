"""The recipe's `algorithm` section: one tagged section per kind, and in it the sections of its loss, KL and filter.

Each kind states what it needs of a run as an `AlgorithmNeeds`; code outside `config` and `algo` reads that value and
does not ask for the kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megarl.config.section import DtypeName, Section, UserCode

Aggregation: TypeAlias = Annotated[
    Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"],
    Field(
        description="How token losses become one number, over all tokens and sequences of an update however they are "
        "split."
    ),
]

RowKind: TypeAlias = Literal["prompts", "demonstrations", "pairs"]
"""The contents of a row of data: a prompt with its ground truth, with an answer, or with two answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmNeeds:
    """The requirements of an algorithm on data, models and rollouts."""

    rows: RowKind = "prompts"
    """The rows to train on."""
    has_engines: bool = True
    """Engines generate answers to train on; without them it trains on answers of the data alone."""
    compares_group: bool = True
    """At least two answers to each prompt."""
    has_baseline: bool = False
    """One more rollout per prompt, nearly greedy, which is scored and not trained on."""
    has_critic: bool = False
    implicit_reward_beta: float | None = None
    """The critic is a language model, and its log-ratio to its start times this rewards each token; None: it has a
    value head, and its values are the baseline of each token."""
    is_scorer: bool = False
    """The policy itself has a value head in place of the language head."""
    self_play_steps: int | None = None
    """The policy plays against itself: the reference takes its weights after so many steps."""
    has_logprobs: bool = False
    """Credit uses the log-probabilities of the policy before the step."""
    fetches_columns: bool = False
    """The driver gets every number per token, which otherwise stay on the ranks that computed them."""
    sums_over_episodes: bool = False
    """The loss of a token depends on the other tokens of its episode."""
    components: tuple[tuple[str, str], ...] = ()
    """Components that the reward must have, each with the key of the recipe that names it."""
    user_code: tuple[tuple[str, str], ...] = ()
    """References to the user's code, each with its key."""

    @property
    def answers_per_row(self) -> int:
        """Answers of the data to each prompt."""
        return {"prompts": 0, "demonstrations": 1, "pairs": 2}[self.rows]

    def samples_per_prompt(self, rollouts_per_prompt: int) -> int:
        """Return how many answers to each prompt are trained on: those of the data and those of engines."""
        return self.answers_per_row + (rollouts_per_prompt if self.has_engines else 0)


class PolicyLossConfig(Section):
    """The traits of a loss that the rest of a recipe has to fit."""

    sums_over_episodes: ClassVar[bool] = False
    """The loss of a token depends on the other tokens of its episode."""
    weighs_sequences_equally: ClassVar[bool] = False
    """Only the aggregation `seq_mean_token_mean` fits it."""
    averages_advantages: ClassVar[bool] = False
    """All tokens of a sequence have the mean of their advantages."""


class PpoLossConfig(PolicyLossConfig):
    """The ratio of new to old probability, clipped for each token."""

    kind: Literal["ppo"]
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """A ratio below 1 minus this gives no gradient where the advantage is negative."""
    clip_high: PositiveFloat = 0.2
    """Above `clip_low`, unlikely tokens can grow; DAPO uses 0.28."""
    clip_dual: Annotated[float, Field(gt=1)] = 3.0
    """Bounds the loss where the advantage is negative and the ratio large."""


class GspoLossConfig(PolicyLossConfig):
    """One ratio per sequence, the geometric mean of its tokens': far narrower clips than PPO's."""

    kind: Literal["gspo"]
    sums_over_episodes: ClassVar[bool] = True
    weighs_sequences_equally: ClassVar[bool] = True
    clip_low: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """The sequence's ratio is clipped below 1 minus this."""
    clip_high: PositiveFloat = 4e-4
    """The sequence's ratio is clipped above 1 plus this."""


class CispoLossConfig(PolicyLossConfig):
    """Clips the weight of a token, never its gradient."""

    kind: Literal["cispo"]
    clip_low: PositiveFloat = 0.2
    """The lowest weight is 1 minus this: from 1 on none is raised."""
    clip_high: PositiveFloat = 0.2
    """The highest weight is 1 plus this."""


class GpgLossConfig(PolicyLossConfig):
    """The plain policy gradient: no ratio, no clip."""

    kind: Literal["gpg"]


class SapoLossConfig(PolicyLossConfig):
    """A soft gate instead of a clip; the higher the temperature, the sooner it closes."""

    kind: Literal["sapo"]
    weighs_sequences_equally: ClassVar[bool] = True
    tau_positive: PositiveFloat = 1.0
    """The temperature where the advantage is positive."""
    tau_negative: PositiveFloat = 1.05
    """The temperature where it is not."""


class GmpoLossConfig(PolicyLossConfig):
    """The geometric mean of a sequence's ratios, each clipped in log space."""

    kind: Literal["gmpo"]
    sums_over_episodes: ClassVar[bool] = True
    weighs_sequences_equally: ClassVar[bool] = True
    averages_advantages: ClassVar[bool] = True
    clip_low: PositiveFloat = 0.4
    """The lowest log-ratio of a token is minus this."""
    clip_high: PositiveFloat = 0.4
    """The highest log-ratio of a token."""


class SppoLossConfig(PolicyLossConfig):
    """The squared distance of a sequence's log-ratio from its advantage."""

    kind: Literal["sppo"]
    sums_over_episodes: ClassVar[bool] = True
    weighs_sequences_equally: ClassVar[bool] = True
    averages_advantages: ClassVar[bool] = True


class FunctionLossConfig(PolicyLossConfig):
    """Your own loss: `name(tokens)` gets a `PolicyTokens` of torch tensors and returns a loss per token, [N]."""

    kind: Literal["function"]
    sums_over_episodes: ClassVar[bool] = True
    code: UserCode
    """`file.py:name` or `package.module:name`, on every node; a `TokenLoss` may be returned to count clipped tokens."""


LossConfig: TypeAlias = Annotated[
    PpoLossConfig
    | GspoLossConfig
    | CispoLossConfig
    | GpgLossConfig
    | SapoLossConfig
    | GmpoLossConfig
    | SppoLossConfig
    | FunctionLossConfig,
    Field(discriminator="kind"),
]


_Level: TypeAlias = Annotated[
    Literal["token", "sequence"], Field(description="Compares each token, or whole sequences.")
]


class TisConfig(Section):
    """Weigh each sampled token by p_train / p_rollout, at most `max_weight`."""

    kind: Literal["tis"]
    level: _Level = "token"
    max_weight: PositiveFloat = 2.0
    """A greater weight is replaced by this."""


class IcepopConfig(Section):
    """The weight of `tis` within the bounds; tokens or sequences outside leave the loss."""

    kind: Literal["icepop"]
    level: _Level = "token"
    min_weight: NonNegativeFloat = 0.5
    """The lowest weight that stays in the loss."""
    max_weight: PositiveFloat = 5.0
    """The highest weight that stays in the loss."""


class MaskConfig(Section):
    """No weight: tokens, or whole sequences by their mean, leave the loss where `measure` is out of bounds."""

    kind: Literal["mask"]
    level: _Level = "token"
    measure: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of KL(rollout || train). k1 has a sign: it is positive where the engine was surer than the trainer."""
    lowest: float | None = None
    """The lowest measure that stays in the loss; null: no bound."""
    highest: float
    """The highest measure that stays in the loss."""


CorrectionConfig: TypeAlias = Annotated[TisConfig | IcepopConfig | MaskConfig, Field(discriminator="kind")]


class MismatchBaselineConfig(Section):
    """Thresholds as multiples of the run's own mismatch, the mean over its first `steps`, during which none applies."""

    steps: PositiveInt = 10
    """The first steps, whose mean is the baseline."""
    warn_times: Annotated[float, Field(gt=1)] = 3.0
    """A mismatch above this multiple of the baseline is reported."""
    act_times: Annotated[float, Field(gt=1)] = 10.0
    """A mismatch above this multiple of the baseline leads to `action`."""
    lowest: PositiveFloat = 1e-4
    """A baseline below this counts as this: multiples of rounding errors mean nothing."""


class MismatchConfig(Section):
    """How far trainer and engine may differ: the mean of |p_train - p_rollout| over a step's loss tokens."""

    warn_above: PositiveFloat | None = None
    """A mismatch above this is reported. null: 0.02 with weights in bfloat16, 0.001 in float32 on a CPU."""
    act_above: PositiveFloat | None = None
    """A mismatch above this leads to `action`. null: 0.05 in bfloat16, 0.01 in float32."""
    baseline: MismatchBaselineConfig | None = None
    """Replaces `warn_above` and `act_above` for engines that always differ, such as FP8: only a change matters."""
    action: Literal["warn", "correct", "stop"] = "warn"
    """`correct` switches `correction: {kind: tis}` on for the rest of the run; `stop` ends it before the update."""

    def limits(self, dtype: DtypeName) -> tuple[float, float]:
        """Return what a mismatch is reported above and acted on above, with weights of a dtype."""
        # Healthy runs have had 0.0006 to 0.009 in bfloat16, most with small models, and 5e-7 to 2e-4 in float32.
        warn, act = (1e-3, 1e-2) if dtype == "float32" else (0.02, 0.05)
        return self.warn_above or warn, self.act_above or act


class FilterConfig(Section):
    """Dynamic sampling: another prompt replaces a group without signal. Uses the rewards before `overlong`."""

    component: str | None = None
    """The component of the reward to compare; null compares the score."""
    tolerance: NonNegativeFloat = 1e-6
    """A group is dropped when its rollouts differ by no more than this."""
    lowest_mean: float | None = None
    """A group with a lower mean is too hard and dropped."""
    highest_mean: float | None = None
    """A group with a higher mean is too easy and dropped."""
    oversampling: Annotated[float, Field(ge=1)] = 1.0
    """Prompts generated at once, as a multiple of those a step needs: fewer rounds where many groups are dropped.
    Groups left over are trained first in the next step; an older policy sampled them."""
    code: UserCode | None = None
    """Your own condition as well: `name(group)` gets a `ScoredGroup` and returns whether to train on it."""
    max_dropped_groups: PositiveInt = 1024
    """The run ends after this many dropped in a row: nothing is left to learn, or the reward is broken."""


class OverlongConfig(Section):
    """How responses near or at `sampling.max_response_tokens` are treated."""

    buffer_tokens: PositiveInt | None = None
    """Over this many tokens before the limit the reward falls by up to `factor`."""
    factor: PositiveFloat = 1.0
    """The reward that a response at the limit loses."""
    is_filtered: bool = False
    """Responses cut at the limit leave the loss but stay in the statistics of their group."""


KlEstimate: TypeAlias = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]


class KlLossConfig(Section):
    """The distance from the reference as a term of the loss."""

    kind: Literal["loss"]
    estimate: KlEstimate = "k3+"
    """Estimate per token. With a `+` the gradient is that of k2, whose expectation is the gradient of the KL."""
    coef: PositiveFloat = 0.001
    """The weight of the term in the loss."""


class AdaptiveKlConfig(Section):
    """Raises the coefficient while the KL is above `target` and lowers it while it is below, by at most 20 %."""

    target: PositiveFloat
    """Target KL per token: the mean over sequences of their means."""
    horizon: PositiveFloat = 10_000
    """Sequences over which a change takes full effect."""


class KlRewardConfig(Section):
    """The distance from the reference, subtracted from the reward of every token before credit is assigned."""

    kind: Literal["reward"]
    estimate: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Estimate per token; k1 is unbiased and may be negative."""
    coef: PositiveFloat = 0.001
    """The weight of the distance; the first one with `adaptive`."""
    adaptive: AdaptiveKlConfig | None = None


KlConfig: TypeAlias = Annotated[KlLossConfig | KlRewardConfig, Field(discriminator="kind")]


class ReverseKlConfig(Section):
    """Each token that the policy chose costs `coef` * (log p_policy - log p_teacher), as a part of its advantage."""

    kind: Literal["reverse_kl"]
    coef: PositiveFloat = 1.0
    """The weight beside the reward's advantage."""
    top_k: ClassVar[int] = 0


class ForwardTopkConfig(Section):
    """A term of the loss: KL(teacher || policy) over the teacher's `top_k` likeliest tokens and the rest as one."""

    kind: Literal["forward_topk"]
    coef: PositiveFloat = 1.0
    """The weight of the term in the loss."""
    top_k: PositiveInt = 32
    """The teacher's tokens that are compared one by one at each position."""


DistillationConfig: TypeAlias = Annotated[ReverseKlConfig | ForwardTopkConfig, Field(discriminator="kind")]


class SftConfig(Section):
    """Supervised fine-tuning: learns the responses of the data, without engines."""

    kind: Literal["sft"]

    # The keys of other kinds, which this one does not have.
    loss: ClassVar[None] = None
    aggregation: ClassVar[Aggregation] = "token_mean"
    horizon_tokens: ClassVar[None] = None
    entropy_coef: ClassVar[float] = 0.0
    kl: ClassVar[None] = None
    distillation: ClassVar[None] = None
    correction: ClassVar[None] = None
    mismatch: ClassVar[None] = None
    filter: ClassVar[None] = None
    overlong: ClassVar[None] = None

    needs: ClassVar[AlgorithmNeeds] = AlgorithmNeeds(rows="demonstrations", has_engines=False, compares_group=False)


class PolicyGradientConfig(Section):
    """The keys that all estimators over rollouts share."""

    estimator: UserCode | None = None
    """Your own advantages instead of those of `kind`: `name(outcomes)` gets an `Outcomes` and returns one number per
    rollout, [B], or one array per rollout, B of [T]."""
    reward_clip: tuple[float, float] | None = None
    """Lowest and highest reward: scores outside are replaced by these, before credit is assigned."""
    loss: LossConfig = PpoLossConfig(kind="ppo")
    aggregation: Aggregation = "token_mean"
    horizon_tokens: PositiveInt | None = None
    """The divisor of a sequence's sum in `seq_mean_token_sum_norm`, instead of its length."""
    entropy_coef: NonNegativeFloat = 0.0
    """The weight of the policy's entropy, which is subtracted from the loss."""
    kl: KlConfig | None = None
    """Keeps the policy near `roles.reference`."""
    distillation: DistillationConfig | None = None
    """Draws the policy towards `roles.teacher`, beside the reward."""
    correction: CorrectionConfig | None = None
    """Corrects for tokens whose probability differs between trainer and engine."""
    mismatch: MismatchConfig = MismatchConfig()
    filter: FilterConfig | None = None
    overlong: OverlongConfig | None = None

    kind_needs: ClassVar[AlgorithmNeeds] = AlgorithmNeeds()
    """The needs of the kind, whatever its keys are."""

    @property
    def needs(self) -> AlgorithmNeeds:
        corrects_sequences = self.correction is not None and self.correction.level == "sequence"
        return replace(
            self.kind_needs,
            has_logprobs=self.kind_needs.has_logprobs or isinstance(self.kl, KlRewardConfig),
            fetches_columns=self.estimator is not None,
            sums_over_episodes=self.loss.sums_over_episodes or corrects_sequences,
            components=self._components,
            user_code=self._user_code,
        )

    @property
    def _components(self) -> tuple[tuple[str, str], ...]:
        name = None if self.filter is None else self.filter.component
        return () if name is None else (("algorithm.filter.component", name),)

    @property
    def _user_code(self) -> tuple[tuple[str, str], ...]:
        codes = {
            "algorithm.estimator": self.estimator,
            "algorithm.loss.code": self.loss.code if isinstance(self.loss, FunctionLossConfig) else None,
            "algorithm.filter.code": None if self.filter is None else self.filter.code,
        }
        return tuple((key, code) for key, code in codes.items() if code is not None)


class GaeConfig(PolicyGradientConfig):
    """PPO: the value of a critic (`roles.critic`) is the baseline of every token. Needs no group."""

    kind: Literal["gae"]
    kind_needs: ClassVar[AlgorithmNeeds] = AlgorithmNeeds(has_critic=True, compares_group=False)
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token the policy chose."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """1 trusts the reward, 0 the critic's next value."""


class GrpoConfig(PolicyGradientConfig):
    """Compares each reward with the mean of its group."""

    kind: Literal["grpo"]
    normalize_std: bool = True
    """Divide by the group's standard deviation; false is Dr. GRPO."""


class GroupConfig(PolicyGradientConfig):
    """Estimators that compare the rollouts of a group and have no keys of their own."""

    kind: Literal["rloo", "opo", "gpg", "reinforce_pp_baseline", "grpo_passk"]


class ReinforcePpConfig(PolicyGradientConfig):
    """Rewards to go, normalised over the step: needs no group."""

    kind: Literal["reinforce_pp"]
    kind_needs: ClassVar[AlgorithmNeeds] = AlgorithmNeeds(compares_group=False)
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token the policy chose."""


class RemaxConfig(PolicyGradientConfig):
    """Rewards to go minus the reward of a greedy rollout, which is generated for every prompt as well."""

    kind: Literal["remax"]
    kind_needs: ClassVar[AlgorithmNeeds] = AlgorithmNeeds(has_baseline=True, compares_group=False)
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token the policy chose."""


class DistillConfig(PolicyGradientConfig):
    """Learns from `roles.teacher` alone: rewards are measured and not trained on. Needs no group."""

    kind: Literal["distill"]
    kind_needs: ClassVar[AlgorithmNeeds] = AlgorithmNeeds(compares_group=False)
    distillation: DistillationConfig = ReverseKlConfig(kind="reverse_kl")


class GdpoConfig(PolicyGradientConfig):
    """Compares each component of the reward within the group, then adds them up."""

    kind: Literal["gdpo"]
    weights: Annotated[dict[str, float], Field(min_length=1)]
    """Weight of each component to use; the score itself is not used."""

    @property
    def _components(self) -> tuple[tuple[str, str], ...]:
        return (*((f"algorithm.weights.{name}", name) for name in self.weights), *super()._components)


class PairConfig(PolicyGradientConfig):
    """The kinds that learn from pairs of answers, one better than the other; each has its own loss of a pair."""

    loss: LossConfig = GpgLossConfig(kind="gpg")
    aggregation: Aggregation = "seq_mean_token_sum"
    kind_needs: ClassVar[AlgorithmNeeds] = AlgorithmNeeds(has_logprobs=True)


class SimpoConfig(Section):
    """The loss -log sigmoid(beta * (difference of the mean log-probabilities of a token) - gamma)."""

    beta: PositiveFloat = 2.0
    """The scale of the difference."""
    gamma: NonNegativeFloat = 1.0
    """The margin that a pair aims at."""


class PreferenceConfig(PairConfig):
    """Raises one answer over another, relative to the reference; `kl.coef` is DPO's beta."""

    preference: Literal["sigmoid", "ipo", "simpo"] = "sigmoid"
    """`sigmoid`: -log sigmoid(beta * margin). `ipo`: (margin - 1 / (2 beta))^2, which does not push without end.
    `simpo`: compares mean log-probabilities of tokens, without a reference (`kl: null`)."""
    simpo: SimpoConfig = SimpoConfig()
    """Only for `preference: simpo`."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that are assumed to be ordered wrongly; only for `sigmoid`."""
    kl: KlConfig | None = KlRewardConfig(kind="reward", coef=0.1)


class OnlineDpoConfig(PreferenceConfig):
    """Raises the best answer of a group over the worst."""

    kind: Literal["online_dpo"]
    filter: FilterConfig | None = FilterConfig()


class DpoConfig(PreferenceConfig):
    """Raises the chosen answer of each row of the data over the rejected one; generates nothing to train on."""

    kind: Literal["dpo"]
    kind_needs: ClassVar[AlgorithmNeeds] = AlgorithmNeeds(rows="pairs", has_engines=False, has_logprobs=True)


class SpinConfig(PreferenceConfig):
    """Self-play: raises the demonstration of each row over the policy's own answers, relative to the reference: the
    policy at the start of the iteration."""

    kind: Literal["spin"]
    kind_needs: ClassVar[AlgorithmNeeds] = AlgorithmNeeds(
        rows="demonstrations", compares_group=False, has_logprobs=True
    )
    iteration_steps: PositiveInt = 20
    """After so many steps the reference takes the policy's weights."""

    @property
    def needs(self) -> AlgorithmNeeds:
        return replace(super().needs, self_play_steps=self.iteration_steps)


class RewardModelConfig(PairConfig):
    """Trains a reward model, with a value head in place of the language head: -log sigmoid(score of the chosen answer -
    score of the rejected one). `model` of a checkpoint is a sequence classifier."""

    kind: Literal["reward_model"]
    kind_needs: ClassVar[AlgorithmNeeds] = AlgorithmNeeds(
        rows="pairs", has_engines=False, is_scorer=True, has_logprobs=True
    )


class SppoConfig(PolicyGradientConfig):
    """Self-play preference: each answer's log-ratio to the policy before the step follows how often it wins."""

    kind: Literal["sppo"]
    eta: PositiveFloat = 1.0
    """Scale of the rewards: the log-ratio aims at eta * R - log of the group's mean of exp(eta * R)."""
    loss: LossConfig = SppoLossConfig(kind="sppo")
    aggregation: Aggregation = "seq_mean_token_mean"


class PrimeConfig(PolicyGradientConfig):
    """Process rewards without labels of steps: `roles.critic` is a language model that learns from outcomes, and its
    log-ratio to its start rewards every token."""

    kind: Literal["prime"]
    kind_needs: ClassVar[AlgorithmNeeds] = AlgorithmNeeds(has_critic=True)
    beta: PositiveFloat = 0.05
    """Scale of the rewards of tokens."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token the policy chose, of the rewards of tokens."""
    process_coef: PositiveFloat = 1.0
    """Weight of the rewards of tokens beside the outcome's."""
    right_from: float = 1.0
    """A score of at least this is labelled right, before lengths, turns and tokens change the reward."""

    @property
    def needs(self) -> AlgorithmNeeds:
        return replace(super().needs, implicit_reward_beta=self.beta)


EstimatorConfig: TypeAlias = (
    GaeConfig
    | GrpoConfig
    | GroupConfig
    | ReinforcePpConfig
    | RemaxConfig
    | DistillConfig
    | GdpoConfig
    | OnlineDpoConfig
    | DpoConfig
    | SpinConfig
    | RewardModelConfig
    | SppoConfig
    | PrimeConfig
)

GivenPairsConfig: TypeAlias = DpoConfig | RewardModelConfig
"""The kinds that train on pairs of answers of the data."""

AlgorithmConfig: TypeAlias = Annotated[SftConfig | EstimatorConfig, Field(discriminator="kind")]
