"""FP8 blocks: their arithmetic by hand, and the tensors that trainer ranks derive and send."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.weights.algebra.plan import Plan, plan
from megarl.weights.algebra.slices import Layout, Link, on_gpus
from megarl.weights.executors.digest import check_digests, digest_bytes
from megarl.weights.executors.fp8 import Fp8Tensors, probe_products, quantise, restored
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.meeting import StoreServer
from megarl.weights.executors.transfer import Receiver, Sender
from megarl.weights.layouts.fp8 import SCALES, fp8_engine_layout, fp8_trainer_layout
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout
from tests.weights.reference import block_shape
from tests.weights.transfer_peers import cut

FP8 = torch.float8_e4m3fn
BUCKET_BYTES = 100_000


def quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = matrix.shape
    elements, scales = torch.zeros(rows, columns, dtype=FP8), torch.zeros(-(-rows // 128), -(-columns // 128))
    quantise(matrix, elements, scales)
    return elements, scales


def test_a_block_by_hand() -> None:
    matrix = torch.zeros(128, 256)
    matrix[0, :6] = torch.tensor([-896.0, 448.0, 3.0, 0.1, 2.0**-10, 17.0])
    matrix[5, 130] = 1.75
    elements, scales = quantised(matrix)
    # The largest of the first block is 896: its scale is 2, and 3/2, 0.05, 17/2 lie between FP8 numbers or on one.
    assert scales.tolist() == [[2.0, 1.75 / 448]]
    assert elements[0, :6].float().tolist() == [-448.0, 224.0, 1.5, 0.05078125, 0.0, 8.5 - 0.5]
    assert elements[5, 130].float() == 448
    assert restored(elements, scales)[5, 130] == 1.75


def test_a_block_of_zeros_has_scale_one_and_a_smallest_number_survives() -> None:
    matrix = torch.zeros(256, 128)
    matrix[128, 0] = 1e-30
    elements, scales = quantised(matrix)
    assert scales[0, 0] == 1
    assert not elements[:128].float().any()
    assert restored(elements, scales)[128, 0] == pytest.approx(1e-30, rel=1e-6)


@pytest.mark.patient
@settings(max_examples=15)
@given(seed=st.integers(0, 2**16), rows=st.integers(1, 3), columns=st.integers(1, 3), power=st.integers(-12, 6))
def test_quantise_then_cut_is_cut_then_quantise_and_errors_are_bounded(
    seed: int, rows: int, columns: int, power: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = (torch.randn(128 * rows, 128 * columns, generator=generator) * 2.0**power).bfloat16()
    elements, scales = quantised(matrix)
    for row in range(rows):
        for column in range(columns):
            box = slice(128 * row, 128 * (row + 1)), slice(128 * column, 128 * (column + 1))
            alone, scale = quantised(matrix[box])
            assert torch.equal(alone.view(torch.uint8), elements[box].view(torch.uint8))
            assert scale.item() == scales[row, column].item()
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    error = (restored(elements, scales) - matrix.float()).abs()
    assert bool((error <= torch.maximum(matrix.float().abs() / 16, spread * 2**-10) * (1 + 1e-6)).all())


def test_an_unfinished_block_at_the_edge_is_quantised_as_if_filled_with_zeros() -> None:
    matrix = torch.randn(130, 200)
    elements, scales = quantised(matrix)
    filled = torch.zeros(256, 256)
    filled[:130, :200] = matrix
    expected, expected_scales = quantised(filled)
    assert torch.equal(elements.float(), expected[:130, :200].float())
    assert torch.equal(scales, expected_scales)


class Product:
    """A quant method whose kernel reads weights times `factor`."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, layer: torch.nn.Module, inputs: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None
        assert isinstance(layer.weight, Tensor)
        assert isinstance(layer.weight_scale_inv, Tensor)
        return (inputs.float() @ restored(layer.weight, layer.weight_scale_inv).T * self.factor).bfloat16()


@pytest.mark.parametrize("factor", [1.0, 1.2, float("nan")])
def test_a_probe_finds_kernels_that_read_the_weights_in_another_way(factor: float) -> None:
    layer = torch.nn.Module()
    elements, scales = quantised(torch.randn(256, 128))
    layer.weight = torch.nn.Parameter(elements, requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
    layer.quant_method = Product(factor)  # type: ignore[assignment]
    model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(4), "qkv_proj": layer})
    if factor == 1.0:
        probe_products(model)
        return
    with pytest.raises(WeightSyncError, match=r"qkv_proj: products in FP8 are (0.2|nan)"):
        probe_products(model)


def fp8_plan(family: str, parallel: MegatronParallel, *, keep: tuple[str, ...], is_near: bool) -> Plan:
    shape = block_shape(family)
    source = fp8_trainer_layout(megatron_layout(shape, parallel, dtype="bfloat16"), keep)
    target = fp8_engine_layout(sglang_layout(shape, tensor=2, dtype="bfloat16"), shape, keep)
    ranks = range(parallel.world_size)
    gpus = [(0, rank) if is_near else (1, rank) for rank in range(2)]
    return plan(source, target, locations=on_gpus([(0, rank) for rank in ranks], gpus))


