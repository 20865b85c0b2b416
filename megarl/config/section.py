"""What every section of a recipe has in common: unknown keys are refused, values do not change after loading."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False, allow_inf_nan=False
    )
