from __future__ import annotations

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.weights.algebra.slices import Slice
from megarl.weights.executors.digest import check_digests, digest_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPE = (12, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_tell_bits_places_names_and_shapes_apart(dtype: torch.dtype) -> None:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)

    def of(values: torch.Tensor, offsets: tuple[int, int] = (0, 0), name: str = "w") -> int:
        value = digest_bytes(values, Slice(name=name, offsets=offsets, shape=tuple(values.shape)), SHAPE)
        assert value.dtype == torch.int64
        return int(value)

    flipped = values.clone()
    flipped.view(torch.int16 if values.element_size() == 2 else torch.int32)[3, 4] ^= 1
    digests = [of(values), of(flipped), of(values, (1, 0)), of(values, name="v"), of(values.reshape(10, 12))]
    assert len(set(digests)) == len(digests)


def test_how_the_box_lies_in_memory_does_not_matter() -> None:
    values = torch.randn(SHAPE)
    box = Slice(name="w", offsets=(0, 0), shape=SHAPE)
    transposed = values.t().contiguous().t()
    assert digest_bytes(transposed, box, SHAPE) == digest_bytes(values, box, SHAPE)


def test_partial_digests_add_up_modulo_two_to_the_64() -> None:
    check_digests([{(0, "a"): (1 << 64) - 1}, {(0, "a"): 3}], {0: {"a": 2}})


@pytest.mark.parametrize(
    ("arrived", "message"),
    [
        (
            {0: {"a": 6}, 1: {"a": 7}},
            "target rank 0: a has digest 0x0000000000000006, the senders' is 0x0000000000000005",
        ),
        ({0: {"a": 5}}, "target rank 1: a has digest missing"),
        ({0: {"a": 5, "b": 1}, 1: {"a": 7}}, "target rank 0: b has digest 0x0000000000000001, the senders' is missing"),
    ],
)
def test_a_disagreement_names_rank_and_tensor(arrived: dict[int, dict[str, int]], message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        check_digests([{(0, "a"): 5, (1, "a"): 7}], arrived)
