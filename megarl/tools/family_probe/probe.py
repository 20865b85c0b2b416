"""Compares the description of a family with the files of a model, with transformers, and with SGLang's own loading.

Every element of a tiny model of the family has a number of its own. SGLang loads it by itself, for each way to divide
it; the numbers in its parameters say which element of which tensor is where, and must be those of the description.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.checkpoint.save import copy_companions
from megarl.config.model import read_model_shape
from megarl.config.roles import ActorConfig, RolloutRoleConfig
from megarl.engine.client import EngineClient, EngineKeys
from megarl.engine.fleet import Fleet
from megarl.engine.process import EngineProcess, EngineSpec, family_options, serves_text_alone
from megarl.engine.tool_commands import ToolControl, dump_file
from megarl.errors import MegarlError, WeightSyncError, first_few, first_line
from megarl.families import family_of
from megarl.families.shape import ModelShape
from megarl.tools.small_recipe import tiny_shape
from megarl.weights.algebra.slices import Holding
from megarl.weights.executors.codecs import as_files
from megarl.weights.executors.hf import read_header, tensor_files
from megarl.weights.executors.tensors import box_of, check_holding, specs_of, torch_dtype
from megarl.weights.layouts.canonical import canonical_tensors, rooted
from megarl.weights.layouts.sglang import sglang_layout
from megarl.weights.layouts.stored import StoredTensor, held_in, stored_tensors

_TIMEOUT_S = 900.0
_MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFinding:
    """The outcome of one comparison."""

    what: str
    detail: str
    is_equal: bool


def probe(folder: Path, *, work: Path) -> Iterator[ProbeFinding]:
    """Yield the comparisons as they are made; `work` is an empty folder for a tiny model and its engines."""
    shape = read_model_shape(folder)
    yield _names("files", _stored(folder), shape)
    tiny = tiny_shape(shape, ActorConfig(pool="probe"))
    numbers = numbered({name: spec.shape for name, spec in canonical_tensors(tiny).items()})
    model = work / _MODEL
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(family_of(tiny).config_json(tiny), indent=2) + "\n")
    save_file(as_files(numbers), model / "model.safetensors", metadata={"format": "pt"})
    if tiny.vision is not None:
        copy_companions(folder, model, without=("config.json",))  # SGLang makes the processor of images
    yield _names("transformers", _saved(model, work / "saved", tiny), tiny)
    # SGLang does not load experts with biases by sets; only a publish fills them.
    has_sets = tiny.experts is not None and not tiny.has_biases
    splits = ((1, 1), (2, 1), (2, 2)) if has_sets else ((1, 1), (2, 1))
    for tensor, expert in splits:
        name = f"SGLang, TP{tensor}" + (f" EP{expert}" if expert > 1 else "")
        try:
            run, options = work / f"engine_{tensor}_{expert}", family_options(tiny, "cpu")
            parameters = loaded_parameters(
                model, run, tensor=tensor, expert=expert, options=options, is_text_alone=serves_text_alone(tiny)
            )
            yield _engine(name, tiny, numbers, parameters, expert=expert)
        except MegarlError as error:
            yield ProbeFinding(what=name, detail=first_line(error), is_equal=False)


def _names(what: str, stored: Mapping[str, StoredTensor], shape: ModelShape) -> ProbeFinding:
    """Compare names and shapes; files may have more, such as layers that predict further tokens."""
    wrong, others = list[str](), dict.fromkeys(stored)
    for name, spec in canonical_tensors(shape).items():
        held = held_in(name, stored)
        if held is None:
            wrong.append(f"{name} is not there")
            continue
        others.pop(held.tensor.name, None)
        if held.shape != spec.shape:
            wrong.append(f"{name} has shape {list(held.shape)}, described as {list(spec.shape)}")
    detail = first_few(wrong) or f"{len(stored) - len(others)} tensors"
    if others:
        detail += f"; not described: {first_few([*others])}"
    return ProbeFinding(what=what, detail=detail, is_equal=not wrong)


def file_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a folder in the orientation of the description."""
    return {name: tensor.spec.shape for name, tensor in _stored(folder).items()}


def _stored(folder: Path) -> dict[str, StoredTensor]:
    return stored_tensors(_header(folder))


