"""The tower of a model that sees images: transformers' own module, loaded from the model's folder and never trained.

It is loaded with the first image, on ranks that have the embedding; each of them computes all images of its
micro-batch, once while they are remembered. What it makes of an image takes the place of the embeddings of the image's
tokens; some towers add further outputs behind the first layers of the text.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

from megarl.config.section import REMEMBERED_IMAGE_BYTES
from megarl.data.images import ImageProcessor, ImageStore, Pixels
from megarl.errors import CheckpointError
from megarl.families import family_of
from megarl.families.shape import ModelShape
from megarl.train.rank_spec import ImageFiles
from megarl.types import ImagePlace, MicroBatch
from megarl.weights.executors.hf import tensor_files

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    """The tokens of images among those that a rank computes."""

    images: tuple[ImagePlace, ...]
    """The different ones of the micro-batch."""
    places: Tensor  # [K], int64, ascending, among the rank's tokens
    rows: Tensor  # [K], int64, among the tokens of the images, end to end


def image_tokens(micro_batch: MicroBatch, mine: npt.NDArray[np.int64] | slice, device: torch.device) -> ImageTokens:
    """Return the image tokens among the positions `mine` of a micro-batch with images."""
    first_row, images, num_rows = dict[str, int](), list[ImagePlace](), 0
    rows = np.full(len(micro_batch.token_ids), -1, np.int64)
    for image in micro_batch.images:
        if image.digest not in first_row:
            first_row[image.digest] = num_rows
            images.append(image)
            num_rows += image.num_tokens
        rows[image.start : image.end] = first_row[image.digest] + np.arange(image.num_tokens)
    own = rows[mine]
    places = np.flatnonzero(own >= 0)
    tensors = (torch.from_numpy(each).to(device, non_blocking=True) for each in (places, own[places]))
    return ImageTokens(images=tuple(images), **dict(zip(("places", "rows"), tensors, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Numbers that are added to some tokens of this rank behind the first layers."""

    places: Tensor  # [K], int64
    deep: tuple[Tensor, ...]  # [K, hidden] each, one for each of these layers


class Tower:
    def __init__(self, shape: ModelShape, files: ImageFiles, *, device: torch.device, dtype: torch.dtype) -> None:
        assert shape.vision is not None, f"a {shape.family} that sees nothing"
        self._vision, self._prefixes, self._files = shape.vision, family_of(shape).kept, files
        self._device, self._dtype = device, dtype
        self._store = ImageStore(files.store)
        self._outputs: OrderedDict[str, tuple[Tensor, ...]] = OrderedDict()
        self._module: Callable[..., Any] | None = None
        self._processor: ImageProcessor | None = None

    def place(self, embedded: Tensor, tokens: ImageTokens, part: range) -> tuple[Tensor, Seen]:
        """Return the embeddings with images in place. [M, 1, hidden]; `part` is which of the rank's tokens they are."""
        outputs = [self._output(image) for image in tokens.images]
        inside = (tokens.places >= part.start) & (tokens.places < part.stop)
        places, rows = tokens.places[inside] - part.start, tokens.rows[inside]
        first, *deep = (torch.cat(each).index_select(0, rows) for each in zip(*outputs, strict=True))
        return embedded.index_copy(0, places, first[:, None]), Seen(places=places, deep=tuple(deep))

    def _output(self, image: ImagePlace) -> tuple[Tensor, ...]:
        """Return the last output of the tower for an image, then those of deeper layers. [tokens, hidden] each"""
        found = self._outputs.get(image.digest)
        if found is None:
            found = self._compute(self._store.read(image.digest))
            for each in found:
                assert len(each) == image.num_tokens, f"{len(each)} tokens of an image, not {image.num_tokens}"
            self._outputs[image.digest] = found
            while len(self._outputs) > 1 and self._remembered_bytes > REMEMBERED_IMAGE_BYTES:
                self._outputs.popitem(last=False)
        self._outputs.move_to_end(image.digest)
        return found

    @property
    def _remembered_bytes(self) -> int:
        return sum(tensor.nbytes for each in self._outputs.values() for tensor in each)

    @torch.no_grad()
    def _compute(self, pixels: Pixels) -> tuple[Tensor, ...]:
        if self._module is None or self._processor is None:
            self._processor = ImageProcessor.of(self._files.model, self._vision)
            self._module = load_tower(self._files.model, self._prefixes, device=self._device, dtype=self._dtype)
        patches = torch.from_numpy(self._processor.patches(pixels)).to(self._device, self._dtype)
        height, width = (side // self._vision.patch for side in pixels.shape[:2])
        output = self._module(patches, grid_thw=torch.tensor([[1, height, width]], device=self._device))
        last: Tensor = output.pooler_output
        deep: Sequence[Tensor] = getattr(output, "deepstack_features", None) or ()
        return (last, *deep)


def load_tower(folder: Path, prefixes: Sequence[str], *, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Return the tower of the model in `folder`, as transformers has it, without gradients.

    The names of its tensors begin with one of `prefixes`.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText  # noqa: PLC0415 - where prompts have images

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(config)
    # Built again by itself: buffers that no file has would be missing in a module from the meta device.
    with torch.device("cpu"):
        tower: torch.nn.Module = type(whole.model.visual)(whole.config.vision_config)
    weights: dict[str, Tensor] = {}
    for path in tensor_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if prefix := next((each for each in prefixes if name.startswith(each)), None):
                    weights[name.removeprefix(prefix)] = file.get_tensor(name)
    lacking = sorted(tower.state_dict().keys() - weights.keys())
    if lacking:
        raise CheckpointError(f"{folder}: {lacking[0]} of the tower for images is in no safetensors file")
    tower.load_state_dict(weights)
    logger.info("loaded the tower folder=%s parameters=%d", folder, sum(each.numel() for each in tower.parameters()))
    return tower.to(device=device, dtype=dtype).requires_grad_(False).eval()
