"""How images are named in a request to an engine and in its reply, and the options of an engine that takes them.

A request has places and digests; the pixels are in the run's store, which the engine reads (`image_processors.stored`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megarl.types import ImagePlace, JsonValue

STORE = "megarl_store"
"""The key of the store's folder in SGLang's `--mm-process-config`."""
READ_IMAGES = "megarl_read_images"
"""The field of a reply with the digests of the images that were read for it."""


def image_data(images: Sequence[ImagePlace]) -> list[JsonValue]:
    """Return SGLang's field of a request."""
    return [
        {"digest": each.digest, "start": each.start, "num_rows": each.num_rows, "num_columns": each.num_columns}
        for each in images
    ]


def image_words(store: Path) -> list[str]:
    """Return the words of the command line of an engine that reads images from this folder."""
    return ["--mm-process-config", json.dumps({"image": {STORE: str(store)}}), "--mm-feature-transport", "cpu"]
