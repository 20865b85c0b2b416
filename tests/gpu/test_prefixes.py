"""Attention of rows that share keys, on a GPU, against rows apart in float32: windows, sinks, unequal widths."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from megarl.train.attention import packed_sequences
from megarl.train.seen_keys import SeenKeys, attend_to_seen
from megarl.train.softmax import Softmax, attend_on_host
from megarl.train.topology import Topology
from megarl.types import SharedPositions

pytestmark = pytest.mark.gpu

Places: TypeAlias = npt.NDArray[np.int64]

ROWS = [(0, 300, 0), (0, 420, 256), (1, 500, 400), (1, 401, 400), (0, 700, 17)]
"""An earlier row, the tokens of this one, and how many they have in common."""


def shared_rows(rows: Sequence[tuple[int, int, int]]) -> tuple[list[Places], Places, SeenKeys]:
    """Return the places of each row, those that are computed, and what their queries see."""
    places: list[Places] = []
    num_computed = 0
    for earlier, length, common in rows:
        own = np.arange(num_computed, num_computed + length - common)
        places.append(np.concatenate([places[earlier][:common] if common else own[:0], own]))
        num_computed += len(own)
    starts = np.cumsum([0, *map(len, places)]).astype(np.int32)
    own_tokens = zip(starts, rows, strict=False)
    computed = np.concatenate([np.arange(start + common, start + length) for start, (_, length, common) in own_tokens])
    shared = SharedPositions(computed=computed, places=np.concatenate(places).astype(np.int32))
    topology = cast("Topology", SimpleNamespace(context=1, device=torch.device("cuda")))
    seen = packed_sequences(starts, topology, shared).seen
    assert seen is not None
    return places, computed, seen


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu().double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width", "window", "has_sinks"),
    [
        (12, 2, 128, 128, None, False),
        (4, 4, 192, 128, None, False),
        (8, 2, 64, 64, 50, False),
        (8, 2, 64, 64, 50, True),
    ],
)
def test_rows_with_shared_keys_attend_as_rows_apart(
    heads: int, kv_heads: int, width: int, value_width: int, window: int | None, *, has_sinks: bool
) -> None:
    places, computed, seen = shared_rows(ROWS)
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, width), (kv_heads, width), (kv_heads, value_width))
    exact = [torch.randn(len(computed), *shape, generator=generator).requires_grad_() for shape in shapes]
    sinks = torch.randn(heads, generator=generator).requires_grad_() if has_sinks else None
    tensors = [tensor.detach().to("cuda", torch.bfloat16).requires_grad_() for tensor in exact]
    device_sinks = None if sinks is None else sinks.detach().cuda().requires_grad_()
    query, key, value = tensors
    found = attend_to_seen(query, key, value, seen, Softmax(window=window, sinks=device_sinks))
    grad = torch.randn(found.shape, generator=generator)
    found.backward(grad.to("cuda", torch.bfloat16))  # type: ignore[no-untyped-call]
    outputs = []
    for row, (_, _, common) in zip(places, ROWS, strict=True):
        q, k, v = (tensor[torch.from_numpy(row)].transpose(0, 1)[None] for tensor in exact)
        outputs.append(attend_on_host(q, k, v, Softmax(window=window, sinks=sinks))[0].transpose(0, 1)[common:])
    expected = torch.cat(outputs)
    expected.backward(grad)  # type: ignore[no-untyped-call]
    assert distance(found, expected) < 2e-2
    for tensor, right in zip(tensors, exact, strict=True):
        assert tensor.grad is not None
        assert right.grad is not None
        assert distance(tensor.grad, right.grad) < 2e-2
