from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from megarl.train.fused import Rotation, gated, rotated

TOLERANCES = {"activation": 1e-5, "rotation": 1e-6, "scores": 1e-5, "digests": 0.0, "digests_in_one_launch": 0.0}


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    """Of every kernel from its torch version, by Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [sys.executable, "-W", "ignore", "-m", "tests.interpreted_kernels"]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kernel", TOLERANCES)
def test_kernels_compute_what_torch_does(differences: dict[str, float], kernel: str) -> None:
    assert differences[kernel] <= TOLERANCES[kernel]


def test_the_activation_gates_the_second_half_by_the_first() -> None:
    gate, up = torch.randn(2, 3, 8)
    assert torch.equal(gated(torch.cat((gate, up), dim=-1)), F.silu(gate) * up)


def test_a_rotation_is_a_product_of_complex_numbers() -> None:
    values = torch.randn(5, 2, 8)
    angles = torch.rand(5, 4) * 6
    pairs = torch.complex(values[..., :4], values[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((pairs.real, pairs.imag), dim=-1)
    torch.testing.assert_close(rotated(values, Rotation.by(angles)), expected)
