from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from megarl.errors import ConfigError
from megarl.weights.layouts.canonical import canonical_tensors
from tests.tiny_models import FAMILIES, write_tiny_model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_transformers_writes(tmp_path: Path, family: str, tied: bool) -> None:
    shape = write_tiny_model(tmp_path, family, tied=tied, layers=2)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {name: spec.shape for name, spec in canonical_tensors(shape).items()} == written


def test_attention_bias_is_refused_where_it_would_also_sit_on_the_output(tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path, "llama", layers=1)
    with pytest.raises(ConfigError, match="attention_bias is not supported for llama"):
        canonical_tensors(replace(shape, has_qkv_bias=True))
