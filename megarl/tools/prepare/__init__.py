"""Prompt tables from the formats that data sets come in."""

from __future__ import annotations

from enum import StrEnum


class DataSetName(StrEnum):
    GSM8K = "gsm8k"
    MATH = "math"
    DAPO_MATH = "dapo_math"
    ULTRAFEEDBACK = "ultrafeedback"
    GEO3K = "geo3k"
    HARBOR = "harbor"
    """A folder of tasks in Harbor's format."""
    ROWS = "rows"
