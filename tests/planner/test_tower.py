"""The tower that sees images, in memory and time, beside transformers' own module."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText

from megarl.config.section import REMEMBERED_IMAGE_BYTES
from megarl.families import PUBLIC_MODELS, family_of
from megarl.families.shape import ModelShape
from megarl.planner.complete import complete
from megarl.planner.deployment import Deployment, StepWorkload
from megarl.planner.fit import size
from megarl.planner.hardware import ATTENTION_EFFICIENCY, DENSE_EFFICIENCY, GPUS, LAYER_START_S
from megarl.planner.ledger import MemoryPhase, ledgers
from megarl.planner.timing import PhaseName, Timing
from megarl.planner.tower import TowerWork, engine_tower_parameters, num_tower_parameters
from megarl.tools.family_probe.probe import loaded_parameters
from tests.planner.recipes import make_recipe, shapes_of
from tests.tiny_models import write_tiny_model

SEEING = [name for name, shape in PUBLIC_MODELS.items() if shape.vision is not None]


def tower_of(shape: ModelShape, folder: Path, device: str) -> torch.nn.Module:
    """Return transformers' tower of a shape, without the layers of its text."""
    config = family_of(shape).config_json(replace(shape, num_layers=1))
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    with torch.device(device):
        tower: torch.nn.Module = type(whole.model.visual)(whole.config.vision_config)
    return tower.requires_grad_(False).eval()


