"""The families of Qwen, for the list of all."""

from __future__ import annotations

from megarl.families.interface import Family
from megarl.families.qwen2 import Qwen2
from megarl.families.qwen2_5_vl import Qwen25Vl
from megarl.families.qwen2_moe import Qwen2Moe
from megarl.families.qwen3 import Qwen3
from megarl.families.qwen3_5 import Qwen35
from megarl.families.qwen3_5_moe import Qwen35Moe
from megarl.families.qwen3_5_moe_text import Qwen35MoeText
from megarl.families.qwen3_5_text import Qwen35Text
from megarl.families.qwen3_moe import Qwen3Moe
from megarl.families.qwen3_next import Qwen3Next
from megarl.families.qwen3_vl import Qwen3Vl

QWEN: tuple[Family, ...] = (
    Qwen2(),
    Qwen25Vl(),
    Qwen2Moe(),
    Qwen3(),
    Qwen3Moe(),
    Qwen3Next(),
    Qwen3Vl(),
    Qwen35(),
    Qwen35Moe(),
    Qwen35MoeText(),
    Qwen35Text(),
)
