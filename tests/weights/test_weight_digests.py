from __future__ import annotations

import pytest
import torch

from megarl.weights.algebra.slices import Layout
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from megarl.weights.recordings import DigestedModel, differing_tensors, weight_digests
from tests.engine.trainers import fill
from tests.weights.reference import make_shape

SHAPE = make_shape(kv_heads=1)
TRAINER = megatron_layout(SHAPE, MegatronParallel(tensor=2, pipeline=2, data=2), dtype="float32")
ENGINE = sglang_layout(SHAPE, tensor=4, dtype="float32")


def weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(spec.shape, generator=random) for name, spec in TRAINER.canonical.items()}


def side(layout: Layout, canonical: dict[str, torch.Tensor]) -> DigestedModel:
    digests = [weight_digests(holding, layout.canonical, fill(holding, canonical)) for holding in layout.holdings]
    return DigestedModel(layout=layout, digests=digests)


def test_sides_that_are_split_differently_agree_on_the_same_weights() -> None:
    assert differing_tensors(side(TRAINER, weights()), side(ENGINE, weights())) == ()


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.2.self_attn.k_proj.bias"])
def test_one_element_is_enough(name: str) -> None:
    changed = weights()
    changed[name].view(-1)[-1] += 1e-6
    assert differing_tensors(side(TRAINER, weights()), side(ENGINE, changed)) == (name,)


def test_copies_that_differ_within_a_side_are_named() -> None:
    name = "model.layers.0.self_attn.v_proj.weight"
    changed = weights()
    changed[name][0, 0] += 1
    good, bad = side(ENGINE, weights()), side(ENGINE, changed)
    one_bad_rank = DigestedModel(layout=ENGINE, digests=[*good.digests[:3], bad.digests[3]])
    assert differing_tensors(side(TRAINER, weights()), one_bad_rank) == (name,)
    assert differing_tensors(one_bad_rank, side(TRAINER, weights())) == (name,)
