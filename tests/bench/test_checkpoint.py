from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import checkpoint as module
from bench.checkpoint import SaveTimes, measure_checkpoint, shape_of
from megarl.errors import MachineError
from megarl.weights.layouts.canonical import canonical_tensors


@pytest.mark.slow
def test_everything_is_measured_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(module._SHAPE, hidden=64, ffn_hidden=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab=99)
    monkeypatch.setattr(module, "_SHAPE", small)
    found = measure_checkpoint(tmp_path, gigabytes=0.001, repeats=1)
    assert all(figure.value > 0 for figure in found)
    figures = {figure.name: figure for figure in found}
    assert figures["model"].value == pytest.approx(0.001, rel=0.2)
    assert 0.05 < figures["export, peak memory"].value < 1.5
    assert list(tmp_path.iterdir()) == []


def test_each_save_is_compared_with_the_dd_before_it() -> None:
    stages, tensor = (2.0, 4.0, 8.0), (1.0, 1.0, 10.0)
    times = SaveTimes(stages_s=stages, tensor_s=tensor, blocking_s=(), dd_s=(1.0, 2.0, 4.0, 0.5, 0.6, 0.7), files={})
    assert times.against_dd(stages, first=0) == 0.5
    assert times.against_dd(tensor, first=3) == 0.5


@pytest.mark.parametrize("gigabytes", [0.5, 2.0, 8.0])
def test_the_model_has_the_size_it_should_have(gigabytes: float) -> None:
    num_bytes = sum(spec.num_bytes for spec in canonical_tensors(shape_of(gigabytes)).values())
    assert num_bytes / 1e9 == pytest.approx(gigabytes, abs=0.1)


def test_a_disk_without_room_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(MachineError, match=r"needs 7\.7 GB and 0\.0 GB are free; lower --gigabytes"):
        measure_checkpoint(tmp_path, gigabytes=2.0, repeats=1)
