"""Plans of two large publishes, made as every process of such a run makes them; `python -m bench plan` times them.

Pure: a plan needs no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.families import PUBLIC_MODELS
from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES, buckets_from, buckets_to
from megarl.weights.algebra.plan import Plan, plan
from megarl.weights.algebra.slices import on_gpus
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout

_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LargePublish:
    model: str
    parallel: MegatronParallel
    tensor: int
    expert: int
    num_engines: int

    def plan(self) -> Plan:
        shape = PUBLIC_MODELS[self.model]
        target = sglang_layout(
            shape, tensor=self.tensor, expert=self.expert, num_engines=self.num_engines, dtype="bfloat16"
        )
        num_trainers, num_targets = self.parallel.world_size, len(target.holdings)
        gpus = [divmod(rank, _GPUS_PER_NODE) for rank in range(num_trainers)]
        first_node = -(-num_trainers // _GPUS_PER_NODE)
        others = [(first_node + rank // _GPUS_PER_NODE, rank % _GPUS_PER_NODE) for rank in range(num_targets)]
        source = megatron_layout(shape, self.parallel, dtype="bfloat16")
        return plan(source, target, locations=on_gpus(gpus, others))


PUBLISHES: Mapping[str, LargePublish] = {
    "70B, TP8 x PP4 x DP16 to 64 engines of TP4": LargePublish(
        model="llama-3.1-70b",
        parallel=MegatronParallel(tensor=8, pipeline=4, data=16),
        tensor=4,
        expert=1,
        num_engines=64,
    ),
    "235B, TP4 x PP8 x EP16 to 4 engines of EP32": LargePublish(
        model="qwen3-235b-a22b",
        parallel=MegatronParallel(
            tensor=4,
            pipeline=8,
            data=16,
            expert=16,
            expert_tensor=1,
            # 94 layers: the 72 between the first and the last stage divide by six stages.
            first_stage_layers=11,
            last_stage_layers=11,
        ),
        tensor=32,
        expert=32,
        num_engines=4,
    ),
}


def rehearse(name: str) -> str:
    """Make everything that a process needs before it takes part: layouts, plan, statistics, its own buckets. Return
    the plan's hash."""
    publish_plan = PUBLISHES[name].plan()
    assert publish_plan.traffic.bytes_by_link, "nothing moves"
    buckets_from(publish_plan, 0, bucket_bytes=DEFAULT_BUCKET_BYTES)
    buckets_to(publish_plan, 0, bucket_bytes=DEFAULT_BUCKET_BYTES)
    return publish_plan.hash
