from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.train.logprob import Places, token_scores, vocab_shard
from megarl.types import FloatArray
from tests.train.cluster import Cluster
from tests.train.jobs import ScoreInputs, ScoreOutcome, score_vocab_shards

TOLERANCE = 1e-6
NUM_TOKENS, HIDDEN, VOCAB = 13, 8, 99


def make_inputs(rows: int) -> ScoreInputs:
    random = np.random.default_rng(0)
    weight = random.standard_normal((rows, HIDDEN)) * 0.5
    weight[VOCAB:] = 100.0  # padding that would show
    return ScoreInputs(
        hidden=random.standard_normal((NUM_TOKENS, HIDDEN)).astype(np.float32),
        weight=weight.astype(np.float32),
        targets=random.integers(0, VOCAB, NUM_TOKENS),
        importance=random.standard_normal((2, NUM_TOKENS)).astype(np.float32),
        vocab=VOCAB,
        temperature=0.7,
    )


def naive(inputs: ScoreInputs) -> ScoreOutcome:
    """Scores and gradients with all logits at once, in double precision."""
    hidden = torch.tensor(inputs.hidden, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor(inputs.weight, dtype=torch.float64, requires_grad=True)
    log_probs = (hidden @ weight[:VOCAB].t() / inputs.temperature).log_softmax(dim=-1)
    logprobs = log_probs.gather(1, torch.tensor(inputs.targets)[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    (torch.stack([logprobs, entropy]) * torch.tensor(inputs.importance)).sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert weight.grad is not None
    return ScoreOutcome(
        logprobs=logprobs.detach().numpy(),
        entropy=entropy.detach().numpy(),
        grad_hidden=hidden.grad.numpy(),
        grad_weight=weight.grad.numpy(),
    )


def assert_close(found: FloatArray, expected: FloatArray) -> None:
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_equals_the_naive_computation_forward_and_backward(chunk_tokens: int) -> None:
    inputs = make_inputs(rows=128)
    hidden = torch.tensor(inputs.hidden, requires_grad=True)
    weight = torch.tensor(inputs.weight, requires_grad=True)
    scores = token_scores(
        hidden,
        weight,
        torch.tensor(inputs.targets),
        shard=vocab_shard(vocab=VOCAB, rows=128, rank=0, size=1, group=None),
        temperature=inputs.temperature,
        max_chunk_bytes=4 * len(weight) * chunk_tokens,
    )
    (torch.stack(scores[:2]) * torch.tensor(inputs.importance)).sum().backward()  # type: ignore[no-untyped-call]

    expected = naive(inputs)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert_close(scores.logprobs.detach().numpy(), expected.logprobs)
    assert_close(scores.entropy.detach().numpy(), expected.entropy)
    assert_close(hidden.grad.numpy(), expected.grad_hidden)
    assert_close(weight.grad.numpy(), expected.grad_weight)


def test_a_vocabulary_split_over_ranks_gives_the_same(cluster: Cluster) -> None:
    inputs = make_inputs(rows=192)  # 64 per rank: the last rank has only padding
    expected = naive(inputs)
    outcomes = cluster.run(3, score_vocab_shards, inputs)
    for outcome in outcomes:
        assert_close(outcome.logprobs, expected.logprobs)
        assert_close(outcome.entropy, expected.entropy)
    assert_close(np.sum([outcome.grad_hidden for outcome in outcomes], axis=0), expected.grad_hidden)
    assert_close(np.concatenate([outcome.grad_weight for outcome in outcomes]), expected.grad_weight)


@pytest.mark.parametrize("places", [[1, 4, 5, 9], [], list(range(12))])
def test_scores_of_some_positions_are_those_of_all_and_others_cost_no_logits(places: list[int]) -> None:
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(VOCAB, 8, generator=random)
    states, targets = torch.randn(12, 8, generator=random), torch.randint(VOCAB, (12,), generator=random)
    shard = vocab_shard(vocab=VOCAB, rows=VOCAB, rank=0, size=1, group=None)
    chosen = torch.tensor(places, dtype=torch.int64)
    is_chosen = torch.zeros(12, dtype=torch.bool).index_fill(0, chosen, value=True)

    def scored(at: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        hidden, head = states.clone().requires_grad_(), weight.clone().requires_grad_()
        scores = token_scores(
            hidden,
            head,
            targets,
            shard=shard,
            temperature=0.7,
            scored=Places.of(at, None),
            max_chunk_bytes=4 * VOCAB * 3,
        )
        loss = torch.where(is_chosen, scores.logprobs + 0.3 * scores.entropy, 0.0).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        assert head.grad is not None
        return scores.logprobs.detach(), scores.entropy.detach(), hidden.grad, head.grad

    for all_of_them, some in zip(scored(None), scored(chosen), strict=True):
        if all_of_them.dim() == 1:
            assert not some[~is_chosen].any()
            all_of_them = torch.where(is_chosen, all_of_them, 0.0)
        torch.testing.assert_close(some, all_of_them)


def test_logits_far_apart_neither_overflow_nor_lose_the_target() -> None:
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    shard = vocab_shard(vocab=3, rows=3, rank=0, size=1, group=None)
    scores = token_scores(hidden, weight, torch.tensor([0, 0]), shard=shard, temperature=1.0)
    assert scores.logprobs.tolist() == [0.0, -600.0]
    assert scores.entropy.tolist() == [0.0, 0.0]
    scores.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_float32_logits_are_not_rounded_and_their_gradients_are_as_before() -> None:
    """The weights of a GPU, in bfloat16, whose logits have three digits unless they stay in float32."""
    inputs = make_inputs(rows=128)

    def scored(*, has_float32_logits: bool) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tensor(inputs.hidden, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.tensor(inputs.weight, dtype=torch.bfloat16)
        scores = token_scores(
            hidden,
            weight,
            torch.tensor(inputs.targets),
            shard=vocab_shard(vocab=VOCAB, rows=128, rank=0, size=1, group=None),
            temperature=inputs.temperature,
            has_float32_logits=has_float32_logits,
            max_chunk_bytes=4 * 128 * 4,
        )
        scores.logprobs.sum().backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        assert hidden.grad.dtype == torch.bfloat16
        return scores.logprobs.detach(), hidden.grad

    rounded = replace(
        inputs,
        hidden=torch.tensor(inputs.hidden).bfloat16().float().numpy(),
        weight=torch.tensor(inputs.weight).bfloat16().float().numpy(),
        importance=np.stack([np.ones(NUM_TOKENS, np.float32), np.zeros(NUM_TOKENS, np.float32)]),
    )
    expected = naive(rounded)
    (exact, gradient), (coarse, _) = scored(has_float32_logits=True), scored(has_float32_logits=False)
    assert_close(exact.numpy(), expected.logprobs.astype(np.float32))
    assert np.abs(coarse.numpy() - expected.logprobs).max() > 1e-3
    np.testing.assert_allclose(gradient.float().numpy(), expected.grad_hidden, atol=0.02)
