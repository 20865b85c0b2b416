"""The door for foreign text and numbers, by properties."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from PIL import Image

from megarl.system.foreign import (
    finite32,
    image_in,
    map_texts,
    one_line,
    read_json,
    whole_text,
    without_marks,
    without_markup,
)
from tests import hostile

_MARKS = ("<|im_start|>", "<|im_end|>", "|im_end|", "</think>", "$")


@given(hostile.texts(_MARKS))
def test_any_text_can_be_encoded_and_whole_text_stays(text: str) -> None:
    whole = whole_text(text)
    whole.encode()
    assert whole_text(whole) is whole
    if not any(0xD800 <= ord(each) < 0xE000 for each in text):
        assert whole == text


@settings(max_examples=200)
@given(hostile.texts(_MARKS))
def test_no_mark_is_left_in_a_text_and_other_text_is_as_it_was(text: str) -> None:
    cleaned = without_marks(text, _MARKS)
    assert not any(mark in cleaned for mark in _MARKS)
    if not any(mark in text for mark in _MARKS):
        assert cleaned == text


def test_a_mark_stays_legible() -> None:
    assert without_marks("5<|im_start|>\n$", _MARKS) == "5< |im_start|>\n\ufffd"
    assert without_marks("5</think>", _MARKS) == "5< /think>"
    assert without_markup("5<|eot_id|>[INST] x</s>") == "5< |eot_id|>[ INST] x< /s>"


@given(hostile.values())
def test_a_number_is_finite_in_32_bits_with_its_square_or_none(value: object) -> None:
    number = finite32(value)
    if number is not None:
        assert np.isfinite(np.square(np.float32(number)))
        assert number == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308, 10**400, 1e30, "1", None, [1], 1j])
def test_what_is_no_finite_number_is_none(value: object) -> None:
    assert finite32(value) is None


@given(hostile.values() | hostile.texts().map(json.dumps))
def test_json_that_is_read_can_be_written_again(value: object) -> None:
    try:
        read = read_json(json.dumps(value))
    except ValueError:
        return
    assert json.loads(json.dumps(read, ensure_ascii=False, allow_nan=False).encode()) == read


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": "\\ud800"}', "half of a character"),
        ('{"\\udc00": 1}', "half of a character"),
        ("[NaN]", "NaN is no number"),
        ("1e999", "too large"),
        ("[" * 100 + "]" * 100, "nested more than 64 deep"),
        ("[" * 200_000, "nested more than 64 deep"),
        ("9" * 5000, "4300 digits"),
        ("{", "Expecting"),
    ],
)
def test_json_that_cannot_be_sent_on_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_json(text)


@given(hostile.texts())
def test_a_line_of_a_log_is_one_line_without_control_characters(text: str) -> None:
    line = one_line(text, max_characters=20)
    assert line.isprintable()
    assert len(line) <= 23
    line.encode()


def test_all_texts_of_a_value_are_changed() -> None:
    assert map_texts(["a", {"b": ("c", 1, None)}], str.upper) == ["A", {"B": ["C", 1, None]}]


def encoded(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 24), "teal").save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_an_image_is_known_as_bytes_and_as_text_whatever_is_around_it(kind: str) -> None:
    raw = encoded(kind)
    text = base64.b64encode(raw).decode()
    for value in (raw, memoryview(raw), bytearray(raw)):
        assert image_in(value) == "bytes of an image"
    for written in (text, f"data:image/{kind.lower()};base64,{text}", {"screen": {"shot": text}}, ["seen", (text,)]):
        assert image_in(written) == "an image in base64"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([{"type": "text"}, {"type": "image_url", "image_url": {"url": "https://"}}], "a part of type image_url"),
        ({"type": "input_image", "image_url": "https://"}, "a part of type input_image"),
        ({"type": "image", "source": {"type": "base64", "data": ""}}, "a part of type image"),
        ({"type": "image", "data": "", "mimeType": "image/png"}, "a part of type image"),
        (Image.new("L", (2, 2)), "an image of Pillow"),
        (np.zeros((20, 30, 3), np.uint8), "an array of pixels"),
        ({"screenshot": np.zeros((20, 30, 3), np.uint8).tolist()}, "pixels"),
    ],
)
def test_an_image_is_named_by_its_form(value: object, kind: str) -> None:
    assert image_in(value) == kind


@pytest.mark.parametrize(
    "value",
    [
        "iVBORw is how PNG begins in base64",
        "/9j/ is how JPEG begins",
        "data of an image",
        "data:image/png is how such an address begins",
        {"type": "image", "title": "Mona Lisa", "url": "https://"},
        {"type": ["image"], "results": [1, 2.5, None, True]},
        [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]],
        np.zeros((20, 30, 3), np.float32),
        b"RIFF....WAVE",
        b"text",
        7,
        None,
    ],
)
def test_what_is_no_image_is_none(value: object) -> None:
    assert image_in(value) is None


@given(hostile.texts(_MARKS))
def test_texts_are_no_images(text: str) -> None:
    assert image_in(text) is None
    assert image_in({text: [text]}) is None


def test_a_value_that_contains_itself_is_looked_at_to_an_end() -> None:
    value: list[object] = []
    value.append(value)
    assert image_in(value) is None
