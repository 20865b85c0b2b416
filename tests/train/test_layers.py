from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.train.attention import Rotation, rotated
from megarl.train.layers import RMSNorm, gated
from megarl.train.logprob import _summed

TOLERANCES = {"activation": 1e-5, "rotation": 1e-6, "scores": 1e-5}
TOLERANCES |= {"digests_in_one_launch": 0.0, "fp8_blocks": 0.0}
TOLERANCES |= {"delta_rules": 1e-5, "a_wrong_delta_rule": 1e-5, "convolutions_and_gated_norms": 2e-5}


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    """Return the distance of every kernel from its torch version, by Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [sys.executable, "-W", "ignore", "-m", "tests.interpreted_kernels"]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.patient
@pytest.mark.parametrize("kernel", TOLERANCES)
def test_kernels_compute_what_torch_does(differences: dict[str, float], kernel: str) -> None:
    assert differences[kernel] <= TOLERANCES[kernel]


def test_the_activation_gates_the_second_half_by_the_first() -> None:
    gate, up = torch.randn(2, 3, 8)
    assert torch.equal(gated(torch.cat((gate, up), dim=-1)), F.silu(gate) * up)


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_the_norm_equals_the_formula_and_marks_its_weight_for_megatron(is_sequence_parallel: bool) -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        sequence_parallel=is_sequence_parallel,
        tensor_model_parallel_size=2,
    )
    norm = RMSNorm(config, hidden_size=8, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(8) / 4)
    hidden = torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(0))
    expected = hidden / (hidden.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(hidden), expected)
    assert norm.weight.sequence_parallel is is_sequence_parallel  # type: ignore[attr-defined]


class OnGpu(torch.Tensor):
    """Values of a CPU that say they are on a GPU, where Triton would be used."""

    is_cuda = True


def test_without_fused_kernels_a_gpu_computes_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megarl.train.kernels", None)
    gate_up, values = torch.randn(4, 1, 16), torch.randn(4, 2, 8)
    logits, columns, angles = torch.randn(4, 32), torch.zeros(4, dtype=torch.int64), torch.rand(4, 4)
    pairs = (
        (gated(gate_up.as_subclass(OnGpu), is_fused=False), gated(gate_up)),
        (rotated(values.as_subclass(OnGpu), Rotation.by(angles, is_fused=False)), rotated(values, Rotation.by(angles))),
        (
            _summed(logits.as_subclass(OnGpu), columns, 1.0, is_fused=False).weighted,
            _summed(logits, columns, 1.0).weighted,
        ),
    )
    for found, expected in pairs:
        assert torch.equal(found, expected)
    with pytest.raises(ModuleNotFoundError):
        rotated(values.as_subclass(OnGpu), Rotation.by(angles))
