"""GPU kernels against slow, obvious references in higher precision."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.train import long_attention
from megarl.train.attention import PackedAttention, PackedSequences
from megarl.train.logprob import token_scores, vocab_shard
from megarl.weights.algebra.slices import Slice
from megarl.weights.executors.digest import DigestSums, Summand
from megarl.weights.executors.shared_memory import export_tensors, open_tensors
from tests.weights.digests import digest

pytestmark = pytest.mark.gpu

VOCAB = 5003


def distance(found: Tensor, expected: Tensor) -> float:
    """Distance relative to the norm of the expected values."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
def test_scores_and_their_gradients(dtype: torch.dtype, tolerance: float) -> None:
    num_tokens, hidden = 777, 256
    states = torch.randn(num_tokens, hidden, device="cuda", dtype=dtype).requires_grad_()
    weight = (torch.randn(VOCAB + 61, hidden, device="cuda", dtype=dtype) * 0.2).requires_grad_()
    targets = torch.randint(VOCAB, (num_tokens,), device="cuda")
    importance = torch.randn(2, num_tokens, device="cuda")
    shard = vocab_shard(vocab=VOCAB, rows=len(weight), rank=0, size=1, group=None)
    scores = token_scores(states, weight, targets, shard=shard, temperature=0.7, max_chunk_bytes=1 << 20)
    (torch.stack([scores.logprobs, scores.entropy]) * importance).sum().backward()  # type: ignore[no-untyped-call]

    exact_states, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (states, weight))
    log_probs = (exact_states @ exact_weight[:VOCAB].t() / 0.7).log_softmax(dim=-1)
    logprobs = log_probs.gather(1, targets[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    (torch.stack([logprobs, entropy]) * importance).sum().backward()  # type: ignore[no-untyped-call]

    assert distance(scores.logprobs, logprobs) < tolerance
    assert distance(scores.entropy, entropy) < tolerance
    for found, exact in ((states, exact_states), (weight, exact_weight)):
        assert found.grad is not None
        assert exact.grad is not None
        assert distance(found.grad, exact.grad) < tolerance
    assert weight.grad is not None
    assert not weight.grad[VOCAB:].any()


@pytest.mark.parametrize("lengths", [[5, 130, 1, 64], [4096, 3, 4700]])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 2, 64), (12, 2, 128), (4, 4, 128)])
def test_packed_attention_sees_no_other_sequence(lengths: list[int], heads: int, kv_heads: int, size: int) -> None:
    num_tokens = sum(lengths)
    query = torch.randn(num_tokens, heads, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    key, value = (
        torch.randn(num_tokens, kv_heads, size, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2)
    )
    grad = torch.randn_like(query)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    attention = PackedAttention(
        config=None,
        layer_number=1,
        attn_mask_type=None,
        attention_type="self",
        cp_comm_type=None,
        softmax_scale=None,
        pg_collection=None,
    )
    found = attention(
        query,
        key,
        value,
        None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=PackedSequences(starts=starts, lengths=lengths),
    )
    inputs = (query, key, value)
    grads = torch.autograd.grad(found, inputs, grad)
    for start, length in zip(starts.tolist(), lengths, strict=False):
        part = slice(start, start + length)
        exact = [tensor[part].detach().transpose(0, 1)[None].double().requires_grad_() for tensor in inputs]
        expected = F.scaled_dot_product_attention(exact[0], exact[1], exact[2], is_causal=True, enable_gqa=True)
        assert distance(found[part], expected[0].transpose(0, 1)) < 1e-2
        for mine, right in zip(
            grads, torch.autograd.grad(expected, exact, grad[part].transpose(0, 1)[None].double()), strict=True
        ):
            # The gradients of a single token's query and key are nothing but rounding.
            if length > 1:
                assert distance(mine[part], right[0].transpose(0, 1)) < 2e-2


def test_long_sequences_are_left_to_cudnn_on_hopper() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("an older GPU")
    for heads, kv_heads, size in ((28, 4, 128), (12, 2, 128), (14, 2, 64)):
        assert long_attention.is_usable(torch.device("cuda", 0), torch.bfloat16, heads, kv_heads, size)


@pytest.mark.parametrize("shape", [(300, 2050), (5000,)])
def test_digests_of_boxes_are_those_of_the_host(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape).bfloat16()
    box = Slice(name="w", offsets=(3,) * len(shape), shape=shape)
    canonical = tuple(size + 10 for size in shape)
    assert digest(values.cuda(), box, canonical) == digest(values, box, canonical)


def test_a_strided_box_is_digested_where_it_lies() -> None:
    values = torch.randn(100, 400).bfloat16().cuda()[:, 33:97]
    box = Slice(name="w", offsets=(0, 33), shape=(100, 64))
    assert digest(values, box, (100, 400)) == digest(values.cpu(), box, (100, 400))


def answer_sums(memory: bytes, pipe: Connection) -> None:
    tensors = open_tensors(memory)
    pipe.send({name: float(tensor.double().sum()) for name, tensor in tensors.items()})
    pipe.recv()
    pipe.send({name: float(tensor.double().sum()) for name, tensor in tensors.items()})


def test_another_process_sees_the_tensors_as_they_change() -> None:
    buffer = torch.randn(1 << 20, device="cuda")
    tensors = {"a": buffer[64:128].view(8, 8), "b": buffer[1000:5000]}
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=answer_sums, args=(export_tensors(tensors), there), daemon=True)
    torch.cuda.synchronize()
    process.start()
    try:
        assert here.poll(120)
        assert here.recv() == {name: float(tensor.double().sum()) for name, tensor in tensors.items()}
        tensors["b"].fill_(2.0)
        torch.cuda.synchronize()
        here.send(None)
        assert here.poll(60)
        assert here.recv()["b"] == 8000.0
    finally:
        process.kill()
        process.join()


def test_boxes_that_are_digested_again_may_have_changed_and_moved() -> None:
    shape, boxes = (300, 512), [torch.randn(300, 512).bfloat16().cuda() for _ in range(3)]
    names = [f"w{index}" for index in range(3)]
    sums = DigestSums(
        [
            Summand(
                key=name, dtype=torch.bfloat16, box=Slice(name=name, offsets=(0, 0), shape=shape), canonical_shape=shape
            )
            for name in names
        ]
    )
    copies = [torch.empty_like(box) for box in boxes]
    first = sums.compute(boxes, copies)
    boxes[1].zero_()
    num_bytes = boxes[2].untyped_storage().nbytes()
    boxes[2].untyped_storage().resize_(0)
    blocker = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    boxes[2].untyped_storage().resize_(num_bytes)
    boxes[2].fill_(1.5)
    second = sums.compute(boxes, copies)
    assert all(torch.equal(copy, box) for copy, box in zip(copies, boxes, strict=True))
    fresh = DigestSums(sums._summands).compute([copy.clone() for copy in copies])
    assert second == fresh
    assert [first[name] == second[name] for name in names] == [True, False, False]
    del blocker
