from __future__ import annotations

import pytest

from megarl.errors import WeightSyncError
from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.executors.tensors import check_holding
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.reference import make_shape

HOLDING = sglang_layout(make_shape(), tensor=2, dtype="float32").holdings[0]
NAME = "model.layers.0.mlp.gate_up_proj.weight"


def test_a_holder_with_the_promised_tensors_passes() -> None:
    check_holding(HOLDING, dict(HOLDING.tensors), holder="engine 0 rank 0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NAME: None}, f"engine 0 rank 0 does not match its layout: {NAME} is missing"),
        ({NAME: TensorSpec(shape=(64, 9), dtype="float32")}, rf"{NAME} has shape \[64, 9\], expected \[64, 8\]"),
        ({NAME: TensorSpec(shape=(64, 8), dtype="bfloat16")}, f"{NAME} is bfloat16, expected float32"),
        ({"extra.weight": TensorSpec(shape=(1,), dtype="float32")}, "extra.weight is unexpected"),
    ],
)
def test_a_tensor_that_differs_is_named(change: dict[str, TensorSpec | None], message: str) -> None:
    actual = {name: spec for name, spec in ({**HOLDING.tensors, **change}).items() if spec is not None}
    with pytest.raises(WeightSyncError, match=message):
        check_holding(HOLDING, actual, holder="engine 0 rank 0")


def test_only_the_first_differences_are_listed() -> None:
    with pytest.raises(WeightSyncError, match=rf"and {len(HOLDING.tensors) - 5} more$"):
        check_holding(HOLDING, {}, holder="engine 0 rank 0")
