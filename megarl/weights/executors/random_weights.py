"""Folders of models without bytes: files with a header alone, whose weights are computed where they are read.

A publish and an update of a 235B shape can be tried with them on any file system. A value depends on the tensor's name
and on its place, so that ranks with overlapping boxes agree.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from megarl.families import family_of
from megarl.families.shape import ModelShape
from megarl.weights.executors.codecs import as_files
from megarl.weights.executors.tensors import torch_dtype
from megarl.weights.layouts.canonical import canonical_tensors

_KEY, _RANDOM = "weights", "random"
_STD = 0.02
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_LENGTH_BYTES = 8


def write_random_folder(folder: Path, shape: ModelShape) -> None:
    """Write config.json and model.safetensors, which is as long as its header says and takes no space on a disk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(family_of(shape).config_json(shape), indent=2) + "\n")
    empty = {
        name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        for name, spec in canonical_tensors(shape).items()
    }
    header: dict[str, object] = {"__metadata__": {"format": "pt", _KEY: _RANDOM}}
    end = 0
    for name, tensor in as_files(empty).items():
        first, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        file.truncate(_LENGTH_BYTES + len(text) + end)


def is_random(metadata: Mapping[str, str] | None) -> bool:
    """Whether the weights of a file with this metadata are computed, not read."""
    return metadata is not None and metadata.get(_KEY) == _RANDOM


def random_box(name: str, ranges: tuple[slice, ...]) -> torch.Tensor:
    """Return a box of a tensor in float32: about 1 in norms, else spread evenly around 0.

    An element is the fraction of a sum of one random number for each of its indices.
    """
    total = torch.zeros([1] * len(ranges))
    for axis, wanted in enumerate(ranges):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {axis}".encode()))
        numbers = torch.rand(wanted.stop, generator=generator)[wanted.start :]
        total = total + numbers.reshape([-1 if each == axis else 1 for each in range(len(ranges))])
    values = total.remainder_(1.0).sub_(0.5).mul_(_STD * 12**0.5)
    assert values.numel() == prod(each.stop - each.start for each in ranges)
    return values.add_(1.0) if "norm" in name else values
