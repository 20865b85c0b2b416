"""How evenly a step's work is divided over data-parallel ranks, what that takes, and how many bytes are handed over.

Lengths have a long tail: most responses are short, some reach the limit. The comparison is with micro-batches that are
filled and shared out by tokens alone, and with a step that every rank receives whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from bench.dataplane import PlaneFigure
from megarl.data.packing import MiniBatchPlan, Packing, SequenceCost, _fill_all, _share_out, plan_packs
from megarl.data.shares import make_shares
from megarl.families import PUBLIC_MODELS
from megarl.planner.flops import sequence_cost
from megarl.tokens import Content
from megarl.types import FinishReason, Rollout, TrainBatch, TrainSample

_COST = sequence_cost(PUBLIC_MODELS["qwen2.5-32b"])
_ATTENTION = SequenceCost(per_token=0.0, per_squared_token=1.0)
_MAX_TOKENS = 20_480
_PROMPT_TOKENS = 200


def measure_packing(*, num_samples: int = 16_384, data_parallel: int = 8, num_packed: int = 512) -> list[PlaneFigure]:
    """`num_packed` samples are really packed, to count bytes; the others are only planned."""
    lengths = _long_tailed(num_samples)
    step = Packing(
        data_parallel=data_parallel,
        tokens_per_micro_batch=_MAX_TOKENS + 2048,
        samples_per_update=None,
        pad_multiple=64,
        micro_batch_multiple=1,
        cost=_COST,
    )
    update = replace(step, samples_per_update=512, data_parallel=16)
    began = time.process_time()
    plans = plan_packs(lengths, step)
    seconds = time.process_time() - began
    updates = plan_packs(lengths, update)
    sizes = f"{num_samples} sequences, {data_parallel} ranks"
    return [
        PlaneFigure(
            name=f"attention of the busiest rank / mean ({sizes})",
            value=_spread(plans, lengths, _ATTENTION),
            unit="x",
            goal=1.05,
            before=_spread(_by_tokens(lengths, step), lengths, _ATTENTION),
        ),
        PlaneFigure(
            name=f"attention and weights, updates of {update.samples_per_update} on {update.data_parallel} ranks",
            value=_spread(updates, lengths, _COST),
            unit="x",
            goal=1.05,
            before=_spread(_by_tokens(lengths, update), lengths, _COST),
        ),
        PlaneFigure(name=f"plan the packs of a step from its lengths ({sizes})", value=seconds * 1e3, unit="ms"),
        _handed_over(_long_tailed(num_packed), step),
    ]


def _long_tailed(num: int) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(7.5, 1.1, num).astype(int) + _PROMPT_TOKENS
    lengths: list[int] = np.minimum(drawn, _MAX_TOKENS).tolist()
    return lengths


def _spread(plans: Sequence[MiniBatchPlan], lengths: Sequence[int], cost: SequenceCost) -> float:
    """Return the work of the busiest rank over the mean, in the worst update of a step."""
    ratios = []
    for plan in plans:
        work = [sum(cost.of([lengths[i] for members in share for i in members])) for share in plan.shares]
        ratios.append(max(work) * len(work) / sum(work))
    return max(ratios)


def _by_tokens(lengths: Sequence[int], packing: Packing) -> list[MiniBatchPlan]:
    """Fill micro-batches of equal length and share them out by tokens."""
    tokens = replace(packing, cost=SequenceCost())
    plans = []
    for plan in plan_packs(lengths, packing):
        longest_first = sorted(plan.members, key=lambda i: (-lengths[i], i))
        shares = _share_out(_fill_all(longest_first, lengths, tokens), lengths, tokens)
        plans.append(replace(plan, shares=tuple(tuple(tuple(bin_) for bin_ in share) for share in shares)))
    return plans


def _handed_over(lengths: Sequence[int], packing: Packing) -> PlaneFigure:
    """Count the bytes of all shares against those of the samples' own columns."""
    samples = [_sample(length) for length in lengths]
    stored = sum(_num_bytes(share.fill()) for share in make_shares(samples, packing, temperature=1.0))
    # Per token: its id, whether it is trained on, the engine's log-probability, its advantage.
    own = sum(lengths) * (4 + 1 + 4 + 4)
    return PlaneFigure(
        name=f"bytes handed to {packing.data_parallel} ranks per byte of a step, padding included",
        value=stored / own,
        unit="x",
        goal=1.1,
        before=packing.data_parallel * stored / own,
    )


def _num_bytes(share: TrainBatch) -> int:
    return sum(
        column.nbytes
        for mini_batch in share.mini_batches
        for item in mini_batch.micro_batches
        for field in fields(item)
        if isinstance(column := getattr(item, field.name), np.ndarray)
    )


def _sample(length: int) -> TrainSample:
    num_response = length - _PROMPT_TOKENS + 1
    return TrainSample(
        prompt_ids=np.zeros(_PROMPT_TOKENS, np.int32),
        rollout=Rollout(
            content=Content(
                token_ids=np.zeros(num_response, np.int32), logprobs=np.zeros(num_response, np.float32), text=""
            ),
            versions=np.zeros(num_response, np.int32),
            loss_mask=np.ones(num_response, np.bool_),
            finish_reason=FinishReason.STOP,
        ),
        advantages=np.zeros(num_response, np.float32),
    )
