"""Images of prompts: files and bytes become pixels once, which the run keeps and engines and trainers read.

An image is untrusted: its size is read before it is decoded, and only formats of still pictures are. It is resized as
the model's own processor would, and kept in a file that is named by the digest of its pixels. Numpy and Pillow alone.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import stat
import struct
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, UnidentifiedImageError

from megarl.errors import DataError
from megarl.families.shape import VisionShape
from megarl.system.foreign import one_line
from megarl.types import FloatArray, ImagePlace, TokenArray

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""[height, width, 3]"""

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_FILE = "preprocessor_config.json"
_MOST_BYTES = 64 * 2**20
_MOST_SOURCE_PIXELS = 64 * 10**6
"""A picture of a phone has 12 to 50 million; decoded, as many take 192 MB."""
_MOST_ASPECT = 200
"""The limit of transformers' processor."""
_MOST_SCANS = 100
"""A JPEG has about ten."""
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
"""A byte within the data of a scan does not match."""
_JPEG_ALONE, _JPEG_SCAN, _JPEG_END = (0x01, 0xD8), 0xDA, 0xD9
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The change that makes a picture upright, by its orientation in EXIF data."""
_DAMAGES = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    MemoryError,
    RuntimeError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    struct.error,
    Image.DecompressionBombError,
)
"""Pillow raises each of these for files that are damaged in some way."""
_DIGEST_BYTES = 16


class ImageError(DataError):
    """An image that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessor:
    """Makes what a tower sees of an image; the numbers are those of the model's folder."""

    vision: VisionShape
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @classmethod
    def of(cls, folder: Path, vision: VisionShape, *, max_image_pixels: int | None = None) -> ImageProcessor:
        """Read the model's processor; `max_image_pixels` lowers the size of images that it allows."""
        path = folder / _FILE
        try:
            fields = json.loads(path.read_text())
        except FileNotFoundError:
            raise ImageError(f"{path} is missing; without it nobody knows how the model's images are made") from None
        except ValueError as error:
            raise ImageError(f"{path} is not JSON: {error}") from None
        size, step = fields.get("size") or {}, vision.token_pixels
        least = fields.get("min_pixels") or size.get("shortest_edge") or 4 * step**2
        most = fields.get("max_pixels") or size.get("longest_edge") or 1280 * step**2
        for key, own in (("patch_size", vision.patch), ("merge_size", vision.merge)):
            if fields.get(key, own) != own:
                raise ImageError(f"{path}: {key} is {fields[key]}, that of the tower {own}")
        most = most if max_image_pixels is None else min(most, max_image_pixels)
        if most < step**2:
            raise ImageError(f"data.max_image_pixels {most} is less than one token, {step} x {step} pixels")
        mean, std = fields.get("image_mean", [0.5] * 3), fields.get("image_std", [0.5] * 3)
        return cls(vision=vision, min_pixels=min(least, most), max_pixels=most, mean=tuple(mean), std=tuple(std))

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image is resized to: whole tokens, within the bounds."""
        if max(height, width) > _MOST_ASPECT * min(height, width):
            raise ImageError(f"{width} x {height} pixels: one side is more than {_MOST_ASPECT} times the other")
        step, area = self.vision.token_pixels, height * width
        rows, columns = round(height / step), round(width / step)
        if rows * columns * step**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / area)
            rows, columns = (math.ceil(side * grow / step) for side in (height, width))
        if rows * columns * step**2 > self.max_pixels:
            shrink = math.sqrt(area / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrink / step)) for side in (height, width))
        return rows * step, columns * step

    def pixels(self, raw: bytes) -> Pixels:
        """Return a decoded image in the size that the tower sees."""
        image = decode(raw)
        height, width = self.size(image.height, image.width)
        return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))

    def patches(self, pixels: Pixels) -> FloatArray:
        """Return the numbers that the tower reads, those of a token's patches together. [patches, patch width]"""
        vision = self.vision
        colours: FloatArray = pixels.astype(np.float32) * np.float32(1 / 255)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        scaled: FloatArray = np.divide(colours - mean, std, dtype=np.float32)
        rows, columns = (side // vision.token_pixels for side in pixels.shape[:2])
        # [row, patch of the row, pixel, column, patch of the column, pixel, colour]
        split = scaled.reshape(rows, vision.merge, vision.patch, columns, vision.merge, vision.patch, 3)
        ordered = split.transpose(0, 3, 1, 4, 6, 2, 5)
        copies = np.repeat(ordered[:, :, :, :, :, None], vision.frames, axis=5)
        return np.ascontiguousarray(copies.reshape(-1, vision.patch_width))


def decode(raw: bytes) -> Image.Image:
    """Return an image upright and in three colours; refuse what is no picture, is damaged or too large to decode."""
    if len(raw) > _MOST_BYTES:
        raise ImageError(f"{len(raw)} bytes, more than {_MOST_BYTES}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(raw), formats=FORMATS)
            if image.width * image.height > _MOST_SOURCE_PIXELS:
                raise ImageError(f"{image.width} x {image.height} pixels, more than {_MOST_SOURCE_PIXELS:,}")
            # Cameras put previews and depths behind the picture (MPO); their number is not asked: GIFs would be read.
            if getattr(image, "is_animated", False) and image.format != "MPO":
                raise ImageError("several pictures in one file; videos are not supported")
            if image.format in ("JPEG", "MPO"):
                _check_scans(raw)
            image.load()
            turn = _turn(image)
            coloured = _in_colours(image)
            return coloured if turn is None else coloured.transpose(turn)
    except UnidentifiedImageError:
        raise ImageError(f"not a readable image; supported are {', '.join(FORMATS)}") from None
    except _DAMAGES as error:
        raise ImageError(f"not a readable image: {type(error).__name__}: {one_line(error)}") from None


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except _DAMAGES:
        return None  # Other programs show a picture whose EXIF data are damaged as it is, too.


def _check_scans(raw: bytes) -> None:
    """Refuse a JPEG that goes over all its pixels again and again, for minutes."""
    at = num_scans = 0
    while found := _JPEG_MARKER.search(raw, at):
        kind, at = found[0][1], found.end()
        if kind == _JPEG_END:
            return
        if kind not in _JPEG_ALONE:
            at += int.from_bytes(raw[at : at + 2], "big")
        num_scans += kind == _JPEG_SCAN
        if num_scans > _MOST_SCANS:
            raise ImageError(f"a JPEG of more than {_MOST_SCANS} scans")


def _in_colours(image: Image.Image) -> Image.Image:
    """Return the image in three colours of 8 bits; what is transparent is white."""
    if image.mode.startswith("I"):  # 16 bits, of which Pillow would take the lower ones
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white


def digest_of(pixels: Pixels) -> str:
    """Return the name of an image: its pixels and its size."""
    hashed = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=_DIGEST_BYTES)
    hashed.update(np.ascontiguousarray(pixels).data)
    return hashed.hexdigest()


ImageSource: TypeAlias = bytes | Path


@dataclass(frozen=True, kw_only=True)
class ImageReader:
    """Puts the images of rows in their places among tokens, and into the run's store."""

    model: Path
    vision: VisionShape
    max_pixels: int | None = None
    store: Path | None = None
    """None: images are checked and not kept."""

    @cached_property
    def processor(self) -> ImageProcessor:
        return ImageProcessor.of(self.model, self.vision, max_image_pixels=self.max_pixels)

    def placed(self, token_ids: TokenArray, images: Sequence[ImageSource]) -> tuple[TokenArray, tuple[ImagePlace, ...]]:
        """Return the tokens with as many for each image as it has, in place of one, and where they are."""
        token, parts, places = self.vision.image_token, list[TokenArray](), list[ImagePlace]()
        at = np.flatnonzero(token_ids == token)
        if len(at) != len(images):
            raise ImageError(
                f"{len(images)} images, and {len(at)} places for them in the rendered prompt; "
                "write <image> in a message for each, or a content part of type image"
            )
        start = num_before = 0
        for number, (place, source) in enumerate(zip(at.tolist(), images, strict=True)):
            try:
                pixels = self.processor.pixels(source if isinstance(source, bytes) else read_image(source))
            except ImageError as error:
                raise ImageError(f"image {number}: {error}") from None
            rows, columns = (side // self.vision.token_pixels for side in pixels.shape[:2])
            digest = digest_of(pixels) if self.store is None else ImageStore(self.store).put(pixels)
            parts += [token_ids[start:place], np.full(rows * columns, token, np.int32)]
            first = num_before + place - start
            places.append(ImagePlace(digest=digest, start=first, num_rows=rows, num_columns=columns))
            start, num_before = place + 1, first + rows * columns
        return np.concatenate([*parts, token_ids[start:]]), tuple(places)


def read_image(path: Path) -> bytes:
    """Return the bytes of a file, no more than `decode` takes."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ImageError(f"{path}: {error.strerror}") from None


class ImageStore:
    """The images of a run, each once, in files that any program shows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        if len(digest) != 2 * _DIGEST_BYTES or not set(digest) <= set("0123456789abcdef"):
            raise ImageError(f"{digest[:80]!r} is no digest of an image")
        return self.folder / f"{digest}.png"

    def put(self, pixels: Pixels) -> str:
        """Keep an image and return its digest; one that is there already stays."""
        digest = digest_of(pixels)
        path = self.path(digest)
        if path.exists():
            return digest
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
        with os.fdopen(descriptor, "wb") as file:
            Image.fromarray(pixels).save(file, "PNG", compress_level=1)
        Path(name).replace(path)
        return digest

    def file_bytes(self, digest: str) -> bytes:
        """Return the file of an image as it is, for a person who looks at it; a link is no image."""
        path = self.path(digest)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise ImageError(f"{path} is not a file")
                return file.read(_MOST_BYTES)
        except OSError as error:
            raise ImageError(f"{path}: the image cannot be read: {error.strerror}") from None

    def read(self, digest: str) -> Pixels:
        """Return the pixels; a missing or changed file is an error."""
        path = self.path(digest)
        try:
            with Image.open(path, formats=("PNG",)) as image:
                pixels = np.asarray(image.convert("RGB"))
        except (OSError, ValueError, SyntaxError) as error:
            raise ImageError(f"{path}: the image of a prompt cannot be read: {error}") from None
        if digest_of(pixels) != digest:
            raise ImageError(f"{path}: the image was changed; its pixels have another digest")
        return pixels