def _header(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: entry for path in tensor_files(folder) for name, entry in read_header(path).items()}


def _saved(model: Path, saved: Path, shape: ModelShape) -> dict[str, StoredTensor]:
    """Return the tensors of a model that transformers makes of the configuration, of text alone, and saves."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: PLC0415 - seconds

    loader = AutoModelForCausalLM if shape.vision is None else AutoModelForImageTextToText
    loader.from_config(AutoConfig.from_pretrained(model)).save_pretrained(saved)
    header = _header(saved).items()
    if shape.vision is not None:
        return stored_tensors(dict(header))
    return stored_tensors({rooted(name, shape) if name.startswith("model.") else name: entry for name, entry in header})


def numbered(extents: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return tensors in which every element is different; float32 has as many whole numbers."""
    tensors: dict[str, Tensor] = {}
    start = 1  # padding is zero
    for name, shape in extents.items():
        size = prod(shape)
        tensors[name] = torch.arange(start, start + size, dtype=torch.float32).view(shape)
        start += size
    assert start < 1 << 24, f"{start} elements"
    return tensors


def loaded_parameters(
    model: Path, run: Path, *, tensor: int, expert: int, options: tuple[str, ...], is_text_alone: bool = False
) -> list[dict[str, Tensor]]:
    """Return the parameters of each TP rank after SGLang's own loading."""
    loading = _loaded(model, run, tensor=tensor, expert=expert, options=options, is_text_alone=is_text_alone)
    return asyncio.run(loading)


async def _loaded(
    model: Path, run: Path, *, tensor: int, expert: int, options: tuple[str, ...], is_text_alone: bool
) -> list[dict[str, Tensor]]:
    spec = EngineSpec(
        index=0,
        model_folder=model,
        config=RolloutRoleConfig(pool="probe", tensor=tensor, expert=expert),
        device="cpu",
        seed=1,
        run_folder=run,
        keys=EngineKeys.fresh(),
        start_timeout_s=_TIMEOUT_S,
        options=options,
        is_text_alone=is_text_alone,
    )
    process = EngineProcess(spec)
    process.start()
    try:
        await process.wait_ready()
        client = EngineClient(process.endpoint, request_timeout_s=_TIMEOUT_S)
        fleet = Fleet([client], max_outstanding=1, publish_timeout_s=_TIMEOUT_S)
        try:
            await ToolControl(fleet, timeout_s=_TIMEOUT_S).dump(run / "dump")
        finally:
            await fleet.close()
    finally:
        process.stop()
    return [load_file(run / "dump" / dump_file(engine=0, tp_rank=rank)) for rank in range(tensor)]


def _engine(
    what: str, shape: ModelShape, numbered: Mapping[str, Tensor], ranks: list[dict[str, Tensor]], *, expert: int
) -> ProbeFinding:
    layout = sglang_layout(shape, tensor=len(ranks), expert=expert, dtype=shape.dtype, is_cpu_engine=True)
    wrong, own = list[str](), family_of(shape).engine.unplanned
    for rank, (holding, parameters) in enumerate(zip(layout.holdings, ranks, strict=True)):
        try:
            parameters = {name: each for name, each in parameters.items() if not name.startswith(own)}
            check_holding(holding, specs_of(parameters.items()), holder=f"TP rank {rank}")
        except WeightSyncError as error:
            return ProbeFinding(what=what, detail=first_line(error), is_equal=False)
        expected = _described(holding, numbered)
        differing = (name for name, tensor in parameters.items() if not tensor.equal(expected[name]))
        wrong += [f"{name} of TP rank {rank}" for name in differing]
    detail = f"other elements in {first_few(wrong)}" if wrong else f"{sum(map(len, ranks))} parameters, every element"
    return ProbeFinding(what=what, detail=detail, is_equal=not wrong)


def _described(holding: Holding, numbered: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters that the description says."""
    tensors = {name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)) for name, spec in holding.tensors.items()}
    for piece in holding.pieces:
        box = box_of(numbered[piece.slice.name], piece.slice.offsets, piece.slice.shape)
        box_of(tensors[piece.local_name], piece.local_offsets, piece.slice.shape).copy_(box)
    return tensors
