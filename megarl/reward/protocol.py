"""What a scorer and its worker processes say to each other. Standard library only: a worker imports little else.

A message is a JSON object in UTF-8 with its length in front. The worker speaks first: an empty `Answer`, or one with
`key` and `error` when the user's function cannot be had. After that one `Answer` follows each `Request`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TypedDict

LENGTH = struct.Struct("!I")


class Request(TypedDict):
    """The arguments of the user's function, by name."""

    data_source: str
    solution_str: str
    ground_truth: str
    extra_info: Mapping[str, object]


class Answer(TypedDict, total=False):
    """`score`, `components` and maybe `prediction`, or `error`."""

    score: float
    components: dict[str, float]
    prediction: str
    """The answer the user's function read out of the response."""
    error: str
    key: str
    """Which key of the recipe's `reward` section the error belongs to."""
