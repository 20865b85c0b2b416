from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor

from megarl.config.roles import ActorConfig
from megarl.tokens import Content, RouteArray
from megarl.train.routing import EngineChoice, EngineRouter, chosen_map
from megarl.types import TrainSample
from tests.schedule import slow_except
from tests.tiny_models import NUM_EXPERTS
from tests.train import jobs
from tests.train.cluster import Cluster, assembled
from tests.train.conftest import Models
from tests.train.reference import Model, Reference
from tests.train.samples import make_samples
from tests.train.splits import (
    DESCENT,
    FULL,
    GRPO,
    MIXTURE_SPLITS,
    TEMPERATURE,
    TOLERANCE,
    assert_close,
    assert_same_logprobs,
    packed,
    setup_of,
    whole_weights,
)

UNKNOWN = 255
PER_TOKEN = 2
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def routed(
    samples: Sequence[TrainSample], num_layers: int, *, unknown: float = 0.0, seed: int = 0
) -> list[TrainSample]:
    """Give every sample random experts, which no router would choose, and unknown ones for a share of its tokens."""
    random = np.random.default_rng(seed)

    def routes(num_tokens: int) -> RouteArray:
        scores = random.random((num_tokens, num_layers, NUM_EXPERTS))
        chosen = scores.argsort(axis=-1)[..., :PER_TOKEN].astype(np.uint8)
        chosen[random.random(num_tokens) < unknown] = UNKNOWN
        return chosen

    return [with_routes(each, routes(len(each.prompt_ids) + each.rollout.num_tokens - 1)) for each in samples]


def with_routes(sample: TrainSample, routes: RouteArray | None) -> TrainSample:
    content = sample.rollout.content
    assert isinstance(content, Content)
    return replace(sample, rollout=replace(sample.rollout, content=replace(content, routes=routes)))


def routes_of(sample: TrainSample) -> RouteArray:
    routes = sample.rollout.content.load().routes
    assert routes is not None
    return routes


