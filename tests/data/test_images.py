from __future__ import annotations

import io
import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megarl.data.images import ImageError, ImageProcessor, ImageStore, Pixels, decode, digest_of
from megarl.families import PUBLIC_MODELS
from megarl.families.qwen2_5_vl import vision_of
from megarl.families.shape import VisionShape
from tests.data.hostile_images import encoded
from tests.data.hostile_images import smooth_picture as picture

VISION = vision_of(PUBLIC_MODELS["qwen2.5-vl-3b"])
FIELDS = {
    "patch_size": 14,
    "merge_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 64,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def processor(folder: Path, vision: VisionShape = VISION, **fields: object) -> ImageProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps({**FIELDS, **fields}))
    return ImageProcessor.of(folder, vision)


@pytest.mark.parametrize(("height", "width"), [(56, 84), (20, 30), (300, 410), (900, 60), (29, 1000)])
def test_the_tower_sees_what_transformers_would_show_it(height: int, width: int, tmp_path: Path) -> None:
    own, raw = processor(tmp_path), encoded(picture(height, width), "PNG")
    pixels = own.pixels(raw)
    made = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)([Image.open(io.BytesIO(raw))])
    assert [1, pixels.shape[0] // 14, pixels.shape[1] // 14] == made["image_grid_thw"][0].tolist()
    np.testing.assert_allclose(own.patches(pixels), made["pixel_values"], rtol=0, atol=1e-5)


def _bomb(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes that says it has so many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(100_000))), (b"IEND", b""))
    parts = (struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _frames(kind: str) -> bytes:
    return encoded(picture(28, 28), kind, save_all=True, append_images=[picture(28, 28, "L").convert("RGB")])


PNG, JPEG = encoded(picture(56, 56), "PNG"), encoded(picture(56, 56), "JPEG")
READ = {
    "png": PNG,
    "jpeg": JPEG,
    "webp": encoded(picture(56, 56), "WEBP"),
    "bmp": encoded(picture(56, 56), "BMP"),
    "gif": encoded(picture(56, 56, "P"), "GIF"),
    "grey": encoded(picture(56, 56, "L"), "PNG"),
    "alpha": encoded(picture(56, 56, "RGBA"), "PNG"),
    "palette": encoded(picture(56, 56, "P"), "PNG"),
    "cmyk": encoded(picture(56, 56, "CMYK"), "JPEG"),
    "one bit": encoded(picture(56, 56, "1"), "PNG"),
    "one pixel": encoded(picture(1, 1), "PNG"),
    "bytes behind the end": PNG + b"\0" * 1000,
}
REFUSED = {
    "nothing": b"",
    "text": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "truncated png": PNG[: len(PNG) // 2],
    "truncated jpeg": JPEG[: len(JPEG) // 2],
    "broken png": PNG[:60] + bytes(40) + PNG[100:],
    "bomb": _bomb(60_000, 60_000),
    "bomb within the size of its file": _bomb(7_000, 7_000),
    "animation": _frames("GIF"),
    "frames": _frames("WEBP"),
    "tiff": encoded(picture(56, 56), "TIFF"),
    "strip": encoded(picture(2, 500), "PNG"),
}


@pytest.mark.parametrize("kind", READ)
def test_still_pictures_are_read(kind: str, tmp_path: Path) -> None:
    pixels = processor(tmp_path).pixels(READ[kind])
    assert pixels.shape == (56, 56, 3)
    assert pixels.dtype == np.uint8


@pytest.mark.parametrize("kind", REFUSED)
def test_other_images_are_refused_without_their_memory(kind: str, tmp_path: Path) -> None:
    own = processor(tmp_path)
    tracemalloc.start()
    with pytest.raises(ImageError):
        own.pixels(REFUSED[kind])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_picture_is_upright() -> None:
    raw, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    picture(28, 56).save(raw, "JPEG", exif=exif)
    assert decode(raw.getvalue()).size == (28, 56)


def test_what_is_transparent_is_white() -> None:
    half = np.zeros((4, 4, 4), np.uint8)
    half[:2, :, 3] = 255
    raw = encoded(Image.fromarray(half), "PNG")
    for each in (raw, encoded(Image.open(io.BytesIO(raw)).convert("LA"), "PNG")):
        assert np.asarray(decode(each))[:, 0, 0].tolist() == [0, 0, 255, 255]


def test_of_16_bits_the_upper_ones_are_seen() -> None:
    levels = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    assert np.asarray(decode(encoded(Image.fromarray(levels), "PNG")))[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_of_a_photo_with_a_preview_the_photo_is_read() -> None:
    raw = encoded(picture(56, 28), "MPO", save_all=True, append_images=[picture(14, 14)])
    assert decode(raw).size == (28, 56)


def test_a_picture_with_damaged_exif_data_is_read_as_it_is() -> None:
    assert decode(encoded(picture(28, 56), "JPEG", exif=b"Exif\0\0no such data")).size == (56, 28)


def test_a_recipe_can_lower_the_size(tmp_path: Path) -> None:
    processor(tmp_path)
    own = ImageProcessor.of(tmp_path, VISION, max_image_pixels=28 * 28 * 4)
    assert own.size(1000, 1000) == (56, 56)
    assert own.size(20, 30) == (28, 56)
    with pytest.raises(ImageError, match="less than one token"):
        ImageProcessor.of(tmp_path, VISION, max_image_pixels=700)


def test_a_processor_of_another_tower_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="patch_size is 14, that of the tower 16"):
        processor(tmp_path, replace(VISION, patch=16))


def changed(store: ImageStore, digest: str) -> None:
    Image.fromarray(np.zeros((28, 28, 3), np.uint8)).save(store.path(digest))


def removed(store: ImageStore, digest: str) -> None:
    store.path(digest).unlink()


@pytest.mark.parametrize(("damage", "message"), [(changed, "was changed"), (removed, "cannot be read")])
def test_a_store_returns_what_was_put_or_an_error(
    damage: Callable[[ImageStore, str], None], message: str, tmp_path: Path
) -> None:
    store, pixels = ImageStore(tmp_path / "images"), np.asarray(picture(28, 56))
    digest = store.put(pixels)
    assert store.put(pixels.copy()) == digest == digest_of(pixels)
    assert np.array_equal(store.read(digest), pixels)
    assert [path.name for path in store.folder.iterdir()] == [f"{digest}.png"]
    damage(store, digest)
    with pytest.raises(ImageError, match=message):
        store.read(digest)


def test_a_size_is_part_of_a_digest() -> None:
    flat: Pixels = np.zeros((28, 56, 3), np.uint8)
    assert digest_of(flat) != digest_of(flat.reshape(56, 28, 3))


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "g" * 32, "A" * 32])
def test_a_store_reads_no_other_files(name: str, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="no digest"):
        ImageStore(tmp_path).read(name)
