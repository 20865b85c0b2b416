"""Files that are no pictures, damaged ones, and such as take far more memory or time than their size says, by kind.

As a program it reads those of a folder under a limit of memory and prints what became of each.
"""

from __future__ import annotations

import io
import json
import resource
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin

from megarl.data.images import FORMATS, ImageError, ImageProcessor
from megarl.families import PUBLIC_MODELS
from megarl.families.qwen2_5_vl import vision_of
from megarl.system.proc import own_address_space_bytes

SPARE_BYTES = 1 << 30
Random = np.random.Generator
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SOF2, _SOS = b"\xff\xc2", b"\xff\xda"


def smooth_picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    # Noise would change with the rounding of each resize.
    rows, columns = np.mgrid[0:height, 0:width]
    colours = np.stack([rows * 255 // height, columns * 255 // width, (rows + columns) % 256], axis=-1)
    return Image.fromarray(colours.astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def picture(random: Random, mode: str = "RGB", *, largest: int = 96) -> Image.Image:
    height, width = (int(side) for side in random.integers(8, largest, size=2))
    return smooth_picture(height, width, mode)


def any_file(random: Random) -> bytes:
    return encoded(picture(random), str(random.choice(FORMATS)))


def png(width: int, height: int, data: bytes, *chunks: tuple[bytes, bytes], depth: int = 8, colours: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)
    whole = ((b"IHDR", header), *chunks, (b"IDAT", data), (b"IEND", b""))
    parts = (struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in whole)
    return _SIGNATURE + b"".join(parts)


def huge(random: Random, limit: int) -> tuple[int, int]:
    """Return two sides, of which at least one is far too long."""
    sides = [int(limit * fraction) for fraction in random.uniform(0.3, 1.0, size=2)]
    return max(sides[0], 1), max(sides[1], 1)


def truncated(random: Random) -> bytes:
    raw = any_file(random)
    return raw[: int(random.integers(len(raw)))]


def changed(random: Random) -> bytes:
    raw = bytearray(any_file(random))
    for place in random.integers(len(raw), size=int(random.integers(1, 40))):
        raw[place] = random.integers(256)
    return bytes(raw)


def spliced(random: Random) -> bytes:
    one, other = any_file(random), any_file(random)
    return one[: int(random.integers(len(one)))] + other[int(random.integers(len(other))) :]


def wrong_magic(random: Random) -> bytes:
    one, other = any_file(random), any_file(random)
    length = int(random.integers(2, 16))
    return one[:length] + other[length:]


def noise(random: Random) -> bytes:
    return any_file(random)[: int(random.integers(0, 24))] + random.bytes(int(random.integers(0, 4096)))


def other_kinds(random: Random) -> bytes:
    texts = (b"", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7\n", b"%!PS-Adobe-3.0\n", b"8BPS\0\1")
    kinds = ("TIFF", "ICO", "PPM", "TGA", "ICNS", "PCX", "SGI", "DDS", "PDF")
    choice = int(random.integers(len(texts) + len(kinds)))
    return texts[choice] if choice < len(texts) else encoded(picture(random), kinds[choice - len(texts)])


def without_size(random: Random) -> bytes:
    width, height = [(0, 0), (0, 5), (5, 0)][int(random.integers(3))]
    match int(random.integers(4)):
        case 0:
            return png(width, height, zlib.compress(bytes(100)))
        case 1:
            raw = bytearray(encoded(picture(random), "BMP"))
            raw[18:26] = struct.pack("<ii", width, height)
        case 2:
            raw = bytearray(encoded(picture(random, "P"), "GIF"))
            raw[6:10] = struct.pack("<HH", width, height)
            place = raw.index(b",\0\0\0\0")
            raw[place + 5 : place + 9] = struct.pack("<HH", width, height)
        case _:
            raw = bytearray(encoded(picture(random), "JPEG"))
            place = raw.index(b"\xff\xc0")
            raw[place + 5 : place + 9] = struct.pack(">HH", height, width)
    return bytes(raw)


def png_bomb(random: Random) -> bytes:
    """Return a few bytes that say they are a large picture, of zeros that lack or are there in full."""
    if random.random() < 0.8:
        return png(*huge(random, 2**31 - 1), zlib.compress(bytes(1 << 20)))
    side = int(random.integers(1000, 12_000))
    return png(side, side, zlib.compress(bytes((3 * side + 1) * min(side, 3000)), 1))


def png_bomb_in_full(random: Random) -> bytes:
    """Return a picture of few bytes and many pixels, up to those that are allowed."""
    width, height = (int(2**bits) for bits in random.uniform(8, 12.9, size=2))
    colours, depth = [(0, 1), (2, 3), (6, 4)][int(random.integers(3))]
    return png(width, height, zlib.compress(bytes((depth * width + 1) * height), 1), colours=colours)


def jpeg_bomb(random: Random) -> bytes:
    raw = bytearray(encoded(picture(random), "JPEG", progressive=bool(random.integers(2))))
    place = max(raw.find(b"\xff\xc0"), raw.find(_SOF2))
    width, height = huge(random, 65_500)
    raw[place + 5 : place + 9] = struct.pack(">HH", height, width)
    return bytes(raw)


def webp_bomb(random: Random) -> bytes:
    if random.random() < 0.5:
        width, height = huge(random, 2**14)
        bits = (width - 1) | (height - 1) << 14
        body = b"VP8L" + struct.pack("<IBI", 60, 0x2F, bits) + random.bytes(55)
    else:
        width, height = huge(random, 2**24)
        canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        still = encoded(picture(random), "WEBP")[12:]
        body = b"VP8X" + struct.pack("<I", 10) + bytes([int(random.choice([0, 2, 16])), 0, 0, 0]) + canvas + still
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def gif_bomb(random: Random) -> bytes:
    """Return a small picture on a large screen, or a frame that reaches far beyond its screen."""
    raw = bytearray(encoded(picture(random, "P"), "GIF"))
    sides = struct.pack("<HH", *huge(random, 65_535))
    if random.random() < 0.5:
        raw[6:10] = sides
    if random.random() < 0.7:
        place = raw.index(b",\0\0\0\0")
        raw[place + 5 : place + 9] = sides
    return bytes(raw)


def bmp_bomb(random: Random) -> bytes:
    width, height = huge(random, int(2 ** random.uniform(13.5, 31)) - 1)
    raw = bytearray(encoded(picture(random, "P"), "BMP"))
    raw[18:26] = struct.pack("<ii", width, height * int(random.choice([1, -1])))
    raw[30:34] = struct.pack("<I", int(random.choice([0, 1, 2, 3])))  # run-length encoded, or masks
    return bytes(raw)


def animated(random: Random) -> bytes:
    kind = str(random.choice(["GIF", "WEBP", "PNG"]))
    num = int(random.integers(2, 30))
    frames = [Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(num)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def in_other_colours(random: Random) -> bytes:
    mode, kind = [
        ("CMYK", "JPEG"),
        ("L", "JPEG"),
        ("P", "PNG"),
        ("P", "GIF"),
        ("P", "BMP"),
        ("1", "PNG"),
        ("1", "BMP"),
        ("L", "PNG"),
        ("LA", "PNG"),
        ("RGBA", "PNG"),
        ("RGBA", "WEBP"),
        ("I;16", "PNG"),
    ][int(random.integers(12))]
    if mode == "I;16":
        return encoded(Image.fromarray(random.integers(0, 65536, (40, 30), dtype=np.uint16)), kind)
    options: dict[str, object] = {"transparency": 3} if mode == "P" and kind == "PNG" and random.random() < 0.5 else {}
    return encoded(picture(random, mode), kind, **options)


def turned(random: Random) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = int(random.integers(70))  # most of these are no orientation
    return encoded(picture(random), str(random.choice(["JPEG", "PNG", "WEBP"])), exif=exif)


def junk_exif(random: Random) -> bytes:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "x" * int(random.integers(200))
    raw = bytearray(exif.tobytes())
    for place in random.integers(6, len(raw), size=int(random.integers(1, 12))):
        raw[place] = random.integers(256)
    whole = bytes(raw) if random.random() < 0.7 else b"Exif\0\0" + random.bytes(int(random.integers(1, 3000)))
    return encoded(picture(random), str(random.choice(["JPEG", "PNG", "WEBP"])), exif=whole)


def junk_profile(random: Random) -> bytes:
    profile = random.bytes(int(random.integers(1, 60_000)))
    if random.random() < 0.3:
        packed = zlib.compress(bytes(64 << 20), 1) if random.random() < 0.2 else random.bytes(500)
        return png(20, 20, zlib.compress(bytes(61 * 20)), (b"iCCP", b"name\0\0" + packed))
    return encoded(picture(random), str(random.choice(["JPEG", "PNG", "WEBP"])), icc_profile=profile)


def much_said(random: Random) -> bytes:
    """Return a picture with far more words than pixels, some of them packed."""
    match int(random.integers(4)):
        case 0:
            texts = PngImagePlugin.PngInfo()
            for number in range(int(random.integers(1, 4))):
                texts.add_text(f"k{number}", "a" * (1 << int(random.integers(10, 25))), zip=bool(random.integers(2)))
            return encoded(picture(random), "PNG", pnginfo=texts)
        case 1:
            flood = ((b"tEXt", b"a\0b"),) * int(random.integers(1, 20_000))
            return png(20, 20, zlib.compress(bytes(61 * 20)), *flood)
        case 2:
            raw = encoded(picture(random), "JPEG")
            kind = bytes([0xFF, int(random.choice([0xE1, 0xE2, 0xED, 0xEE, 0xFE]))])
            segment = kind + struct.pack(">H", 65_000) + random.bytes(64_998)
            return raw[:2] + segment * int(random.integers(1, 100)) + raw[2:]
        case _:
            raw = encoded(picture(random, "P"), "GIF")
            comment = b"!\xfe" + (b"\xff" + bytes(255)) * int(random.integers(1, 5000)) + b"\0"
            place = raw.index(b",\0\0\0\0")
            return raw[:place] + comment + raw[place:]


def two_in_one(random: Random) -> bytes:
    """Return a file that other programs read as something else."""
    raw = any_file(random)
    other = [b"PK\x03\x04" + random.bytes(300), b"<script>alert(1)</script>", b"%PDF-1.7\n", any_file(random)]
    added = other[int(random.integers(len(other)))]
    match int(random.integers(3)):
        case 0:
            return raw + added
        case 1:
            return added + raw
        case _:
            comment = b"\xff\xfe" + struct.pack(">H", 2 + len(added)) + added
            raw = encoded(picture(random), "JPEG")
            return raw[:2] + comment + raw[2:]


def many_scans(random: Random) -> bytes:
    """Return a progressive JPEG whose last scan comes again and again, each time over all pixels."""
    side = int(random.integers(500, 4000))
    raw = encoded(Image.new("RGB", (side, side), "white"), "JPEG", progressive=True)
    last = raw.rindex(_SOS)
    return raw[:last] + raw[last:-2] * int(random.integers(1, 5000)) + raw[-2:]


def strip(random: Random) -> bytes:
    sides = [int(random.integers(1, 4)), int(random.integers(1000, 5000))]
    random.shuffle(sides)
    return encoded(Image.new("RGB", (sides[0], sides[1])), str(random.choice(FORMATS)))


KINDS: tuple[Callable[[Random], bytes], ...] = (
    truncated,
    changed,
    spliced,
    wrong_magic,
    noise,
    other_kinds,
    without_size,
    png_bomb,
    png_bomb_in_full,
    jpeg_bomb,
    webp_bomb,
    gif_bomb,
    bmp_bomb,
    animated,
    in_other_colours,
    turned,
    junk_exif,
    junk_profile,
    much_said,
    two_in_one,
    many_scans,
    strip,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The outcome of reading one file."""

    kind: str
    outcome: str
    """`read`, `refused`, or anything else, which is wrong."""
    num_bytes: int
    seconds: float
    peak_bytes: int
    """Beyond what was in memory before the first file."""


def write_all(folder: Path, num: int, *, seed: int) -> None:
    for number in range(num):
        make = KINDS[number % len(KINDS)]
        (folder / f"{number:04d}.{make.__name__}").write_bytes(make(np.random.default_rng((seed, number))))


def readings(folder: Path) -> Iterator[Reading]:
    vision = vision_of(PUBLIC_MODELS["qwen2.5-vl-3b"])
    processor = ImageProcessor(
        vision=vision, min_pixels=56 * 56, max_pixels=28 * 28 * 64, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
    )
    before = _peak_bytes()
    for path in sorted(folder.iterdir()):
        raw, began = path.read_bytes(), time.process_time()
        try:
            pixels = processor.pixels(raw)
            is_right = pixels.dtype == np.uint8 and 56 * 56 <= pixels[..., 0].size <= processor.max_pixels
            outcome = "read" if is_right else f"pixels of {pixels.shape}"
        except ImageError:
            outcome = "refused"
        except Exception as error:  # noqa: BLE001 - what escapes is what is looked for
            outcome = f"{type(error).__name__}: {error}"
        yield Reading(
            kind=path.suffix[1:],
            outcome=outcome,
            num_bytes=len(raw),
            seconds=round(time.process_time() - began, 3),
            peak_bytes=_peak_bytes() - before,
        )


def _peak_bytes() -> int:
    # Not getrusage: its peak is at least that of the process which started this one.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (own_address_space_bytes() + SPARE_BYTES,) * 2)
    for each in readings(Path(sys.argv[1])):
        sys.stdout.write(json.dumps(asdict(each)) + "\n")
