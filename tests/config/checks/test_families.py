"""Features that were not tried with a family are refused with its reason; the config.json that it writes is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from megarl.config.checks.recipe import check_without_files
from megarl.config.model import read_model_shape
from megarl.errors import ConfigError
from megarl.families import FAMILIES, PUBLIC_MODELS, family_of
from megarl.families.interface import Family, Feature
from megarl.families.shape import ModelShape
from tests.planner.recipes import PPO, make_recipe

USES: dict[Feature, tuple[str, ...]] = {
    "critic": PPO,
    "fp8": ("roles.rollout.precision=fp8",),
    "lora": ("model.lora={modules: [q_proj, v_proj]}",),
}


def shapes_of_family(family: Family) -> Sequence[ModelShape]:
    """Return its public models; where it has none, those of the family that is released around its text."""
    around = [shape for shape in PUBLIC_MODELS.values() if type(family) in type(family_of(shape)).__bases__]
    return [*family.models.values()] or [replace(shape, family=family.name) for shape in around]


@pytest.mark.parametrize(
    ("family", "feature"),
    [pytest.param(family, feature, id=f"{family.name}-{feature}") for family in FAMILIES for feature in USES],
)
def test_a_feature_is_refused_if_and_only_if_the_family_says_so(family: Family, feature: Feature) -> None:
    shape = max(shapes_of_family(family), key=lambda shape: shape.hidden)
    recipe = make_recipe(*USES[feature], "roles.actor={pool: train}", "cluster.gpu=h200")
    problems = [problem.message for problem in check_without_files(recipe, shape, critic=shape)]
    assert [reason for reason in family.refuses.values() if reason in problems] == (
        [family.refuses[feature]] if feature in family.refuses else []
    )


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_a_config_that_a_family_writes_is_read_by_transformers_and_as_the_same_shape(name: str, tmp_path: Path) -> None:
    shape = PUBLIC_MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(family_of(shape).config_json(shape)))
    config = AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert (config.hidden_size, config.num_hidden_layers) == (shape.hidden, shape.num_layers)
    assert read_model_shape(tmp_path) == shape


REFUSED: tuple[tuple[str, dict[str, object], str], ...] = (
    ("llama-3.1-8b", {"rope_parameters": {"low_freq_factor": None}}, "low_freq_factor is missing"),
    ("llama-3.1-8b", {"attention_bias": True}, "attention_bias and mlp_bias are not supported for llama"),
    ("mistral-7b", {"sliding_window": 4096}, "a sliding window is not supported"),
    ("phi-4", {"partial_rotary_factor": 0.75}, "partial_rotary_factor 0.75 is not supported"),
    ("mixtral-8x7b", {"head_dim": 64}, "SGLang does not read head_dim 64"),
    ("gemma-3-1b", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
    ("gemma-3-1b", {"tie_word_embeddings": False}, "SGLang does not read lm_head.weight"),
    ("gemma-3-1b", {"hidden_activation": "silu"}, "hidden_activation silu is not supported"),
    ("glm-4.5-air", {"n_group": 8}, "n_group 8 is not supported"),
    ("glm-4.5-air", {"norm_topk_prob": False}, "norm_topk_prob false is not supported with a sigmoid router"),
    ("deepseek-v2-lite", {"norm_topk_prob": True}, "norm_topk_prob is not supported"),
    ("deepseek-v3", {"topk_group": 2}, "Megatron would rank a group by 4 experts, SGLang by 2"),
    ("deepseek-v3", {"rope_interleave": False}, "rope_interleave False is not supported"),
    ("deepseek-v3", {"quantization_config": {"quant_method": "awq"}}, "but for fp8 in blocks of 128 x 128"),
    ("gpt-oss-20b", {"attention_bias": False}, "attention_bias false is not supported"),
    ("gpt-oss-20b", {"swiglu_limit": 8.0}, "swiglu_limit 8.0 is not supported"),
    ("gpt-oss-20b", {"quantization_config": {"quant_method": "fp8"}}, "but for mxfp4"),
    ("gpt-oss-20b", {"layer_types": ["chunked_attention"]}, "layer_types ['chunked_attention'] are not supported"),
    ("qwen3-next-80b-a3b", {"attn_output_gate": False}, "attn_output_gate false is not supported"),
    ("qwen3-next-80b-a3b", {"full_attention_interval": 3}, "layer_types are not one full_attention in 3"),
    ("qwen2.5-vl-3b", {"vision_config": {"patch_size": 16}}, "patches of 1536 numbers are not supported"),
    ("qwen3.5-4b", {"text_config": None}, "text_config is missing"),
    ("qwen3.5-4b", {"text_config": {"output_gate_type": "sigmoid"}}, "output_gate_type sigmoid is not supported"),
    ("qwen3.5-35b-a3b", {"text_config": {"norm_topk_prob": False}}, "norm_topk_prob false is not supported"),
)


@pytest.mark.parametrize(
    ("name", "change", "reason"), [pytest.param(*case, id=f"{case[0]}-{next(iter(case[1]))}") for case in REFUSED]
)
def test_what_trainer_or_engine_would_compute_differently_is_refused_in_one_line(
    name: str, change: dict[str, object], reason: str, tmp_path: Path
) -> None:
    shape = PUBLIC_MODELS[name]
    config = family_of(shape).config_json(shape)
    for key, value in change.items():
        there = config.get(key)
        config[key] = {**there, **value} if isinstance(there, dict) and isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as raised:
        read_model_shape(tmp_path)
    (problem,) = raised.value.problems
    assert problem.key == "model.path"
    assert reason in problem.message
    assert "\n" not in problem.message
