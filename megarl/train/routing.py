"""The router of a mixture, and how it follows the experts that an engine chose (routing replay).

Rounding alone sends some tokens to other experts than the engine did, more with every layer; ratios of such tokens are
noise. Only the choice is replayed: a token's weights come from the trainer's own logits and have their gradients.

A layer turns the routes of its tokens into a map of chosen experts and passes it on in the place of Megatron's padding
mask, which nothing else uses here. The map is an argument of every call: it is the right one when Megatron computes
a layer or a mixture a second time, when several micro-batches are under way, and in passes without gradients, all of
which mislead the lists of Megatron's own `RouterReplay`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.routes import PackedRoutes
from megarl.train.topology import Topology
from megarl.types import MicroBatch, TrainBatch

TopK = Callable[..., tuple[Tensor, Tensor]]
"""(scores [N, experts], number, groups, groups of a token) -> values and experts [N, number]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRoutes:
    """The routes of this rank's tokens. They stay on the host until a layer runs: a step has many."""

    packed: PackedRoutes
    tokens: npt.NDArray[np.int64]
    """This rank's positions of the pack, in its order."""

    def of_layer(self, number: int, device: torch.device) -> Tensor:
        """Return the experts of each token; `number` is Megatron's, from 1. [N, experts of a token]"""
        routes = self.packed.of_layers(number - 1, number)[self.tokens, 0]
        # torch has few operations for uint16.
        return torch.from_numpy(routes if routes.dtype == np.uint8 else routes.astype(np.int32)).to(device)


def rank_routes(packed: PackedRoutes, own: npt.NDArray[np.int64] | slice, topology: Topology) -> RankRoutes:
    """Return the routes of the positions `own`, of which tensor-parallel ranks of a mixture have equal parts."""
    tokens = np.arange(packed.num_tokens)[own]
    return RankRoutes(packed=packed, tokens=np.split(tokens, topology.tensor)[topology.tensor_rank])


class MixtureLayer(TransformerLayer):
    """A layer whose router follows the routes in `packed_seq_params`, where there are some."""

    def forward(self, *arguments: Tensor, **named: object) -> tuple[Tensor, Tensor | None]:
        routes: RankRoutes | None = getattr(named["packed_seq_params"], "routes", None)
        if routes is not None:
            chosen = routes.of_layer(self.layer_number, self.mlp.router.weight.device)
            named["padding_mask"] = chosen_map(chosen, self.config.num_moe_experts)[None]
        output: tuple[Tensor, Tensor | None] = super().forward(*arguments, **named)
        return output


def chosen_map(routes: Tensor, num_experts: int) -> Tensor:
    """Return which experts were chosen for each token; none where they are unknown. [N, experts], bool"""
    chosen = torch.zeros(len(routes), num_experts + 1, dtype=torch.bool, device=routes.device)
    return chosen.scatter_(1, routes.long().clamp(max=num_experts), True)[:, :num_experts]


class EngineRouter(TopKRouter):
    """Routes as engines do: by logits that are rounded like theirs, and to the experts that they chose, if known."""

    compared: Tensor | None = None
    """[2], int64: tokens that followed an engine with gradients, and how many of them had gone elsewhere by
    themselves."""

    # Megatron's own gate calls a kernel of Transformer Engine by a name that is only defined where that is installed:
    # https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/moe/moe_utils.py
    def gating(self, input: Tensor) -> Tensor:
        """Return logits in float32 that are rounded to the dtype of the weights, as engines round them.

        Exact ones would put other experts first wherever two logits are closer than the rounding.
        """
        if self.config.moe_router_dtype == "fp32":
            # As some engines compute them.
            return F.linear(input.float(), self.weight.float())
        return F.linear(input, self.weight, self.bias).float()

    def forward(self, input: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`chosen` has a map of the engine's experts, [N, 1, experts]."""
        # Megatron asks this attribute for the experts, and for nothing else.
        self.router_replay = None if chosen is None else EngineChoice(router=self, chosen=chosen.flatten(0, 1))
        try:
            routed: tuple[Tensor, Tensor] = super().forward(input)
        finally:
            self.router_replay = None
        return routed

    def count(self, counts: Tensor) -> None:
        self.compared = counts if self.compared is None else self.compared + counts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The choice of experts in one pass through a router, in the place of Megatron's `RouterReplay`."""

    router: EngineRouter
    chosen: Tensor  # [N, experts], bool

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute: TopK
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and numbers of the engine's experts, and of the best ones where those are unknown."""
        is_routed = self.chosen.sum(dim=1) == topk
        with torch.no_grad():
            _, best = compute(scores, topk, num_groups, group_topk)
            # Without groups: one that has a single chosen expert would lose against others that have none.
            engine = scores.masked_fill(~self.chosen, float("-inf")).topk(topk, dim=1).indices
            followed = torch.where(is_routed[:, None], engine, best)
        # Once per token of an update: layers that are recomputed run without gradients before.
        if torch.is_grad_enabled():
            differs = is_routed & ~self.chosen.gather(1, best).all(dim=1)
            self.router.count(torch.stack([is_routed.sum(), differs.sum()]))
        return scores.gather(1, followed), followed


class RoutingStats(TypedDict):
    """Fields of `results.UpdateStats`."""

    replayed_fraction: float
    routing_disagreement: dict[str, float]


def routing_stats(
    chunks: Sequence[torch.nn.Module], batch: TrainBatch, num_layers: int, topology: Topology
) -> RoutingStats:
    """Return the statistics of the routers since the last call. Every rank calls it, after the updates of a batch."""
    counts = torch.zeros(2, num_layers + 1, dtype=torch.int64, device=topology.device)
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, EngineRouter) and module.compared is not None:
                counts[:, module.layer_number] += module.compared
                module.compared = None
    if topology.returns_columns:
        packs = [each for mini_batch in batch.mini_batches for each in mini_batch.micro_batches]
        counts[0, 0] = sum(_num_positions(each) for each in packs)
        counts[1, 0] = sum(int(each.routes.are_known().sum()) for each in packs if each.routes is not None)
    for group in (topology.tensor_group, topology.replica_group, topology.pipeline_group):
        dist.all_reduce(counts, group=group)
    (num_positions, *followed), (num_known, *differing) = counts.tolist()
    pairs = zip(differing, followed, strict=True)
    return RoutingStats(
        replayed_fraction=num_known / max(num_positions, 1),
        routing_disagreement={str(layer): part / whole for layer, (part, whole) in enumerate(pairs) if whole},
    )


def _num_positions(micro_batch: MicroBatch) -> int:
    """Return the positions of its sequences, without padding."""
    lengths = micro_batch.response_ends - micro_batch.sequence_starts[:-1]
    return int(lengths[micro_batch.sample_ids >= 0].sum())
