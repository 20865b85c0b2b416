"""What a scorer and its worker processes say to each other. Standard library only: a worker imports little else.

A message is a JSON object in UTF-8 with its length in front. The worker speaks first: an `Answer` with `sources`, or
one with `key` and `error` when the function cannot be had. After that one `Answer` follows each `Request`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TypedDict

LENGTH = struct.Struct("!I")


class Task(TypedDict):
    """What a worker is for; one line of JSON on its command line."""

    path: str
    name: str
    options: Mapping[str, object]
    """Keywords of the function besides those of a `Request`; empty for the user's."""
    weights: Mapping[str, float] | None
    memory_bytes: int | None
    cpu_s: int | None


class Request(TypedDict):
    """The arguments of the function, by name."""

    data_source: str
    solution_str: str
    ground_truth: str
    extra_info: Mapping[str, object]


class Answer(TypedDict, total=False):
    """`sources` in the first, then `score`, `components` and maybe `prediction`, or `error`."""

    sources: dict[str, str]
    """The files the function was read from, each with its digest."""
    score: float
    components: dict[str, float]
    prediction: str
    """The answer the user's function read out of the response."""
    error: str
    key: str
    """Which key of the recipe's `reward` section the error belongs to."""
