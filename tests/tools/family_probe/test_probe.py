from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.cli.main import run
from megarl.config.roles import ActorConfig
from megarl.families.shape import ModelShape
from megarl.tools.family_probe import probe as family_probe
from megarl.tools.family_probe.probe import ProbeFinding, probe
from megarl.tools.small_recipe import tiny_shape
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.sglang import sglang_layout
from tests.tiny_models import FAMILIES, VARIANTS, write_tiny_model
from tests.weights.reference import make_shape

LIGHT = ("moonlight",)
"""A mixture with dense layers; `test_draft.py` probes a dense model."""

Ranks = list[dict[str, torch.Tensor]]


def loaded(shape: ModelShape, numbered: dict[str, torch.Tensor]) -> Ranks:
    """Return what an engine of two ranks holds, if the description is right."""
    layout = sglang_layout(shape, tensor=2, dtype="float32", is_cpu_engine=True)
    return [family_probe._described(holding, numbered) for holding in layout.holdings]


def compared(change: str) -> ProbeFinding:
    shape = tiny_shape(make_shape("qwen3"), ActorConfig(pool="probe"))
    numbered = family_probe.numbered({name: spec.shape for name, spec in canonical_tensors(shape).items()})
    ranks = loaded(shape, numbered)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    match change:
        case "rows":
            ranks[1][name] = ranks[1][name].flip(0)
        case "name":
            ranks[0]["other"] = ranks[0].pop(name)
    return family_probe._engine("SGLang", shape, numbered, ranks, expert=1)


def test_an_element_in_another_place_is_found_and_named() -> None:
    assert compared("nothing").is_equal
    assert compared("rows") == ProbeFinding(
        what="SGLang",
        detail="other elements in model.layers.1.self_attn.qkv_proj.weight of TP rank 1",
        is_equal=False,
    )
    assert "qkv_proj.weight is missing" in compared("name").detail


def test_files_without_a_described_tensor_differ_from_the_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = write_tiny_model(tmp_path / "model", "qwen2", layers=2)
    monkeypatch.setattr(family_probe, "read_model_shape", lambda _: replace(shape, num_layers=3))
    found = next(probe(tmp_path / "model", work=tmp_path / "work"))
    assert not found.is_equal
    assert found.detail.startswith("model.layers.2.input_layernorm.weight is not there")
    monkeypatch.setattr(family_probe, "probe", lambda *_, **__: iter([found]))
    assert run(["family", "probe", str(tmp_path / "model")]) == 76
    assert capsys.readouterr().out.startswith("files              DIFFERS: model.layers.2.input")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in LIGHT else pytest.mark.slow) for name in (*FAMILIES, *VARIANTS)]
)
@pytest.mark.usefixtures("real_engines")
def test_the_description_of_every_family_is_that_of_its_files_of_transformers_and_of_sglang(
    family: str, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "model", family, layers=2)
    findings = list(probe(tmp_path / "model", work=tmp_path / "work"))
    assert [finding for finding in findings if not finding.is_equal] == []
    assert len(findings) >= 4
