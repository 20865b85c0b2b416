"""Losses, aggregations and corrections that look at whole sequences, on real ranks: no split changes the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.algo.algorithm import build_algorithm
from megarl.algo.loss import PolicyTokens, Segments
from megarl.algo.objective import actor_loss
from megarl.config.algorithm import (
    AlgorithmConfig,
    CispoLossConfig,
    DpoConfig,
    GmpoLossConfig,
    GpgLossConfig,
    GroupConfig,
    GrpoConfig,
    GspoLossConfig,
    IcepopConfig,
    KlLossConfig,
    KlRewardConfig,
    MaskConfig,
    MismatchConfig,
    OnlineDpoConfig,
    RewardModelConfig,
    SapoLossConfig,
    SpinConfig,
    SppoConfig,
    TisConfig,
)
from megarl.types import Estimates, FloatArray, ScoredGroup, TrainSample
from tests.algo.groups import scored_group
from tests.schedule import slow_except
from tests.train import jobs
from tests.train.cluster import Cluster, assembled
from tests.train.conftest import Models
from tests.train.reference import Model, adamw, checkpoint_weights
from tests.train.samples import make_samples
from tests.train.splits import DESCENT, SPLITS, TEMPERATURE, assert_close, packed, setup_of, whole_weights

INVARIANCE = 1e-6
"""Tolerance of losses and gradients; with the settings of `test_rank` a weight changes by its gradient."""

SUMMED = 5e-6
"""Tolerance of a loss that squares the sum over a sequence: the rounding errors of its tokens add up."""

DIVISIONS = {"TP1": 400, "DP2": 20, "TP2-SP": 30, "PP2": 24, "CP2": 20}
"""Splits, and tokens of a micro-batch."""


def divisions(place: int) -> tuple[str, str, str]:
    """One rank, two that share sequences, and one of the other splits in turn."""
    return "TP1", "CP2", ("DP2", "TP2-SP", "PP2")[place % 3]


ALGORITHMS: dict[str, AlgorithmConfig] = {
    "gspo": GrpoConfig(
        kind="grpo",
        loss=GspoLossConfig(kind="gspo"),
        aggregation="seq_mean_token_mean",
        correction=TisConfig(kind="tis", level="sequence", max_weight=50.0),
    ),
    "gmpo": GrpoConfig(
        kind="grpo",
        loss=GmpoLossConfig(kind="gmpo"),
        aggregation="seq_mean_token_mean",
        correction=IcepopConfig(kind="icepop", min_weight=0.2),
    ),
    "sapo": GroupConfig(
        kind="rloo",
        loss=SapoLossConfig(kind="sapo"),
        aggregation="seq_mean_token_sum_norm",
        horizon_tokens=12,
        correction=TisConfig(kind="tis"),
        entropy_coef=0.1,
    ),
    "cispo": GrpoConfig(
        kind="grpo",
        loss=CispoLossConfig(kind="cispo"),
        aggregation="seq_mean_token_sum",
        correction=MaskConfig(kind="mask", level="sequence", measure="k2", highest=2.0),
        kl=KlLossConfig(kind="loss", coef=0.2),
    ),
    "gpg": GrpoConfig(kind="grpo", loss=GpgLossConfig(kind="gpg"), aggregation="token_sum", entropy_coef=0.01),
}
SPPO = SppoConfig(kind="sppo", correction=TisConfig(kind="tis", max_weight=5.0))


@pytest.mark.parametrize("name", slow_except(["gspo", "gmpo"], ALGORITHMS))
def test_an_update_does_not_depend_on_ranks_or_micro_batches(name: str, cluster: Cluster, models: Models) -> None:
    model = models.get("qwen2", tied=False)
    samples = [_with_reference(sample) for sample in make_samples(8, vocab=model.shape.vocab, seed=5)]
    found = []
    for split in divisions([*ALGORITHMS].index(name)):
        world, actor = SPLITS[split]
        # Two updates: in the second one the ratios are no longer 1.
        batch = packed(samples, world=world, actor=actor, budget=DIVISIONS[split], per_update=4)
        outcomes = cluster.run(world, jobs.train, setup_of(model, actor, ALGORITHMS[name]), [], batch)
        found.append((outcomes[0].stats, whole_weights(outcomes, model, actor)))
    (expected, weights), *others = found
    assert 0 < expected.effective_sample_ratio < 1
    for stats, of_split in others:
        for field in (
            "loss",
            "grad_norm",
            "mismatch_kl",
            "mismatch_k3",
            "effective_sample_ratio",
            "rejected_fraction",
            "reference_kl",
        ):
            value = getattr(expected, field) or 0.0
            assert (getattr(stats, field) or 0.0) == pytest.approx(value, rel=INVARIANCE, abs=INVARIANCE), field
        assert stats.mismatch_chi2 == pytest.approx(expected.mismatch_chi2, rel=1e-4)
        assert_close(of_split, weights, tolerance=INVARIANCE)
    assert not any(torch.isnan(tensor).any() for tensor in weights.values())


def test_splits_of_sppo_differ_from_double_precision_only_by_rounding(cluster: Cluster, models: Models) -> None:
    """The tolerance of `SUMMED` is one of float32: one rank alone is as far from the exact update as any split is."""
    model = models.get("qwen2", tied=False)
    samples = make_samples(8, vocab=model.shape.vocab, seed=5)
    loss, grad_norm, weights = _exact_updates(model, samples)
    errors = {}
    for split in ("TP1", "DP2", "CP2"):
        world, actor = SPLITS[split]
        batch = packed(samples, world=world, actor=actor, budget=DIVISIONS[split], per_update=4)
        outcomes = cluster.run(world, jobs.train, setup_of(model, actor, SPPO), [], batch)
        stats, found = outcomes[0].stats, whole_weights(outcomes, model, actor)
        errors[split] = max(
            abs(stats.loss / loss - 1),
            abs(stats.grad_norm / grad_norm - 1),
            *(float((found[name].double() - tensor).abs().max()) for name, tensor in weights.items()),
        )
    assert max(errors.values()) < SUMMED, errors
    assert max(errors.values()) < 10 * errors["TP1"], errors


def _exact_updates(model: Model, samples: Sequence[TrainSample]) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Take the two updates of `sppo` in double precision, with the model of transformers; return the means of loss and
    gradient norm, and the weights."""
    exact = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float64, attn_implementation="eager")
    exact.model.embed_tokens.padding_idx = None
    parameters = list(exact.parameters())
    adam = adamw(parameters, DESCENT)

    def logprobs(sample: TrainSample) -> torch.Tensor:
        ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.rollout.token_ids.tolist()])
        num_response = len(sample.rollout.token_ids)
        scores = (exact(ids[None]).logits[0, -num_response - 1 : -1] / TEMPERATURE).log_softmax(dim=-1)
        chosen: torch.Tensor = scores.gather(1, ids[-num_response:, None])[:, 0]
        return chosen

    old = [logprobs(sample).detach() for sample in samples]
    losses, norms = [], []
    for first in (0, 4):
        members = samples[first : first + 4]
        masks = torch.from_numpy(np.concatenate([sample.rollout.loss_mask for sample in members]))
        lengths = [len(sample.advantages) for sample in members]
        tokens = PolicyTokens(
            logprobs=torch.cat([logprobs(sample) for sample in members]),
            entropy=torch.zeros(sum(lengths), dtype=torch.float64),
            old_logprobs=torch.cat(old[first : first + 4]),
            rollout_logprobs=_joined([sample.rollout.logprobs for sample in members]),
            advantages=_joined([sample.advantages for sample in members]),
            segments=Segments.of(masks, torch.tensor([0, *np.cumsum(lengths).tolist()])),
        )
        loss = actor_loss(SPPO, tokens, num_loss_tokens=int(masks.sum()), num_sequences=4).value
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, DESCENT.clip_grad_norm)))
        adam.step()
        losses.append(loss.item())
    return float(np.mean(losses)), float(np.mean(norms)), checkpoint_weights(exact)


