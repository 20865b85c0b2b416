"""Attention over trees of rows on one GPU: our gathered keys in one varlen call, and torch's flex attention.

Both see the same ancestors: flex attention by a compiled mask over blocks of tokens, which skips empty blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from bench.figures import Figure
from bench.training import alone, clear_device, timed
from megarl.train.attention import packed_sequences
from megarl.train.seen_keys import SeenKeys, attend_to_seen
from megarl.train.softmax import Softmax
from megarl.types import SharedPositions

_HEADS, _KEY_HEADS, _WIDTH = 28, 4, 128
"""Those of a 7B model."""


def measure_prefix_attention() -> Iterator[Figure]:
    """Yield times of one layer's attention, forward and with its backward pass, for three kinds of trees."""
    trees = {
        "a prompt of 2,048 and 16 x 512": [(0, 2560, 0), *[(0, 2560, 2048)] * 15],
        "a chain of ten turns": [
            (0, 2448, 0),
            *[(turn - 1, 2448 + 700 * turn, 1348 + 700 * turn) for turn in range(1, 10)],
        ],
        "a wide tree, 64 leaves": [
            (0, 1664, 0),
            *[(leaf - 1 if leaf % 8 else 0, 1664, 1536 if leaf % 8 else 1024) for leaf in range(1, 64)],
        ],
    }  # fmt: skip
    with alone() as topology:
        for label, rows in trees.items():
            starts, shared = _shared(rows)
            sequences = packed_sequences(starts, topology, shared)
            assert sequences.seen is not None, "nothing is shared"
            mask = _block_mask(starts, shared, topology.device)
            tensors = _random(len(shared.computed), topology.device)
            yield from _figures(label, tensors, sequences.seen, mask)
            clear_device()


def _shared(rows: Sequence[tuple[int, int, int]]) -> tuple[npt.NDArray[np.int32], SharedPositions]:
    """Return the starts and places of rows, each of which begins with some tokens of an earlier one."""
    starts = np.cumsum([0, *(length for _, length, _ in rows)]).astype(np.int32)
    places, num_computed = list[npt.NDArray[np.int64]](), 0
    computed = []
    for number, (earlier, length, common) in enumerate(rows):
        own = np.arange(num_computed, num_computed + length - common)
        places.append(np.concatenate([places[earlier][:common] if common else own[:0], own]))
        computed.append(np.arange(starts[number] + common, starts[number] + length))
        num_computed += len(own)
    return starts, SharedPositions(computed=np.concatenate(computed), places=np.concatenate(places).astype(np.int32))


def _block_mask(starts: npt.NDArray[np.int32], shared: SharedPositions, device: torch.device) -> BlockMask:
    """A key is visible if it lies within what its row and the query's have in common, and not behind the query."""
    rows = [shared.places[start:end] for start, end in pairwise(starts)]
    common = np.array([[_num_equal(a, b) for b in rows] for a in rows])
    row_of = np.searchsorted(starts, shared.computed, side="right") - 1
    depth = shared.computed - starts[row_of]
    tables = [torch.from_numpy(array.astype(np.int32)).to(device) for array in (common, row_of, depth)]

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        common, row_of, depth = tables
        return (depth[key] <= depth[query]) & (depth[key] < common[row_of[query], row_of[key]])

    num_tokens = len(shared.computed)
    return create_block_mask(sees, None, None, num_tokens, num_tokens, device=str(device))


def _num_equal(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    size = min(len(left), len(right))
    differs = np.flatnonzero(left[:size] != right[:size])
    return int(differs[0]) if len(differs) else size


def _random(num_tokens: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(
            num_tokens, heads, _WIDTH, generator=generator, device=device, dtype=torch.bfloat16
        ).requires_grad_()
        for heads in (_HEADS, _KEY_HEADS, _KEY_HEADS)
    ]


_flex = torch.compile(flex_attention, dynamic=False)


def _by_flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    attended: Tensor = _flex(queries, keys, values, block_mask=mask, enable_gqa=True)
    return attended[0].transpose(0, 1)


def _figures(label: str, tensors: Sequence[Tensor], seen: SeenKeys, mask: BlockMask) -> Iterator[Figure]:
    query, key, value = tensors
    ways: dict[str, Callable[[], Tensor]] = {
        "gathered": lambda: attend_to_seen(query, key, value, seen, Softmax()),
        "flex": lambda: _by_flex(query, key, value, mask),
    }
    grad = torch.randn_like(query)
    outcomes = {
        name: (attend().detach(), *torch.autograd.grad(attend(), tensors, grad)) for name, attend in ways.items()
    }
    pairs = zip(outcomes["gathered"], outcomes["flex"], strict=True)
    error = max(float((ours.float() - theirs.float()).norm() / theirs.float().norm()) for ours, theirs in pairs)

    def both(attend: Callable[[], Tensor]) -> None:
        torch.autograd.grad(attend(), tensors, grad)

    for what, call in (("forward", _forward), ("forward and backward", both)):
        found = {}
        for name, attend in ways.items():
            clear_device()
            found[name] = timed(partial(call, attend), warmups=3, repeats=10)
        ours, theirs = found["gathered"], found["flex"]
        yield Figure(
            key=f"prefixes, attention, {label}, {what}",
            name=f"{label}, {len(query)} tokens, {what}: {ours.peak_bytes / 1e9:.2f} GB; differ by {error:.1e}",
            value=1e3 * ours.seconds,
            unit="ms",
            against=f"flex attention, {1e3 * theirs.seconds:.2f} ms, {theirs.peak_bytes / 1e9:.2f} GB",
            ratio=theirs.seconds / ours.seconds,
        )


def _forward(attend: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        attend()
