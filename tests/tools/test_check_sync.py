"""Weights that reach engines: what is published and what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.config.model import read_model_shape
from megarl.families import FAMILIES
from megarl.tools.check_sync import (
    PADDING,
    compare_holding,
    hold,
    random_tensors,
    rehearse,
    sum_by_class,
    tensor_class,
    write_random_model,
)
from megarl.weights.algebra.plan import Plan, plan
from megarl.weights.executors.codecs import as_files
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.reference import make_shape


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_a_written_model_has_the_shape_that_was_asked_for(family: str, tmp_path: Path) -> None:
    # Gemma's head is always its embedding.
    shape = make_shape(family, layers=2, tied=family == "gemma3_text")
    write_random_model(tmp_path, shape, seed=1)
    assert read_model_shape(tmp_path) == shape
    found = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert found == {name: tuple(tensor.shape) for name, tensor in as_files(random_tensors(shape, seed=1)).items()}


SHAPE = make_shape("qwen3_moe", layers=2, vocab=99)
LAYOUT = sglang_layout(SHAPE, tensor=2, dtype="float32")
ROUTER = "model.layers.1.mlp.gate.weight"


def moves() -> Plan:
    parallel = MegatronParallel(tensor=2, pipeline=2, data=2, expert=2)
    return plan(megatron_layout(SHAPE, parallel, dtype="float32"), LAYOUT)


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_every_tensor_of_every_family_has_a_class(family: str) -> None:
    shape = make_shape(family)
    experts, classes = shape.experts, {tensor_class(name) for name in canonical_tensors(shape)}
    dense = {"embedding", "qkv", "attention output", "norms", "output"}
    block = {"router", "experts"} if experts else {"feed-forward"}
    block |= {"feed-forward"} if experts and experts.num_dense_layers else set()
    block |= {"delta nets"} if shape.delta else set()
    assert classes == dense | block | ({"shared expert"} if experts and experts.shared else set())


def test_equal_tensors_are_equal_in_every_class_and_every_byte_is_counted() -> None:
    model = random_tensors(SHAPE, seed=1)
    verdicts = sum_by_class(
        verdict
        for holding in LAYOUT.holdings
        for verdict in compare_holding(
            holding, hold(holding, model, padding=0.0), hold(holding, model, padding=0.0), holder=""
        )
    )
    assert all(verdict.is_equal for verdict in verdicts)
    assert {name for verdict in verdicts for name in verdict.tensors} == set(LAYOUT.canonical)
    held = sum(piece.slice.num_elements * 4 for holding in LAYOUT.holdings for piece in holding.pieces)
    assert sum(verdict.num_bytes for verdict in verdicts) == held


def test_the_first_difference_is_named_by_its_canonical_place() -> None:
    model = random_tensors(SHAPE, seed=1)
    holding = LAYOUT.by_rank[1]
    found, expected = hold(holding, model, padding=0.0), hold(holding, model, padding=0.0)
    # The second rank's share of o_proj begins at column 4; experts are stacked, [expert, row, column].
    found["model.layers.0.self_attn.o_proj.weight"][3, 2] = 5.0
    found["model.layers.1.mlp.experts.w2_weight"][2, 1, 0] = 6.0
    by_class = {
        verdict.name: verdict for verdict in sum_by_class(compare_holding(holding, found, expected, holder="here"))
    }
    wrong = {name for name, verdict in by_class.items() if not verdict.is_equal}
    assert wrong == {"attention output", "experts"}
    attention, experts = by_class["attention output"].first_difference, by_class["experts"].first_difference
    assert attention is not None
    assert attention.startswith("here: model.layers.0.self_attn.o_proj.weight[3, 6] is 5, expected ")
    assert experts is not None
    assert experts.startswith("here: model.layers.1.mlp.experts.2.down_proj.weight[1, 32] is 6, expected ")
    assert by_class["experts"].num_differing == 1


def test_other_padding_is_a_difference() -> None:
    model = random_tensors(SHAPE, seed=1)
    holding = LAYOUT.by_rank[1]
    found, expected = hold(holding, model, padding=1.0), hold(holding, model, padding=0.0)
    wrong = [verdict for verdict in compare_holding(holding, found, expected, holder="") if not verdict.is_equal]
    assert {verdict.name for verdict in wrong} == {PADDING}


def test_a_plan_is_carried_out_exactly() -> None:
    verdicts = rehearse(moves(), random_tensors(SHAPE, seed=1))
    assert all(verdict.is_equal for verdict in verdicts)
    assert "router" in {verdict.name for verdict in verdicts}


def test_a_rehearsal_notices_a_source_that_has_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_tensors(SHAPE, seed=1)
    chosen = moves()
    rank = next(move.source_rank for move in chosen.moves if move.slice.name == ROUTER)
    held = hold(chosen.source.by_rank[rank], model, padding=0.0)
    assert any("router" in name for name in held)

    def hold_wrong(*arguments: object, **options: object) -> dict[str, torch.Tensor]:
        tensors = hold(*arguments, **options)  # type: ignore[arg-type]
        return {name: tensor + 1 if name.endswith("mlp.router.weight") else tensor for name, tensor in tensors.items()}

    monkeypatch.setattr("megarl.tools.check_sync.hold", hold_wrong)
    wrong = [verdict for verdict in rehearse(chosen, model) if not verdict.is_equal]
    assert [verdict.name for verdict in wrong] == ["router"]