class ForcedReference(Reference):
    """The Hugging Face mixture, with the experts of a sample's routes in the place of its routers' choice."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, DESCENT, GRPO, TEMPERATURE)
        self._routes: Tensor | None = None
        self.differing = np.zeros((model.shape.num_layers, 2), np.int64)
        for index, layer in enumerate(self._model.model.layers):
            layer.mlp.gate.forward = lambda hidden, gate=layer.mlp.gate, index=index: self._route(gate, hidden, index)

    def distributions(self, sample: TrainSample) -> tuple[Tensor, Tensor]:
        routes = routes_of(sample)
        last = np.full((1, *routes.shape[1:]), UNKNOWN, routes.dtype)
        self._routes = torch.from_numpy(np.concatenate([routes, last])).long()
        return super().distributions(sample)

    def _route(self, gate: torch.nn.Module, hidden: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        assert self._routes is not None
        assert isinstance(gate.weight, Tensor)
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
        probs = logits.softmax(dim=-1)
        forced = self._routes[:, layer]
        is_known, live = (forced != UNKNOWN).all(dim=1), probs.topk(PER_TOKEN).indices
        if torch.is_grad_enabled():
            differs = (forced.sort().values != live.sort().values).any(dim=1) & is_known
            self.differing[layer] += np.array([int(differs.sum()), int(is_known.sum())])
        indices = torch.where(is_known[:, None], forced, live)
        weights = probs.gather(1, indices)
        if gate.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights, indices


@cache
def forced_update(
    model: Model, unknown: float
) -> tuple[list[TrainSample], ForcedReference, list[Tensor], tuple[float, float, float]]:
    """Return samples, the reference after an update with them, their log-probabilities before, and its numbers."""
    samples = routed(make_samples(7, vocab=model.shape.vocab), model.shape.num_layers, unknown=unknown)
    reference = ForcedReference(model)
    old = reference.logprobs(samples)
    return samples, reference, old, reference.update(samples, old)


def check_follows(model: Model, split: tuple[int, ActorConfig], cluster: Cluster, *, unknown: float) -> None:
    samples, reference, old, (loss, _, grad_norm) = forced_update(model, unknown)
    world, actor = split
    asked = packed(samples, world=world, actor=actor, budget=24, is_forward=True, has_routes=True)
    trained = packed(samples, world=world, actor=actor, budget=24, has_routes=True)

    outcomes = cluster.run(world, jobs.train, setup_of(model, actor), [asked], trained)

    assert_same_logprobs(assembled(outcome.logprobs[0] for outcome in outcomes), old)
    assert_close(whole_weights(outcomes, model, actor), reference.weights())
    known = np.concatenate([each[:, 0, 0] != UNKNOWN for each in map(routes_of, samples)])
    for stats in (outcome.stats for outcome in outcomes):
        assert stats.loss == pytest.approx(loss, abs=TOLERANCE)
        assert stats.grad_norm == pytest.approx(grad_norm, abs=TOLERANCE)
        assert stats.replayed_fraction == pytest.approx(known.mean())
        expected = {str(layer): part / whole for layer, (part, whole) in enumerate(reference.differing.tolist())}
        assert stats.routing_disagreement == pytest.approx(expected)
        assert min(expected.values()) > 0.5, "the routes are those of the model"


@pytest.mark.parametrize("split", slow_except(["TP2-SP", "EP2-DP2", "PP2-VPP2", "CP2-TP2-EP4-ETP1"], MIXTURE_SPLITS))
def test_an_update_follows_the_engines_experts_on_every_split(split: str, cluster: Cluster, models: Models) -> None:
    check_follows(models.get("qwen3_moe", tied=False), MIXTURE_SPLITS[split], cluster, unknown=0.3)


def test_weights_over_all_experts_follow_beside_a_shared_expert(cluster: Cluster, models: Models) -> None:
    check_follows(models.get("qwen2_moe", tied=False), MIXTURE_SPLITS["EP2"], cluster, unknown=0.0)


@pytest.mark.parametrize("native", [FULL, MOE], ids=["layers", "mixtures"])
def test_layers_that_are_computed_again_follow_the_same_experts(
    native: dict[str, object], cluster: Cluster, models: Models
) -> None:
    """Several micro-batches are under way on two stages: a router must not mistake one for the other."""
    model = models.get("qwen3_moe", tied=False)
    world, actor = MIXTURE_SPLITS["PP2-VPP2"]
    actor = actor.model_copy(update={"megatron": native})
    check_follows(model, (world, actor), cluster, unknown=0.3)


def test_without_routes_the_router_chooses(cluster: Cluster, models: Models) -> None:
    model = models.get("qwen3_moe", tied=False)
    samples = make_samples(4, vocab=model.shape.vocab)
    unknown = [with_routes(each, routes) for each, routes in zip(samples, (None,) * 3, strict=False)]
    unknown += routed(samples[3:], model.shape.num_layers, unknown=1.0)
    world, actor = MIXTURE_SPLITS["EP2"]
    batches = [packed(each, world=world, actor=actor, has_routes=True) for each in (samples, unknown)]
    live, followed = (cluster.run(world, jobs.train, setup_of(model, actor), [], batch) for batch in batches)
    assert live[0].stats.replayed_fraction == followed[0].stats.replayed_fraction == 0
    assert live[0].stats.routing_disagreement == followed[0].stats.routing_disagreement == {}
    for first, second in zip(live, followed, strict=True):
        for name, tensor in first.tensors.items():
            np.testing.assert_array_equal(tensor, second.tensors[name], err_msg=name)


def test_a_damaged_route_is_no_route() -> None:
    """Experts that are named twice would leave a place for one that nobody chose."""
    routes = torch.tensor([[3, 1], [2, 2], [UNKNOWN, UNKNOWN]], dtype=torch.uint8)
    chosen = chosen_map(routes, 4)
    assert chosen.tolist() == [[False, True, False, True], [False, False, True, False], [False] * 4]
    router = EngineRouter.__new__(EngineRouter)
    torch.nn.Module.__init__(router)
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 3, requires_grad=True)
    replay = EngineChoice(router=router, chosen=chosen)
    values, experts = replay.get_replay_topk(scores, 2, None, None, lambda each, k, *_: each.topk(k))
    assert experts.tolist() == [[1, 3], [0, 1], [0, 1]]
    assert values.tolist() == [[3, 1], [4, 3], [4, 3]]
    assert router.compared is not None
    assert router.compared.tolist() == [1, 1]
    (grad,) = torch.autograd.grad(values.sum(), scores)
    assert grad.tolist() == [[0, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 0]]


def test_experts_are_followed_where_a_router_chooses_among_groups() -> None:
    """A group with one chosen expert would lose against groups without any, if groups were ranked again."""
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(400, 256, generator=generator), 0.1 * torch.randn(256, generator=generator)
    choose = partial(
        topk_routing_with_score_function, topk=8, num_groups=8, group_topk=4, score_function="sigmoid", expert_bias=bias
    )
    _, engine = choose(logits)
    engine[::10] = False  # unknown
    own = logits + 0.02 * torch.randn(400, 256, generator=generator)
    router = EngineRouter.__new__(EngineRouter)
    torch.nn.Module.__init__(router)
    weights, followed = choose(own, router_replay=EngineChoice(router=router, chosen=engine))
    live_weights, live = choose(own)
    is_known = engine.any(dim=1)
    assert torch.equal(followed[is_known], engine[is_known])
    assert torch.equal(followed[~is_known], live[~is_known])
    assert torch.equal(weights[~is_known], live_weights[~is_known])
    assert torch.isfinite(weights).all()
    assert router.compared is not None
    differs = (live != engine).any(dim=1) & is_known
    assert router.compared.tolist() == [int(is_known.sum()), int(differs.sum())]
    assert 0 < differs.sum() < is_known.sum()


def test_a_router_rounds_its_logits_like_an_engine_and_weighs_in_float32() -> None:
    """Engines compute logits in the dtype of the weights; with exact ones other experts come first for some tokens."""
    generator = torch.Generator().manual_seed(0)
    router = EngineRouter.__new__(EngineRouter)
    torch.nn.Module.__init__(router)
    weight = torch.randn(128, 64, generator=generator).bfloat16()
    router.weight, router.bias = torch.nn.Parameter(weight), None
    router.config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
    tokens = torch.randn(400, 64, generator=generator).bfloat16()
    logits = router.gating(tokens)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, F.linear(tokens, weight).float())
    chosen, exact = (values.topk(8).indices.sort().values for values in (logits, tokens.float() @ weight.float().t()))
    assert 0 < (chosen != exact).any(dim=1).float().mean() < 0.5
