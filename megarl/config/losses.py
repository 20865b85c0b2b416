"""The recipe's `algorithm.loss`: one tagged section per loss, and how token losses become one number."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PositiveFloat

from megarl.config.section import Section, UserCode

Aggregation: TypeAlias = Annotated[
    Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"],
    Field(
        description="How token losses become one number, over all tokens and sequences of an update however they are "
        "split."
    ),
]


class PpoLossConfig(Section):
    """The ratio of new to old probability, clipped for each token."""

    kind: Literal["ppo"]
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """A ratio below 1 minus this gives no gradient where the advantage is negative."""
    clip_high: PositiveFloat = 0.2
    """Above `clip_low`, unlikely tokens can grow; DAPO uses 0.28."""
    clip_dual: Annotated[float, Field(gt=1)] = 3.0
    """Bounds the loss where the advantage is negative and the ratio large."""


class GspoLossConfig(Section):
    """One ratio per sequence, the geometric mean of its tokens': far narrower clips than PPO's."""

    kind: Literal["gspo"]
    clip_low: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """The sequence's ratio is clipped below 1 minus this."""
    clip_high: PositiveFloat = 4e-4
    """The sequence's ratio is clipped above 1 plus this."""


class CispoLossConfig(Section):
    """Clips the weight of a token, never its gradient."""

    kind: Literal["cispo"]
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The lowest weight is 1 minus this."""
    clip_high: PositiveFloat = 0.2
    """The highest weight is 1 plus this."""


class GpgLossConfig(Section):
    """The plain policy gradient: no ratio, no clip."""

    kind: Literal["gpg"]


class SapoLossConfig(Section):
    """A soft gate instead of a clip; the higher the temperature, the sooner it closes."""

    kind: Literal["sapo"]
    tau_positive: PositiveFloat = 1.0
    """The temperature where the advantage is positive."""
    tau_negative: PositiveFloat = 1.05
    """The temperature where it is not."""


class GmpoLossConfig(Section):
    """The geometric mean of a sequence's ratios, each clipped in log space."""

    kind: Literal["gmpo"]
    clip_low: PositiveFloat = 0.4
    """The lowest log-ratio of a token is minus this."""
    clip_high: PositiveFloat = 0.4
    """The highest log-ratio of a token."""


class SppoLossConfig(Section):
    """The squared distance of a sequence's log-ratio from its advantage."""

    kind: Literal["sppo"]


class FunctionLossConfig(Section):
    """Your own loss: `name(tokens)` gets a `PolicyTokens` of torch tensors and returns a loss per token, [N]."""

    kind: Literal["function"]
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
