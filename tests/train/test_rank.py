from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.config.algorithm import AlgorithmConfig, SftConfig
from megarl.config.roles import ActorConfig
from tests.schedule import slow, slow_except
from tests.tiny_models import write_tiny_model
from tests.train import jobs
from tests.train.cluster import Cluster, assembled
from tests.train.conftest import Models
from tests.train.reference import Model, Reference
from tests.train.samples import make_samples
from tests.train.splits import (
    CONTEXT_SPLITS,
    DESCENT,
    FULL,
    GRPO,
    MIXTURE_SPLITS,
    SELECTIVE,
    SPLITS,
    TEMPERATURE,
    TOLERANCE,
    assert_close,
    assert_same_logprobs,
    packed,
    setup_of,
    whole_weights,
)

References = dict[Path, tuple[list[Tensor], tuple[float, float, float], dict[str, Tensor]]]


@pytest.fixture(scope="session")
def references() -> References:
    """Results of the Hugging Face model, computed once per model."""
    return {}


def in_turns() -> Iterator[ParameterSet]:
    """Every family and split, with tied and untied embeddings in turn; slow where another family shows the same."""
    shown = {"llama": {"TP2-PP2"}, "qwen2": {"TP1", "DP2", "PP2-VPP2", "CP2"}, "qwen3": {"TP2-SP"}}
    shown |= {"mistral": set(), "phi3": {"TP2"}}
    for place, (family, needed) in enumerate(shown.items()):
        for number, split in enumerate(SPLITS):
            tied = (place + number) % 2 == 1
            marks = () if split in needed else pytest.mark.slow
            yield pytest.param(family, tied, split, marks=marks, id=f"{family}-{'' if tied else 'un'}tied-{split}")


@pytest.mark.parametrize(("family", "tied", "split"), in_turns())
def test_equals_the_hugging_face_model_for_every_split(
    family: str, tied: bool, split: str, cluster: Cluster, models: Models, references: References
) -> None:
    check_equals_hugging_face(models.get(family, tied=tied), SPLITS[split], cluster, references)


@pytest.mark.parametrize("split", slow_except(["CP4", "CP2-TP2-SP"], CONTEXT_SPLITS))
def test_context_parallel_equals_the_hugging_face_model_beside_every_other_split(
    split: str, cluster: Cluster, models: Models, references: References
) -> None:
    check_equals_hugging_face(models.get("qwen2", tied=True), CONTEXT_SPLITS[split], cluster, references)


def test_yarn_equals_the_hugging_face_model_on_ranks_that_share_sequences(
    cluster: Cluster, references: References, tmp_path: Path
) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
    shape = write_tiny_model(tmp_path / "yarn", "qwen3", rope=yarn)
    assert shape.rope_scaling is not None
    assert shape.rope_scaling.factor == 4.0
    check_equals_hugging_face(Model(folder=tmp_path / "yarn", shape=shape), SPLITS["CP2"], cluster, references)


@pytest.mark.parametrize(
    ("family", "split"),
    [
        # tests/train/test_routing.py has the other splits.
        ("qwen3_moe", "CP2-EP2"),
        *[("qwen2_moe", split) for split in ("PP2-VPP2", "TP2-EP2-ETP1")],
        *slow(*[("qwen3_moe", split) for split in ("TP1", "TP2-EP2-ETP1")]),
        *slow(*[("qwen2_moe", split) for split in ("TP2-SP", "CP2-EP2")]),
        ("mixtral", "TP2-EP2-ETP1"),
    ],
)
def test_a_mixture_equals_the_hugging_face_model(
    family: str, split: str, cluster: Cluster, models: Models, references: References
) -> None:
    model = models.get(family, tied=False)
    if family == "qwen2_moe":
        assert model.shape.experts is not None
        assert model.shape.experts.shared > 0
        assert not model.shape.experts.is_normalized
    check_equals_hugging_face(model, MIXTURE_SPLITS[split], cluster, references)


@pytest.mark.parametrize(
    ("family", "split", "fields"),
    [
        ("qwen3", "TP1", SELECTIVE),
        ("qwen3", "TP2-SP", FULL),
        ("qwen3", "PP2-VPP2", FULL),
        ("qwen3", "PP2-VPP2", SELECTIVE),
        ("qwen3_moe", "TP2-EP2-ETP1", FULL),
    ],
)
def test_recomputed_activations_give_the_same_update(
    family: str, split: str, fields: dict[str, object], cluster: Cluster, models: Models, references: References
) -> None:
    world, actor = (SPLITS | MIXTURE_SPLITS)[split]
    recomputing = actor.model_copy(update={"megatron": fields})
    check_equals_hugging_face(models.get(family, tied=False), (world, recomputing), cluster, references)


