"""Hook points, linear layers cut by the layouts and recorded against whole ones, and digests of weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.families import FAMILIES
from megarl.weights.algebra.slices import Holding, Layout
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from megarl.weights.recordings import (
    LM_HEAD,
    LOGPROBS,
    ActivationPatch,
    Columns,
    DigestedModel,
    ModuleHook,
    PatchPlace,
    Recorder,
    Recording,
    differing_tensors,
    hook_points,
    module_hooks,
    weight_digests,
    write_patches,
)
from tests.weights.reference import make_shape
from tests.weights.transfer_peers import cut

NUM_TOKENS = 5

LAYOUTS = {
    "megatron": megatron_layout(
        make_shape(), MegatronParallel(tensor=2, pipeline=2, virtual_pipeline=2), dtype="float32"
    ),
    "megatron-split-groups": megatron_layout(make_shape(kv_heads=1), MegatronParallel(tensor=4), dtype="float32"),
    "sglang-cpu": sglang_layout(make_shape("qwen3", tied=True), tensor=2, dtype="float32", is_cpu_engine=True),
    "sglang-cpu-padded": sglang_layout(make_shape(kv_heads=1), tensor=2, dtype="float32", is_cpu_engine=True),
    "sglang-replicas": sglang_layout(make_shape(kv_heads=1), tensor=4, dtype="float32"),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(layout: Layout) -> dict[str, Tensor]:
    return {name: random(*spec.shape, seed=seed) for seed, (name, spec) in enumerate(layout.canonical.items())}


def modules_of(holding: Holding, weights: dict[str, Tensor]) -> dict[str, torch.nn.Module]:
    """Return the rank's matrices as linear layers; padding is zero."""
    modules: dict[str, torch.nn.Module] = {}
    for name, tensor in cut(holding, weights).items():
        if name.endswith(".weight"):
            module = torch.nn.Linear(1, 1, bias=False) if tensor.dim() == 2 else torch.nn.Identity()
            if tensor.dim() == 2:
                module.weight = torch.nn.Parameter(tensor)  # type: ignore[assignment]
            modules[name.removesuffix(".weight")] = module
    return modules


