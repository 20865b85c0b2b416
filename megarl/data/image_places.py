"""The places of images among tokens, as models that see images count them: in time, in rows and in columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megarl.types import ImagePlace


def places_in_space(
    positions: npt.NDArray[np.int32], sequence_starts: npt.NDArray[np.int32], images: Sequence[ImagePlace]
) -> npt.NDArray[np.int32]:
    """Return the time, row and column of each token; all three are its position where no image is before it. [3, N]

    An image takes as much time as the longer of its sides has tokens.
    """
    places = np.repeat(positions[None], 3, axis=0)
    ends = sequence_starts[np.searchsorted(sequence_starts, [image.start for image in images], "right")]
    for image, end in zip(images, ends, strict=True):
        own, order = slice(image.start, image.end), np.arange(image.num_tokens)
        first = int(places[0, image.start])
        inside = (np.zeros_like(order), order // image.num_columns, order % image.num_columns)
        places[:, own] = first + np.stack(inside)
        places[:, image.end : end] += max(image.num_rows, image.num_columns) - image.num_tokens
    return places
