"""The families of models, one file each; `interface` says how one is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from megarl.families.deepseek_v2 import DeepseekV2
from megarl.families.deepseek_v3 import DeepseekV3
from megarl.families.gemma3 import Gemma3
from megarl.families.glm4_moe import Glm4Moe
from megarl.families.gpt_oss import GptOss
from megarl.families.interface import Family
from megarl.families.llama import Llama
from megarl.families.mistral import Mistral
from megarl.families.mixtral import Mixtral
from megarl.families.phi3 import Phi3
from megarl.families.qwen import QWEN
from megarl.families.shape import ModelShape

FAMILIES: tuple[Family, ...] = (
    DeepseekV2(),
    DeepseekV3(),
    Gemma3(),
    Glm4Moe(),
    GptOss(),
    Llama(),
    Mistral(),
    Mixtral(),
    Phi3(),
    *QWEN,
)
BY_NAME: Mapping[str, Family] = {family.name: family for family in FAMILIES}
PUBLIC_MODELS: Mapping[str, ModelShape] = {name: shape for family in FAMILIES for name, shape in family.models.items()}
"""Shapes that can be planned without a folder."""


def family_of(shape: ModelShape) -> Family:
    return BY_NAME[shape.family]


def uniform_shapes(shape: ModelShape) -> tuple[tuple[ModelShape, int], ...]:
    """Return for each kind of layer a model with layers of that kind only, and the number of these layers.

    Kinds that differ in nothing that a shape has are one.
    """
    family = family_of(shape)
    counts = Counter(family.kinds(shape))
    numbers: Counter[ModelShape] = Counter()
    for kind, count in counts.items():
        numbers[family.alone(shape, kind)] += count
    return tuple(numbers.items())
