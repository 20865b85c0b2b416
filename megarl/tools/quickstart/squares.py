"""The task of the quickstart with images: how many squares there are, first imitated from a careless teacher.

The teacher of the warm start often overlooks the pale squares, so imitation alone answers most questions wrong; the
reward compares with the number of all, so reinforcement learns to see them. No held-out image is among those that are
trained on.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from megarl.errors import DataError
from megarl.tools.quickstart.arithmetic import PROBLEM_COLUMNS, write_tables
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from megarl.tools.quickstart.tiny_tower import IMAGE_TOKENS

CARELESS_PROBABILITY = 0.65
"""How often the teacher overlooks what is pale: more than half, so that a faithful imitation answers wrong."""
MAX_SQUARES = 6
_CELL = 28
"""Pixels on each side of a cell, in which there is a square or none: one token."""
_SIDES = (3, 4)
"""Cells on a side of an image."""
_SIDE = 20
_MARGIN = _CELL - _SIDE
_DARK, _PALE = (0, 90), (150, 200)
_IMAGES = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
_EXTRA = pa.struct([("index", pa.int64()), ("split", pa.string()), ("num_pale", pa.int64())])
_COLUMNS = pa.schema([*PROBLEM_COLUMNS, ("images", _IMAGES), ("extra_info", _EXTRA)])


def seeing(shape: TinyShape) -> TinyShape:
    """Return the shape with a tower that sees the images of this task."""
    vocab = max(shape.vocab, TinyShape().vocab + len(IMAGE_TOKENS))
    return replace(shape, vocab=vocab, max_image_pixels=(max(_SIDES) * _CELL) ** 2)


SHAPE = seeing(TinyShape())


@dataclass(frozen=True, slots=True, kw_only=True)
class SquaresFiles:
    train: Path
    sft: Path
    eval: Path
    model: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    png: bytes
    num_dark: int
    num_pale: int

    @property
    def num_squares(self) -> int:
        return self.num_dark + self.num_pale


def make_squares(
    folder: Path,
    *,
    num_train: int = 2048,
    num_sft: int = 12_000,
    num_eval: int = 256,
    seed: int = 1,
    shape: TinyShape = SHAPE,
) -> SquaresFiles:
    """Write the images and the model that learns to count in them. The same seed writes the same bytes."""
    files = SquaresFiles(
        train=folder / "train.parquet",
        sft=folder / "sft.parquet",
        eval=folder / "eval.parquet",
        model=folder / "model",
    )
    for name, count in (("num_train", num_train), ("num_sft", num_sft), ("num_eval", num_eval)):
        if count < 1:
            raise DataError(f"{name} is {count}; it must be at least 1")
    generator = np.random.default_rng(seed)
    drawings = _drawings(generator)
    held_out = [next(drawings) for _ in range(num_eval)]
    trained = [next(drawings) for _ in range(num_train)]
    # An image may occur several times with different answers, since the teacher is careless at random.
    lessons = [trained[place] for place in generator.integers(num_train, size=num_sft)]
    responses = [_teach(drawing, generator) for drawing in lessons]
    tables = {
        files.train: _table(trained, "train"),
        files.sft: _table(lessons, "sft").append_column("response", pa.array(responses, pa.string())),
        files.eval: _table(held_out, "eval"),
    }
    write_tables(tables)
    write_tiny_model(files.model, shape, seed=seed)
    return files


def _drawings(generator: np.random.Generator) -> Iterator[Drawing]:
    """Yield drawings, none of which is equal to an earlier one."""
    seen: set[bytes] = set()
    while True:
        drawing = _draw(generator)
        if drawing.png not in seen:
            seen.add(drawing.png)
            yield drawing


def _draw(generator: np.random.Generator) -> Drawing:
    rows, columns = (int(side) for side in generator.choice(_SIDES, size=2))
    num_squares = int(generator.integers(1, MAX_SQUARES + 1))
    num_pale = int(generator.integers(num_squares + 1))
    pixels = np.full((rows * _CELL, columns * _CELL, 3), 255, np.uint8)
    for number, cell in enumerate(generator.choice(rows * columns, size=num_squares, replace=False)):
        colour = generator.integers(*(_PALE if number < num_pale else _DARK), size=3)
        # A square is somewhere within its cell.
        row, column = divmod(int(cell), columns)
        down, right = (int(margin) for margin in generator.integers(_MARGIN + 1, size=2))
        top, left = row * _CELL + down, column * _CELL + right
        pixels[top : top + _SIDE, left : left + _SIDE] = colour
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return Drawing(png=buffer.getvalue(), num_dark=num_squares - num_pale, num_pale=num_pale)


def _teach(drawing: Drawing, generator: np.random.Generator) -> str:
    is_careless = generator.random() < CARELESS_PROBABILITY
    return str(drawing.num_dark if is_careless else drawing.num_squares)


def _table(drawings: Sequence[Drawing], split: str) -> pa.Table:
    rows = [
        {
            "data_source": "squares",
            "prompt": [{"role": "user", "content": "<image>squares?"}],
            "reward_model": {"style": "rule", "ground_truth": str(drawing.num_squares)},
            "images": [{"bytes": drawing.png, "path": None}],
            "extra_info": {"index": index, "split": split, "num_pale": drawing.num_pale},
        }
        for index, drawing in enumerate(drawings)
    ]
    return pa.Table.from_pylist(rows, schema=_COLUMNS)
