"""What is learned from a step: one tagged section per algorithm."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from megarl.config.section import Section


class SftConfig(Section):
    kind: Literal["sft"]


class GrpoConfig(Section):
    kind: Literal["grpo"]
    normalize_std: bool = True
    """Divide by the group's standard deviation; false is Dr. GRPO."""
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    clip_dual: Annotated[float, Field(gt=1)] = 3.0
    """Bound on the loss where the advantage is negative and the ratio large."""
    entropy_coef: NonNegativeFloat = 0.0


AlgorithmConfig = Annotated[SftConfig | GrpoConfig, Field(discriminator="kind")]
