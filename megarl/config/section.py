"""The base class of every section, and what several sections share: the device with its dtype, sizes without a key.

The processes of a run and the planner must agree on these sizes; a user never has to choose them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of a recipe: unknown keys are refused, values do not change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False, allow_inf_nan=False
    )


def _absolute(reference: str) -> str:
    """Return a reference whose file is found from any working folder: ranks have others."""
    place, _, name = reference.rpartition(":")
    return f"{Path(place).expanduser().absolute()}:{name}" if place.endswith(".py") else reference


UserCode: TypeAlias = Annotated[str, Field(pattern=r"^\S.*:[A-Za-z_]\w*$"), AfterValidator(_absolute)]
"""A user's function or class: `file.py:name` or `package.module:name`."""

Device: TypeAlias = Literal["cpu", "cuda"]
DtypeName: TypeAlias = Literal["float32", "bfloat16"]
GpuName: TypeAlias = Literal["a100", "a100-40g", "h20", "h100", "h200", "b200", "b300", "gb200", "l40s"]
"""Kinds of GPUs whose rates the planner knows."""


def dtype_on(device: Device) -> DtypeName:
    """Return the dtype of weights and activations, in trainers and engines alike."""
    return "float32" if device == "cpu" else "bfloat16"


REMEMBERED_IMAGE_BYTES = 256 * 2**20
"""Outputs of a tower that a rank keeps, of hundreds of images, so that the passes of a step compute each once."""
LOGIT_CHUNK_BYTES = 640 << 20
"""Logits in memory at a time: enough for full-speed matrix kernels, little beside the activations."""

PAD_MULTIPLE = 8
"""The tokens of a rank in a pack are rounded up to this times the tensor-parallel size: even shares under sequence
parallelism."""

CPU_CACHED_TOKENS = 32_768
"""Size of an engine's KV cache on a CPU, where it could otherwise take all memory of the machine."""

CPU_SLOT = "megarl_slot"
"""The Ray resource that stands for a GPU on a CPU run."""

IMAGES_FOLDER = "images"
"""The folder of a run with the images of its prompts, each a PNG file that is named by its digest."""

EXCLUDED_FILE = "excluded_nodes.txt"
"""The addresses of the nodes that a run excludes, in its folder, one per line; the script of a job reads it."""

MIB = 1 << 20
GIB = 1 << 30


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `count`."""
    return -(-count // multiple) * multiple
