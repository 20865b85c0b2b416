"""The values that ranks start with and record. Loads without Megatron: a driver makes and reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.lora import LoraConfig
from megarl.config.roles import ModelParallelConfig
from megarl.config.section import Device
from megarl.families.shape import ModelShape
from megarl.types import FloatArray

if TYPE_CHECKING:
    from megarl.weights.recordings import WeightDigests

RECORD_PREFIX = "trainer_"
"""Begins the names of the files that `ActorRank.record` writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFiles:
    """Where a model that sees images finds its tower, and the images of its prompts."""

    model: Path
    store: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """The arguments that every rank starts with."""

    rank: int
    world: int
    master_address: str
    master_port: int
    """Port of rank 0, where all ranks rendezvous."""
    listener: int | None = None
    """The descriptor of rank 0's socket, which listens at the port already; None: rank 0 opens it."""
    device: Device
    split: ModelParallelConfig
    shape: ModelShape
    seed: int
    timeout_s: float
    """Deadline of every wait for another rank."""
    lora: LoraConfig | None = None
    """The adapter that is trained in place of the model's own weights."""
    has_float32_head: bool = False
    images: ImageFiles | None = None
    """None where prompts are text alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRecord:
    """The result of `ActorRank.record`, which writes the recording itself to a file."""

    logprobs: FloatArray | None  # [T], of the response tokens; None on ranks without the result
    weight_digests: WeightDigests
