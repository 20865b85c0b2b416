from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from megarl.config.model import Family, read_model_shape
from megarl.tools.check_sync import write_random_model
from megarl.weights.layouts.canonical import canonical_tensors
from tests.weights.reference import make_shape


@pytest.mark.parametrize("family", Family)
def test_a_written_model_has_the_shape_that_was_asked_for(family: Family, tmp_path: Path) -> None:
    shape = make_shape(family, layers=2)
    write_random_model(tmp_path, shape, seed=1)
    assert read_model_shape(tmp_path) == shape
    found = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert found == {name: spec.shape for name, spec in canonical_tensors(shape).items()}