def input_of(hook: ModuleHook, width: int) -> Tensor:
    """Return the rank's columns of a layer's input; columns of a padded head are zero."""
    (point,) = {columns.hook_point for columns in hook.inputs}
    whole = random(NUM_TOKENS, 64, seed=len(point))
    local = torch.zeros(NUM_TOKENS, width)
    for columns in hook.inputs:
        size = width if columns.size is None else columns.size
        local[:, columns.local_first : columns.local_first + size] = whole[:, columns.first : columns.first + size]
    return local


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_columns_of_all_ranks_make_the_output_of_whole_layers(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    weights = weights_of(layout)
    for holding in layout.holdings:
        modules = modules_of(holding, weights)
        wanted = [hook for hook in module_hooks(holding) if hook.inputs]
        recorder = Recorder(modules, wanted)
        for hook in wanted:
            module = modules[hook.module]
            assert isinstance(module, torch.nn.Linear)
            module(input_of(hook, module.weight.shape[1]))
        recorder.close()
        write_patches(tmp_path / f"{holding.rank}.safetensors", recorder.patches())
    recording = Recording(sorted(tmp_path.iterdir()), num_tokens=NUM_TOKENS)
    checked = 0
    for tensor, weight in weights.items():
        point = tensor.removesuffix(".weight")
        if point.endswith("_proj"):
            before = {"o_proj": "self_attn.attention", "down_proj": "mlp.activation"}.get(point.split(".")[-1])
            norm = "input_layernorm" if "self_attn" in point else "post_attention_layernorm"
            layer = ".".join(point.split(".")[:3])
            given = random(NUM_TOKENS, 64, seed=len(f"{layer}.{before or norm}"))[:, : weight.shape[1]]
            torch.testing.assert_close(recording.whole(point), given @ weight.t(), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(recording.whole(f"{layer}.{before or norm}"), given)
            checked += 1
    assert checked == 7 * 4


def test_calls_follow_each_other_and_what_is_ahead_is_left_out(tmp_path: Path) -> None:
    module = torch.nn.Identity()
    column = Columns(hook_point="x", first=0, local_first=0, size=None)
    recorder = Recorder({"m": module}, [ModuleHook(module="m", inputs=(), outputs=(column,))])
    rows = random(6, 3, seed=0)
    for call in (rows[:3], rows[3:4], rows[4:5], rows[5:]):
        module(call)
    recorder.close()
    module(rows)
    write_patches(tmp_path / "a.safetensors", recorder.patches())
    assert torch.equal(Recording([tmp_path / "a.safetensors"], num_tokens=5).whole("x"), rows[:5])


def test_what_works_in_place_later_does_not_change_what_was_heard() -> None:
    module = torch.nn.Identity()
    column = Columns(hook_point="x", first=0, local_first=1, size=2)
    recorder = Recorder({"m": module}, [ModuleHook(module="m", inputs=(), outputs=(column,))], max_calls=1)
    rows = random(2, 4, seed=0)
    kept = rows[:, 1:3].clone()
    module(rows).mul_(2)
    module(rows)
    (patch,) = recorder.patches()
    assert torch.equal(patch.values, kept)


def parts(path: Path, first: Tensor, second: Tensor, *, token: int = 0) -> Iterator[Path]:
    for index, (values, start) in enumerate(((first, 0), (second, token))):
        file = path / f"{index}.safetensors"
        write_patches(file, [ActivationPatch(place=PatchPlace(hook_point="x", token=start, column=0), values=values)])
        yield file


def test_copies_are_one_and_parts_of_a_sum_are_added(tmp_path: Path) -> None:
    first, second = random(4, 3, seed=0), random(4, 3, seed=1)
    copies = Recording(parts(tmp_path, first, first * (1 + 1e-6)), num_tokens=4)
    assert torch.equal(copies.whole("x"), first)
    summed = Recording(parts(tmp_path, first, second), num_tokens=4)
    assert torch.equal(summed.whole("x"), first + second)


def test_tokens_that_are_split_over_ranks_are_laid_end_to_end(tmp_path: Path) -> None:
    rows = random(8, 3, seed=0)
    recording = Recording(parts(tmp_path, rows[:4], rows[4:], token=4), num_tokens=6)
    assert torch.equal(recording.whole("x"), rows[:6])


@pytest.mark.parametrize("family", [family.name for family in FAMILIES if make_shape(family.name).experts is None])
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_belongs_to_a_site(family: str, tied: bool) -> None:
    shape = make_shape(family, layers=2, tied=tied)
    owned = [weight for point in hook_points(shape) for weight in point.weights]
    # Tied embeddings are both the first and the last weight.
    assert len(owned) == len(set(owned)) + tied
    assert set(owned) == set(canonical_tensors(shape))


def test_sites_are_in_the_order_of_the_forward_pass() -> None:
    names = [point.name for point in hook_points(make_shape(layers=2))]
    assert names[:6] == [
        "model.embed_tokens",
        "model.layers.0.input_layernorm",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.0.self_attn.attention",
    ]
    assert names[-4:] == ["model.layers.1.mlp.down_proj", "model.norm", LM_HEAD, LOGPROBS]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_ranks_of_a_layout_see_every_site_but_the_last_two(layout: Layout) -> None:
    seen = {
        columns.hook_point
        for holding in layout.holdings
        for hook in module_hooks(holding)
        for columns in (*hook.inputs, *hook.outputs)
    }
    layers = {name.split(".")[2] for name in layout.canonical if ".layers." in name}
    shape = make_shape(layers=len(layers))
    assert seen == {point.name for point in hook_points(shape)[:-2]}


SHAPE = make_shape(kv_heads=1)
TRAINER = megatron_layout(SHAPE, MegatronParallel(tensor=2, pipeline=2, data=2), dtype="float32")
ENGINE = sglang_layout(SHAPE, tensor=4, dtype="float32")


def weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(spec.shape, generator=random) for name, spec in TRAINER.canonical.items()}


def side(layout: Layout, canonical: dict[str, torch.Tensor]) -> DigestedModel:
    digests = [weight_digests(holding, layout.canonical, cut(holding, canonical)) for holding in layout.holdings]
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
