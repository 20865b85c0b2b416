from __future__ import annotations

import pytest

from megarl.config.recipe import RunConfig
from megarl.config.section import Device


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_the_device_of_a_run_decides_its_dtype(device: Device, dtype: str) -> None:
    assert RunConfig(name="test", steps=1, device=device).dtype == dtype