def check_equals_hugging_face(
    model: Model, split: tuple[int, ActorConfig], cluster: Cluster, references: References
) -> None:
    samples = make_samples(7, vocab=model.shape.vocab)
    if model.folder not in references:
        reference = Reference(model, DESCENT, GRPO, TEMPERATURE)
        old = reference.logprobs(samples)
        references[model.folder] = (old, reference.update(samples, old), reference.weights())
    logprobs, (loss, entropy, grad_norm), weights = references[model.folder]
    world, actor = split
    smallest = 20 if actor.context < 4 else 24  # a whole sequence with its padding
    asked = [packed(samples, world=world, actor=actor, budget=budget, is_forward=True) for budget in (smallest, 64)]
    trained = packed(samples, world=world, actor=actor, budget=smallest)

    outcomes = cluster.run(world, jobs.train, setup_of(model, actor), asked, trained)

    for place in range(len(asked)):
        parts = [outcome.logprobs[place] for outcome in outcomes]
        assert_same_logprobs(assembled(parts, data_parallel=world // actor.model_parallel), logprobs)
    for outcome in outcomes:
        stats = outcome.stats
        assert stats.loss == pytest.approx(loss, abs=TOLERANCE)
        assert stats.entropy == pytest.approx(entropy, abs=TOLERANCE)
        assert stats.grad_norm == pytest.approx(grad_norm, abs=TOLERANCE)
        assert grad_norm > DESCENT.clip_grad_norm, "nothing was clipped"
    assert_close(whole_weights(outcomes, model, actor), weights)


def test_fields_that_megatron_refuses_together_are_the_recipes_mistake(cluster: Cluster, models: Models) -> None:
    model = models.get("llama", tied=False)
    actor = ActorConfig(pool="train", megatron={**SELECTIVE, "recompute_modules": ["moe_act"]})
    (message,) = cluster.run(1, jobs.fail_to_start, setup_of(model, actor))
    assert message.startswith("roles.actor.megatron: Megatron refuses {'recompute_granularity': 'selective', ")


def test_fewer_kv_heads_than_ranks_and_ranks_that_hold_only_vocabulary_padding(
    cluster: Cluster, models: Models
) -> None:
    model = models.get("qwen3", tied=False)
    actor = ActorConfig(pool="train", tensor=4, is_sequence_parallel=True)
    assert model.shape.num_kv_heads < actor.tensor
    samples = make_samples(5, vocab=model.shape.vocab, seed=1)
    reference = Reference(model, DESCENT, GRPO, TEMPERATURE)
    old = reference.logprobs(samples)
    reference.update(samples, old)
    batch = packed(samples, world=4, actor=actor)

    outcomes = cluster.run(4, jobs.train, setup_of(model, actor), [batch], batch)

    assert_same_logprobs(assembled(outcome.logprobs[0] for outcome in outcomes), old)
    assert_close(whole_weights(outcomes, model, actor), reference.weights())


@pytest.mark.parametrize(
    ("algorithm", "divisions"),
    [(SftConfig(kind="sft"), [(1, 20), (1, 200), (2, 24)]), (GRPO, [(1, 200), (3, 30)])],
    ids=["sft", "grpo"],
)
def test_an_update_does_not_depend_on_the_packing(
    algorithm: AlgorithmConfig, divisions: list[tuple[int, int]], cluster: Cluster, models: Models
) -> None:
    model = models.get("qwen2", tied=True)
    samples = make_samples(9, vocab=model.shape.vocab, seed=2)
    reference = Reference(model, DESCENT, algorithm, TEMPERATURE)
    loss, _, grad_norm = reference.update(samples, reference.logprobs(samples))
    actor = ActorConfig(pool="train")
    num_micro_batches = set()
    for world, budget in divisions:
        batch = packed(samples, world=world, actor=actor, budget=budget)
        outcomes = cluster.run(world, jobs.train, setup_of(model, actor, algorithm), [], batch)
        stats = outcomes[0].stats
        assert stats.loss == pytest.approx(loss, abs=TOLERANCE)
        assert stats.grad_norm == pytest.approx(grad_norm, abs=TOLERANCE)
        assert_close(whole_weights(outcomes, model, actor), reference.weights())
        num_micro_batches.add(world * stats.num_micro_batches)
    assert len(num_micro_batches) > 1, num_micro_batches


def test_later_updates_of_a_step_are_measured_against_the_policy_before_the_first(
    cluster: Cluster, models: Models
) -> None:
    model = models.get("llama", tied=False)
    samples = make_samples(8, vocab=model.shape.vocab, seed=3)
    reference = Reference(model, DESCENT, GRPO, TEMPERATURE)
    old = reference.logprobs(samples)
    losses = [reference.update(samples[i : i + 4], old[i : i + 4])[0] for i in (0, 4)]
    world, actor = SPLITS["PP2-VPP2"]
    batch = packed(samples, world=world, actor=actor, per_update=4)

    outcomes = cluster.run(world, jobs.train, setup_of(model, actor), [], batch)

    stats = outcomes[0].stats
    assert outcomes[0].result.version == 2
    assert stats.loss == pytest.approx(sum(losses) / 2, abs=TOLERANCE)
    assert stats.approx_kl > 1e-4
    assert stats.clip_fraction > 0
    assert_close(whole_weights(outcomes, model, actor), reference.weights())


def test_a_step_takes_its_learning_rate_from_the_schedule(cluster: Cluster, models: Models) -> None:
    model = models.get("qwen2", tied=True)
    samples = make_samples(4, vocab=model.shape.vocab, seed=5)
    quarter = DESCENT.model_copy(update={"learning_rate": DESCENT.learning_rate / 4})
    reference = Reference(model, quarter, GRPO, TEMPERATURE)
    reference.update(samples, reference.logprobs(samples))
    world, actor = SPLITS["TP1"]
    warming_up = replace(setup_of(model, actor), optimizer=DESCENT.model_copy(update={"warmup_steps": 4}))

    outcomes = cluster.run(world, jobs.train, warming_up, [], packed(samples, world=world, actor=actor))

    assert outcomes[0].stats.learning_rate == quarter.learning_rate
    assert_close(whole_weights(outcomes, model, actor), reference.weights())


def test_the_mismatch_compares_probabilities_of_trainer_and_engine(cluster: Cluster, models: Models) -> None:
    model = models.get("llama", tied=False)
    samples = [
        replace(
            sample, rollout=replace(sample.rollout, versions=np.full_like(sample.rollout.versions, -2 * (place % 2)))
        )
        for place, sample in enumerate(make_samples(4, vocab=model.shape.vocab, seed=4))
    ]
    trainer = Reference(model, DESCENT, GRPO, TEMPERATURE).logprobs(samples)
    differences = torch.cat(
        [
            (ours.exp() - torch.from_numpy(sample.rollout.logprobs).exp()).abs()[
                torch.from_numpy(sample.rollout.loss_mask)
            ]
            for ours, sample in zip(trainer, samples, strict=True)
        ]
    )
    world, actor = SPLITS["DP2"]
    batch = packed(samples, world=world, actor=actor, budget=20, has_versions=True)
    (stats, _) = [outcome.stats for outcome in cluster.run(world, jobs.train, setup_of(model, actor), [], batch)]
    assert stats.mismatch_mean == pytest.approx(differences.mean().item(), abs=1e-6)
    assert stats.mismatch_max == pytest.approx(differences.max().item(), abs=1e-6)
    # What an earlier policy chose is told apart: there the policy has moved as well.
    is_behind = torch.cat([torch.from_numpy(s.rollout.versions[s.rollout.loss_mask] < 0) for s in samples])
    assert stats.engine_mismatch == pytest.approx(differences[~is_behind].mean().item(), abs=1e-6)
    assert stats.policy_drift == pytest.approx(differences[is_behind].mean().item(), abs=1e-6)
    assert stats.behind_fraction == pytest.approx(is_behind.double().mean().item())


def test_what_is_saved_is_what_was_loaded(cluster: Cluster, models: Models, tmp_path: Path) -> None:
    model = models.get("qwen3", tied=True)
    world, actor = SPLITS["TP2-PP2"]
    cluster.run(world, jobs.train_and_save, setup_of(model, actor), [], tmp_path / "saved")
    expected = load_file(model.folder / "model.safetensors")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "model", dtype=torch.float32).state_dict()
    for name, tensor in expected.items():
        assert torch.equal(saved[name], tensor), name


def test_a_model_that_does_not_match_its_shape_is_refused(cluster: Cluster, models: Models, tmp_path: Path) -> None:
    model = models.get("llama", tied=False)
    write_tiny_model(tmp_path / "other", "llama", ffn=64)
    setup = replace(setup_of(model, SPLITS["TP1"][1]), folder=tmp_path / "other")
    (message,) = cluster.run(1, jobs.fail_to_start, setup)
    assert "mlp.gate_proj.weight has shape" in message