@pytest.mark.parametrize("name", SEEING)
def test_a_tower_has_the_parameters_of_transformers(name: str, tmp_path: Path) -> None:
    tower = tower_of(PUBLIC_MODELS[name], tmp_path, "meta")
    assert num_tower_parameters(PUBLIC_MODELS[name]) == sum(each.numel() for each in tower.parameters())


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """The most bytes of tensors that exist together, beside those of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._known = {each.untyped_storage()._cdata for each in (*module.parameters(), *module.buffers())}
        self._now = self.most = 0

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(storage._cdata)
                self._now += storage.nbytes()
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return made

    def _forget(self, known: int, num_bytes: int) -> None:
        self._known.discard(known)
        self._now -= num_bytes


SIDE = 12
"""Tokens on each side of an image."""


def small(name: str) -> ModelShape:
    """Return a shape with two layers in a tower of a quarter of the width, of which one sees windows or is deep."""
    shape = PUBLIC_MODELS[name]
    assert shape.vision is not None
    vision = replace(
        shape.vision,
        num_layers=2,
        hidden=shape.vision.hidden // 4,
        ffn=shape.vision.ffn // 4,
        heads=4,
        deep_layers=shape.vision.deep_layers and (0,),
        whole_layers=shape.vision.whole_layers and (1,),
    )
    return replace(shape, hidden=shape.hidden // 4, vision=vision)


def work_of(shape: ModelShape) -> TowerWork:
    assert shape.vision is not None
    return TowerWork(vision=shape.vision, hidden=shape.hidden, most_tokens=SIDE**2, mean_tokens=SIDE**2)


def see(shape: ModelShape, tower: torch.nn.Module, dtype: torch.dtype) -> None:
    assert shape.vision is not None
    side = SIDE * shape.vision.merge
    tower(torch.zeros(side**2, shape.vision.patch_width).to(dtype), grid_thw=torch.tensor([[1, side, side]]))


@pytest.mark.patient
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen2.5-vl-3b", "qwen2.5-vl-72b", "qwen3-vl-2b", "qwen3-vl-8b"])
def test_an_image_takes_the_memory_of_transformers_module(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    shape = small(name)
    tower = tower_of(shape, tmp_path, "cpu").to(dtype)
    with torch.no_grad(), Peak(tower) as peak:
        see(shape, tower, dtype)
    assert work_of(shape).activation_bytes(SIDE**2, dtype.itemsize) == pytest.approx(peak.most, rel=0.12)


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "qwen3-vl-4b"])
def test_an_image_takes_the_operations_of_transformers_module(name: str, tmp_path: Path) -> None:
    shape = small(name)
    tower: Any = tower_of(shape, tmp_path, "cpu")
    tower.set_attn_implementation("eager")  # products that are counted
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        see(shape, tower, torch.float32)
    assert work_of(shape).work(SIDE**2).total == pytest.approx(counter.get_total_flops(), rel=0.001)


@pytest.mark.slow
@pytest.mark.usefixtures("real_engines")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_each_rank_of_an_engine_has_the_parameters_that_are_counted(family: str, tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path / "model", family)
    options = family_of(shape).engine.cpu_options
    for parameters in loaded_parameters(tmp_path / "model", tmp_path / "run", tensor=2, expert=1, options=options):
        own = sum(each.numel() for name, each in parameters.items() if name.startswith("visual."))
        assert own == engine_tower_parameters(shape, tensor=2)


def deployed(name: str, *assignments: str) -> Deployment:
    recipe = make_recipe("roles.actor.is_sequence_parallel=true", *assignments)
    return complete(recipe, shapes_of(PUBLIC_MODELS[name]), GPUS["h100"])[1]


def rows(deployment: Deployment, phase: MemoryPhase) -> dict[str, int]:
    found = [each for each in ledgers(deployment, make_recipe().algorithm) if each.phase is phase]
    return {item.name: item.num_bytes for each in found for item in each.items}


def test_a_tower_is_on_ranks_with_the_embedding_and_in_engines() -> None:
    deployment = deployed("qwen2.5-vl-7b", "roles.actor.pipeline=1")
    training = rows(deployment, MemoryPhase.TRAINING)
    assert training["tower"] == 2 * num_tower_parameters(PUBLIC_MODELS["qwen2.5-vl-7b"])
    assert training["remembered images"] == REMEMBERED_IMAGE_BYTES
    generating = rows(deployment, MemoryPhase.GENERATING)
    text = rows(deployed("qwen2.5-7b", "roles.actor.pipeline=1"), MemoryPhase.GENERATING)
    assert generating["engine tower"] == 2 * engine_tower_parameters(PUBLIC_MODELS["qwen2.5-vl-7b"], tensor=2)
    assert generating["engine tower"] + generating["KV cache"] == pytest.approx(text["KV cache"], rel=1e-4)
    assert not {"tower", "engine tower"} & {*text}
    last = deployed("qwen2.5-vl-7b", "roles.actor.first_stage_layers=2")
    assert "tower" not in rows(last, MemoryPhase.TRAINING)  # of the fullest stage


def test_prompts_without_images_need_no_tower_in_the_trainer() -> None:
    deployment = deployed("qwen3-vl-8b", "data.images_key=null", "roles.actor.pipeline=1")
    assert not {"tower", "images", "engine images"} & {
        *rows(deployment, MemoryPhase.TRAINING),
        *rows(deployment, MemoryPhase.GENERATING),
    }
    assert rows(deployment, MemoryPhase.GENERATING)["engine tower"] > 0


def test_a_large_image_needs_more_than_the_text_behind_it() -> None:
    again = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
    keys = ["data.max_prompt_tokens=6000", "roles.actor.pipeline=1"]
    keys += [f"roles.actor.megatron.{each}" for each in again]
    whole = rows(deployed("qwen2.5-vl-3b", *keys), MemoryPhase.TRAINING)["images"]
    cut = rows(deployed("qwen2.5-vl-3b", *keys, "data.max_image_pixels=200704"), MemoryPhase.TRAINING)
    assert whole > 100 * 2**20
    assert "images" not in cut


def timed(*assignments: str) -> Timing:
    keys = ("roles.actor.is_sequence_parallel=true", "roles.reference={}", "algorithm={kind: grpo, kl: {kind: loss}}")
    changed = make_recipe(*keys, *assignments)
    completed, deployment = complete(changed, shapes_of(PUBLIC_MODELS["qwen2.5-vl-7b"]), GPUS["h100"])
    timing = size(
        completed, deployment, StepWorkload.half(changed.data, changed.sampling), publish_s=0, times_cpu=True
    ).timing
    assert timing is not None
    return timing


def test_a_step_computes_its_images_once_where_they_are_remembered() -> None:
    """64 prompts of a rank with images of 512 tokens are 235 MB; twice as many are more than a rank remembers."""
    few, text = timed(), timed("data.images_key=null")
    on_ranks = 64 * 32 * LAYER_START_S / 3  # of so small images the host starts the layers
    assert few.seconds(PhaseName.REFERENCE) - text.seconds(PhaseName.REFERENCE) == pytest.approx(on_ranks)
    assert few.seconds(PhaseName.UPDATE) == pytest.approx(text.seconds(PhaseName.UPDATE))
    generated = few.seconds(PhaseName.ROLLOUT) - text.seconds(PhaseName.ROLLOUT)
    assert few.images_s == pytest.approx(on_ranks + generated)
    assert text.images_s == 0
    many = timed("train.prompts_per_step=256")
    on_text = timed("train.prompts_per_step=256", "data.images_key=null")
    for phase in (PhaseName.REFERENCE, PhaseName.UPDATE):
        assert many.seconds(phase) - on_text.seconds(phase) == pytest.approx(2 * on_ranks)


def test_large_images_take_the_time_of_their_operations() -> None:
    large = ("data.max_prompt_tokens=16384",)
    seconds = timed(*large).seconds(PhaseName.REFERENCE)
    seconds -= timed(*large, "data.images_key=null").seconds(PhaseName.REFERENCE)
    work = replace(work_of(PUBLIC_MODELS["qwen2.5-vl-7b"]), most_tokens=16384).work(8192)
    flops = GPUS["h100"].flops
    assert seconds == pytest.approx(
        64 * (work.dense / DENSE_EFFICIENCY + work.attention / ATTENTION_EFFICIENCY) / flops
    )
