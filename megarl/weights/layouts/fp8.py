"""FP8 weights of engines as derived tensors of the slice algebra. Pure.

A matrix in FP8 is two canonical tensors: its elements, under its own name, and a float32 scale for each block of 128 x
128 elements, under that name and `_scale_inv`. An element is its value in FP8 times the scale of its block, as in the
FP8 checkpoints of Hugging Face. Both follow from the block alone, so a rank that holds whole blocks derives them from
its own weights: all cuts must be multiples of 128, which `config.kernels` checks.

Trainer ranks derive the tensors before they send them. Plans, buckets and digests are therefore those of FP8 tensors.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megarl.config.kernels import FP8_BLOCK, is_in_fp8, kept_modules
from megarl.families import family_of
from megarl.families.shape import ModelShape
from megarl.weights.algebra.slices import Holding, Index, Layout, Piece, Slice, TensorSpec
from megarl.weights.layouts.canonical import layer_prefix

SCALES = "_scale_inv"
"""End of the name of a matrix's scales, in checkpoints and in SGLang."""
ELEMENT, SCALE = "float8_e4m3fn", "float32"
_CACHE_SCALES = ("self_attn.attn.k_scale", "self_attn.attn.v_scale")
"""Scales of an FP8 cache, never published: nothing reads them with a bfloat16 cache."""


def quantization_config(shape: ModelShape, keep: Sequence[str] | None) -> str | None:
    """Return the fields of an FP8 checkpoint's `config.json` as JSON, from which SGLang makes its parameters."""
    if keep is None:
        return None
    fields: dict[str, object] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }
    ignored = kept_modules(shape, keep)
    return json.dumps({"quantization_config": {**fields, **({"ignored_layers": ignored} if ignored else {})}})


def fp8_tensors(canonical: Mapping[str, TensorSpec], keep: Sequence[str]) -> dict[str, TensorSpec]:
    """Return the canonical tensors of the model in FP8; modules that match a pattern of `keep` stay as they are."""
    tensors: dict[str, TensorSpec] = {}
    for name, spec in canonical.items():
        is_derived = is_in_fp8(name, keep)
        tensors[name] = replace(spec, dtype=ELEMENT) if is_derived else spec
        if is_derived:
            tensors[name + SCALES] = TensorSpec(shape=_blocks(spec.shape), dtype=SCALE)
    return tensors


def fp8_engine_layout(layout: Layout, shape: ModelShape, keep: Sequence[str]) -> Layout:
    """Return what the same engine ranks hold with FP8 weights: a stacked parameter has its scales stacked alike."""

    def derive(holding: Holding) -> Holding:
        tensors, pieces = dict(holding.tensors), []
        for piece in holding.pieces:
            pieces.append(piece)
            if is_in_fp8(piece.slice.name, keep):
                spec = holding.tensors[piece.local_name]
                tensors[piece.local_name] = replace(spec, dtype=ELEMENT)
                tensors[piece.local_name + SCALES] = TensorSpec(shape=_blocks(spec.shape), dtype=SCALE)
                pieces.append(_scales_of(piece))
        if family_of(shape).engine.has_cache_scales:
            names = [layer_prefix(index) + name for index in range(shape.num_layers) for name in _CACHE_SCALES]
            tensors |= dict.fromkeys(names, TensorSpec(shape=(), dtype=SCALE))
        return replace(holding, tensors=tensors, pieces=tuple(pieces))

    return layout.derive(fp8_tensors(layout.canonical, keep), derive)


def fp8_trainer_layout(layout: Layout, keep: Sequence[str]) -> Layout:
    """Return what the same trainer ranks hold once they have derived the FP8 tensors, under canonical names."""

    def derive(holding: Holding) -> Holding:
        unchanged = tuple(piece for piece in holding.pieces if not is_in_fp8(piece.slice.name, keep))
        tensors = {piece.local_name: holding.tensors[piece.local_name] for piece in unchanged}
        pieces = []
        for box in derived_boxes(holding, keep):
            whole = Piece(slice=box, local_name=box.name, local_offsets=(0,) * len(box.shape))
            pieces += [whole, _scales_of(whole)]
            tensors[box.name] = TensorSpec(shape=box.shape, dtype=ELEMENT)
            tensors[box.name + SCALES] = TensorSpec(shape=_blocks(box.shape), dtype=SCALE)
        return replace(holding, tensors=tensors, pieces=(*unchanged, *pieces))

    return layout.derive(fp8_tensors(layout.canonical, keep), derive)


def derived_boxes(holding: Holding, keep: Sequence[str]) -> Iterator[Slice]:
    """Yield the box of each matrix that a trainer rank derives: all that it holds of the matrix."""
    parts: defaultdict[str, list[Slice]] = defaultdict(list)
    for piece in holding.pieces:
        if is_in_fp8(piece.slice.name, keep):
            parts[piece.slice.name].append(piece.slice)
    for name, boxes in parts.items():
        offsets = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
        ends = (map(sum, zip(box.offsets, box.shape, strict=True)) for box in boxes)
        shape = tuple(max(each) - first for first, each in zip(offsets, zip(*ends, strict=True), strict=True))
        whole = Slice(name=name, offsets=offsets, shape=shape)
        held = sum(box.num_elements for box in boxes)
        assert held == whole.num_elements, f"a rank holds {held} elements of {whole}"
        yield whole


def _scales_of(piece: Piece) -> Piece:
    """Return the place of the scales of a piece, which consists of whole blocks."""
    box = piece.slice
    *indices, row, column = piece.local_offsets
    places = (*box.offsets, *box.shape, row, column)
    assert not any(place % FP8_BLOCK for place in places), f"{box} at {row}, {column} cuts a block of {FP8_BLOCK}"
    scales = Slice(
        name=box.name + SCALES, offsets=tuple(start // FP8_BLOCK for start in box.offsets), shape=_blocks(box.shape)
    )
    local_offsets = (*indices, row // FP8_BLOCK, column // FP8_BLOCK)
    return Piece(slice=scales, local_name=piece.local_name + SCALES, local_offsets=local_offsets)


def _blocks(shape: Index) -> Index:
    """Return the shape of the scales of a matrix, or of a stack of matrices."""
    *indices, rows, columns = shape
    return (*indices, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