def _joined(arrays: Sequence[FloatArray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)).double()


PREFERENCES: dict[str, AlgorithmConfig] = {
    "dpo": DpoConfig(kind="dpo"),
    "ipo": DpoConfig(kind="dpo", preference="ipo", kl=KlRewardConfig(kind="reward", coef=1.0)),
    "simpo": DpoConfig(kind="dpo", preference="simpo", kl=None),
    "online_dpo": OnlineDpoConfig(kind="online_dpo"),
    "spin": SpinConfig(kind="spin"),
    "reward_model": RewardModelConfig(kind="reward_model"),
}


@pytest.mark.parametrize("name", slow_except(["dpo", "reward_model"], PREFERENCES))
def test_pairs_do_not_depend_on_ranks_or_micro_batches(name: str, cluster: Cluster, models: Models) -> None:
    """Margins of the pairs by the log-probabilities of a rank, and the update that follows from them."""
    model, config = models.get("qwen2", tied=False), PREFERENCES[name]
    if isinstance(config, RewardModelConfig):
        model = replace(model, shape=model.shape.as_critic())
    samples = [_with_reference(sample) for sample in make_samples(6, vocab=model.shape.vocab, seed=5)]
    groups = _groups(samples, [1.0, 0.0] if isinstance(config, DpoConfig | RewardModelConfig) else [1.0, 0.0, 0.5])
    algorithm = build_algorithm(config, max_response_tokens=12)
    found = []
    for split in divisions([*PREFERENCES].index(name)):
        world, actor = SPLITS[split]
        setup = setup_of(model, actor, config)
        pack = partial(packed, world=world, actor=actor, budget=DIVISIONS[split])
        if split == "TP1":
            logprobs = assembled(cluster.run(world, jobs.score, setup, pack(samples)), data_parallel=1)
            credited = algorithm.assign(groups, _estimates(samples, logprobs))
        outcomes = cluster.run(world, jobs.train, setup, [], pack(credited))
        found.append((outcomes[0].stats, whole_weights(outcomes, model, actor)))
    (expected, weights), *others = found
    assert algorithm.pairs is not None
    assert expected.grad_norm > 0
    for stats, of_split in others:
        assert stats.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-5)
        assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert_close(of_split, weights, tolerance=1e-5)


