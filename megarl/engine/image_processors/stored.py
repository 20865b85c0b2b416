"""Images of a run in an engine: the tokens and the pixels of a request are the trainer's, and nothing is made anew.

SGLang's own processor would resize images, count their tokens and expand a placeholder by itself, with its own release
of a library. This one reads the run's store, whose files are named by the digest of their pixels, and takes tokens as
they are. What it has read goes back with the reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor
from sglang.srt.runtime_context import get_mm, get_model
from sglang.srt.server_args import ServerArgs

from megarl.config.model import read_model_shape
from megarl.data.image_places import places_in_space
from megarl.data.images import ImageProcessor, ImageStore, Pixels, digest_of
from megarl.engine.image_requests import READ_IMAGES, STORE
from megarl.types import ImagePlace


class StoredImages(BaseMultimodalProcessor):  # type: ignore[misc]  # SGLang has no types
    models = (Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration)
    generates_input_ids_from_raw_prompt = True

    def __init__(
        self, hf_config: object, server_args: ServerArgs, _processor: object, *_: object, **__: object
    ) -> None:
        """Leave out what SGLang would prepare for processors of transformers."""
        self.hf_config, self.server_args = hf_config, server_args
        folder = Path(get_model().model_path)
        shape = read_model_shape(folder)
        assert shape.vision is not None, f"a {shape.family} that sees nothing"
        self._vision = shape.vision
        self._processor = ImageProcessor.of(folder, shape.vision)
        self._store = ImageStore(Path(get_mm().mm_process_config["image"][STORE]))

    def clear_preprocess_cache(self) -> None:
        """Do nothing: files are read for each request."""

    async def process_mm_data_async(
        self,
        image_data: Sequence[dict[str, object]],
        input_text: object,
        request_obj: object,
        *_: object,
        **__: object,
    ) -> MultimodalProcessorOutput:
        del input_text
        token_ids = list(request_obj.input_ids)  # type: ignore[attr-defined]
        images = [ImagePlace(**each) for each in image_data]  # type: ignore[arg-type]
        pixels = [self._store.read(image.digest) for image in images]
        items = [self._item(image, each, token_ids) for image, each in zip(images, pixels, strict=True)]
        num_tokens = len(token_ids)
        setattr(request_obj, READ_IMAGES, list(map(digest_of, pixels)))
        places = places_in_space(np.arange(num_tokens, dtype=np.int32), np.array([0, num_tokens], np.int32), images)
        positions = torch.from_numpy(places)
        return MultimodalProcessorOutput(
            input_ids=token_ids,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(token_ids, items),
            mm_items=items,
            im_start_id=self._vision.start_token,
            im_end_id=self._vision.end_token,
            im_token_id=self._vision.image_token,
            video_token_id=self._vision.video_token,
            mrope_positions=positions,
            mrope_position_delta=(positions.max() + 1 - len(token_ids)).reshape(1, 1),
        )

    def _item(self, image: ImagePlace, pixels: Pixels, token_ids: Sequence[int]) -> MultimodalDataItem:
        if {*token_ids[image.start : image.end]} != {self._vision.image_token}:
            raise ValueError(f"tokens {image.start} to {image.end} are not those of an image")
        rows, columns = (side // self._vision.token_pixels for side in pixels.shape[:2])
        if (rows, columns) != (image.num_rows, image.num_columns):
            raise ValueError(f"an image of {rows} x {columns} tokens, asked for {image.num_rows} x {image.num_columns}")
        grid = [1, rows * self._vision.merge, columns * self._vision.merge]
        item = MultimodalDataItem(
            modality=Modality.IMAGE,
            feature=torch.from_numpy(self._processor.patches(pixels)),
            offsets=[(image.start, image.end - 1)],
            model_specific_data={"image_grid_thw": torch.tensor([grid])},
        )
        # Cached prefixes are told apart by it; SGLang keeps 64 bits.
        item.set_hash(int(image.digest, 16))
        return item
