"""The door for text and numbers that others wrote: models, tools, servers, judges, user code. Standard library only.

Text that passes it can be encoded and holds no markup of the model that reads it; a number is finite where it is used,
in 32 bits; JSON can be written again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real

_IMAGE_PARTS = {
    "image_url": {"image_url"},
    "input_image": {"image_url", "file_id"},
    "image": {"data", "source", "image"},
}
"""Parts of a content that are images, by type, with the fields of which one holds it."""
_IMAGE_BYTES = re.compile(rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP", re.DOTALL)
_IMAGE_TEXT = re.compile(r"data:image/[\w.+-]+;base64,|iVBORw0KGgo|/9j/[\w+/]{60}|R0lGOD[\w+/]{60}|UklGR[\w+/]{7}RUJQ")
"""An address with the image in it, and the beginnings of such bytes in base64."""
_LEAST_SIDE = 16
"""Fewer rows or columns of three or four numbers are no image."""
_MAX_LISTED = 32
"""Items of a list that are looked at."""
_LARGEST = 2.0**63
"""Larger numbers are refused: the square of this one, which a variance needs, is still finite in 32 bits."""
_MAX_DEPTH = 64
_UNKNOWN = "\ufffd"
_MAX_LINE = 500
# Control tokens in the manner of the known model families: <|im_end|>, DeepSeek's wide bars, [INST], <<SYS>>, </s>,
# <start_of_turn>.
_BAR = "[|\uff5c]"
_MARKUP = re.compile(rf"<{_BAR}[^<>]{{1,64}}?{_BAR}>|\[/?INST\]|<</?SYS>>|</?s>|<(?:start|end)_of_turn>")


def whole_text(text: str) -> str:
    """Return the text with every lone surrogate replaced; a pair of surrogates becomes its character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def without_marks(text: str, marks: Sequence[str]) -> str:
    """Return the text without any of the marks, longest first: a space parts each one after its first character."""
    for mark in marks:
        # `in` first: most texts have none, and it takes a fraction of the time.
        if len(mark) > 1 and mark in text:
            text = text.replace(mark, f"{mark[0]} {mark[1:]}")
    # A mark may be part of another one, or a single character.
    while found := [mark for mark in marks if mark in text]:
        for mark in found:
            text = text.replace(mark, _UNKNOWN + mark[1:])
    return text


def without_markup(text: str) -> str:
    """Return the text for a model whose tokens are not known: markup of all known families is parted."""
    return _MARKUP.sub(lambda found: f"{found[0][0]} {found[0][1:]}", whole_text(text))


def map_texts(value: object, change: Callable[[str], str]) -> object:
    """Return a JSON value with all its texts changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    return value


def one_line(text: object, *, max_characters: int = _MAX_LINE) -> str:
    """Return foreign text for a log or a terminal: one line without control characters, of limited length."""
    known = str(text)
    shown = "".join(each if each.isprintable() else " " for each in known[:max_characters])
    return whole_text(shown) + ("..." if len(known) > max_characters else "")


def image_in(value: object, depth: int = 8) -> str | None:
    """Return what kind of image a value is or has in it, in the forms that tools give them; None where it has none."""
    match value:
        case bytes() | bytearray() | memoryview():
            return "bytes of an image" if _IMAGE_BYTES.match(value) else None
        case str():
            return "an image in base64" if _IMAGE_TEXT.match(value) else None
        case Mapping():
            kind = value.get("type")
            if isinstance(kind, str) and not _IMAGE_PARTS.get(kind, set()).isdisjoint(value):
                return f"a part of type {kind}"
            return _first_image(value.values(), depth)
        case list() | tuple():
            return "pixels" if _are_pixels(value) else _first_image(value[:_MAX_LISTED], depth)
    if type(value).__module__.startswith("PIL."):
        return "an image of Pillow"
    shape = getattr(value, "shape", None)
    is_image = isinstance(shape, tuple) and len(shape) == 3 and str(getattr(value, "dtype", "")).endswith("uint8")
    return "an array of pixels" if is_image else None


def _first_image(values: Iterable[object], depth: int) -> str | None:
    found = (image_in(each, depth - 1) for each in values) if depth else ()
    return next((kind for kind in found if kind is not None), None)


def _are_pixels(rows: Sequence[object]) -> bool:
    """Whether these are rows of columns of three or four whole numbers."""
    columns = rows[0] if len(rows) >= _LEAST_SIDE else None
    pixel = columns[0] if isinstance(columns, list | tuple) and len(columns) >= _LEAST_SIDE else None
    return isinstance(pixel, list | tuple) and len(pixel) in (3, 4) and all(type(each) is int for each in pixel)


def finite32(value: object) -> float | None:
    """Return a number that is finite in 32 bits, and so is its square; None for anything else."""
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError, TypeError):
        return None
    return number if abs(number) <= _LARGEST else None


def read_json(text: str | bytes) -> object:
    """Return foreign JSON that can be sent on as JSON; a ValueError says what is wrong with it."""
    try:
        value: object = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep") from None
    _check(value, _MAX_DEPTH)
    return value


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no number of JSON")


def _check(value: object, depth: int) -> None:
    if depth == 0:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
    match value:
        case str():
            if whole_text(value) is not value:
                raise ValueError("it has half of a character: a surrogate without its pair")
        case float():
            if not math.isfinite(value):
                raise ValueError("it has a number that is too large")
        case dict():
            for key, item in value.items():
                _check(key, depth)
                _check(item, depth - 1)
        case list():
            for item in value:
                _check(item, depth - 1)
        case _:
            return
