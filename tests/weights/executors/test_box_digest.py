from __future__ import annotations

import pytest
import torch

from megarl.weights.algebra.slices import Slice
from megarl.weights.executors.box_digest import digest_bytes

SHAPE = (12, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_tells_bits_places_names_and_shapes_apart(dtype: torch.dtype) -> None:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)

    def of(values: torch.Tensor, offsets: tuple[int, int] = (0, 0), name: str = "w") -> int:
        found = digest_bytes(values, Slice(name=name, offsets=offsets, shape=tuple(values.shape)), SHAPE)
        assert found.dtype == torch.int64
        return int(found)

    flipped = values.clone()
    flipped.view(torch.int16 if values.element_size() == 2 else torch.int32)[3, 4] ^= 1
    found = [of(values), of(flipped), of(values, (1, 0)), of(values, name="v"), of(values.reshape(10, 12))]
    assert len(set(found)) == len(found)


def test_how_the_box_lies_in_memory_does_not_matter() -> None:
    values = torch.randn(SHAPE)
    box = Slice(name="w", offsets=(0, 0), shape=SHAPE)
    transposed = values.t().contiguous().t()
    assert digest_bytes(transposed, box, SHAPE) == digest_bytes(values, box, SHAPE)