@dataclass(frozen=True, kw_only=True)
class Publish:
    """Two versions of random weights over one plan, by threads that stand for ranks."""

    moves: Plan
    own: Layout
    """The trainer's weights before anything is derived."""
    direct: Link
    server: StoreServer

    def model(self, version: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(version)
        return {
            name: torch.randn(spec.shape, generator=generator).bfloat16() for name, spec in self.own.canonical.items()
        }

    @property
    def num_sources(self) -> int:
        return len(self.own.holdings)

    def join(self, peer: int) -> TransferGroup:
        return TransferGroup.join(
            self.server.address, name="fp8", peer=peer, num_peers=self.num_sources + 2, timeout_s=120
        )

    def send(self, rank: int) -> list[dict[tuple[int, str], int]]:
        holding, peer = self.own.by_rank[rank], self.join(rank)
        parameters = cut(holding, self.model(1))
        derived = Fp8Tensors(self.moves, rank, holding, parameters)
        sender = Sender(
            self.moves, rank, derived.tensors, peer, bucket_bytes=BUCKET_BYTES, direct=self.direct, digest=digest_bytes
        )
        digests = []
        for version in (1, 2):
            for name, tensor in cut(holding, self.model(version)).items():
                parameters[name].copy_(tensor)
            derived.fill()
            digests.append(sender.send(version))
            peer.barrier()
            derived.free()
        return digests

    def receive(self, rank: int) -> tuple[list[dict[str, int]], dict[str, Tensor]]:
        holding, peer = self.moves.target.by_rank[rank], self.join(self.num_sources + rank)
        tensors = cut(replace(holding, pieces=()), self.model(1))
        receiver = Receiver(
            self.moves, rank, tensors, peer, bucket_bytes=BUCKET_BYTES, direct=self.direct, digest=digest_bytes
        )
        digests = []
        for version in (1, 2):
            digests.append(receiver.receive(version))
            peer.barrier()
        return digests, tensors


@pytest.mark.patient
@pytest.mark.parametrize(
    ("family", "parallel", "keep", "is_near"),
    [
        ("qwen2", MegatronParallel(tensor=2), (), False),
        ("llama", MegatronParallel(pipeline=2), ("model.layers.0.*",), True),
        ("qwen3", MegatronParallel(data=2), ("*.down_proj",), False),
        ("qwen3_moe", MegatronParallel(tensor=2, expert=2, expert_tensor=1), (), True),
        ("qwen3_moe", MegatronParallel(tensor=2, expert=2, expert_tensor=1), (), False),
    ],
)
def test_engines_get_the_bytes_of_the_whole_matrix_quantised(
    family: str, parallel: MegatronParallel, keep: tuple[str, ...], is_near: bool
) -> None:
    publish = Publish(
        moves=fp8_plan(family, parallel, keep=keep, is_near=is_near),
        own=megatron_layout(block_shape(family), parallel, dtype="bfloat16"),
        direct=Link.DEVICE if is_near else Link.PROCESS,
        server=StoreServer(),
    )
    with ThreadPoolExecutor(parallel.world_size + 2) as pool:
        senders = [pool.submit(publish.send, rank) for rank in range(parallel.world_size)]
        receivers = [pool.submit(publish.receive, rank) for rank in range(2)]
        sent = [each.result(timeout=300) for each in senders]
        arrived = [each.result(timeout=300) for each in receivers]
    for number in (0, 1):
        check_digests([each[number] for each in sent], {rank: each[0][number] for rank, each in enumerate(arrived)})
    canonical: dict[str, Tensor] = publish.model(2)
    for name in [name for name in canonical if name + SCALES in publish.moves.target.canonical]:
        canonical[name], canonical[name + SCALES] = quantised(canonical[name])
    for rank, (_, tensors) in enumerate(arrived):
        for name, tensor in cut(publish.moves.target.by_rank[rank], canonical).items():
            pair = (each.reshape(-1).view(torch.uint8) for each in (tensors[name], tensor))
            assert torch.equal(*pair), name


def test_a_matrix_whose_parts_cut_through_blocks_is_quantised_as_a_whole() -> None:
    """Keys of heads of 64 channels lie 64 rows at a time between queries and values."""
    shape = replace(block_shape("qwen2"), head_dim=64, num_heads=8, num_kv_heads=4)
    own = megatron_layout(shape, MegatronParallel(), dtype="bfloat16")
    moves = plan(
        fp8_trainer_layout(own, ()), fp8_engine_layout(sglang_layout(shape, tensor=1, dtype="bfloat16"), shape, ())
    )
    generator = torch.Generator().manual_seed(1)
    model = {name: torch.randn(spec.shape, generator=generator).bfloat16() for name, spec in own.canonical.items()}
    derived = Fp8Tensors(moves, 0, own.by_rank[0], cut(own.by_rank[0], model))
    derived.fill()
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        name = f"model.layers.0.self_attn.{projection}.weight"
        elements, scales = quantised(model[name])
        assert torch.equal(derived.tensors[name].view(torch.uint8), elements.view(torch.uint8))
        assert torch.equal(derived.tensors[name + SCALES], scales)