def test_a_refreshed_reference_is_the_policy(cluster: Cluster, models: Models) -> None:
    model = models.get("qwen2", tied=False)
    world, actor = SPLITS["TP2-SP"]
    samples = make_samples(4, vocab=model.shape.vocab)
    batch = packed(samples, world=world, actor=actor)
    found = cluster.run(world, jobs.refresh, setup_of(model, actor), batch)
    policy, before, after = (np.concatenate(assembled(parts)) for parts in zip(*found, strict=True))
    assert np.abs(policy - before).max() > 1e-3
    assert after.tolist() == policy.tolist()


def _groups(samples: Sequence[TrainSample], scores: list[float]) -> list[ScoredGroup]:
    """Return groups of samples with these scores each."""
    group, size = scored_group(0, scores), len(scores)
    return [
        replace(
            group, group=replace(group.group, rollouts=tuple(each.rollout for each in samples[first : first + size]))
        )
        for first in range(0, len(samples), size)
    ]


def _estimates(samples: Sequence[TrainSample], logprobs: Sequence[FloatArray]) -> Estimates:
    references = [sample.reference_logprobs for sample in samples if sample.reference_logprobs is not None]
    return Estimates(logprobs=tuple(logprobs), reference_logprobs=tuple(references))


def _with_reference(sample: TrainSample) -> TrainSample:
    """Return samples whose reference log-probabilities differ a little from the engine's."""
    shifts = np.linspace(-0.5, 0.5, len(sample.advantages), dtype=np.float32)
    return replace(sample, reference_logprobs=sample.rollout.logprobs + shifts)


def test_a_mismatch_that_stops_the_run_changes_no_weight(cluster: Cluster, models: Models) -> None:
    model = models.get("qwen2", tied=False)
    world, actor = SPLITS["PP2"]
    batch = packed(make_samples(4, vocab=model.shape.vocab), world=world, actor=actor)
    strict = GrpoConfig(kind="grpo", mismatch=MismatchConfig(warn_above=1e-5, act_above=1e-4, action="stop"))
    setup = setup_of(model, actor, strict)
    for _, message, is_unchanged in cluster.run(world, jobs.update_until_error, setup, [batch]):
        assert message.startswith("mean |p_train - p_rollout| is 0.0")
        assert is_unchanged


def test_a_mismatch_is_told_with_the_result(cluster: Cluster, models: Models) -> None:
    model = models.get("qwen2", tied=False)
    world, actor = SPLITS["DP2"]
    batch = packed(make_samples(4, vocab=model.shape.vocab), world=world, actor=actor)
    watched = GrpoConfig(kind="grpo", mismatch=MismatchConfig(warn_above=1e-5, act_above=1e-4, action="correct"))
    for outcome in cluster.run(world, jobs.train, setup_of(model, actor, watched), [], batch):
        (warning,) = outcome.result.warnings
        assert warning.endswith("correcting with tis from the next step on")
