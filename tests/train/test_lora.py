"""Adapters in Megatron's layers against peft on the Hugging Face model: same log-probabilities, gradients and files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.config.lora import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    ALL_MODULES,
    ATTENTION_MODULES,
    EXPERTS,
    LoraConfig,
    LoraModule,
    adapter_problem,
    read_adapter_config,
)
from megarl.config.roles import ActorConfig
from megarl.planner.activations import ModelWork, activation_bytes, forward_bytes
from megarl.results import UpdateResult
from megarl.train.lora import _Adapted, dropout_keys
from megarl.types import PolicyVersion
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.lora import LoraShape, adapter_layout, adapter_tensors, canonical_a, canonical_b
from megarl.weights.layouts.megatron import megatron_layout
from tests.schedule import slow
from tests.tiny_models import load_adapted, write_random_adapter, write_tiny_model
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
    SPLITS,
    TEMPERATURE,
    TOLERANCE,
    assembled_tensors,
    assert_close,
    assert_same_logprobs,
    packed,
    parallel_of,
    setup_of,
    whole_weights,
)
from tests.train.test_critic import critic_samples, of_split
from tests.train.test_critic import setup_of as critic_setup
from tests.weights.reference import make_shape

RANK, ALPHA = 4, 6


def random_adapter(folder: Path, model: Model, modules: Sequence[LoraModule], *, seed: int = 0) -> LoraConfig:
    """Write an adapter of which no matrix is zero, and return the recipe's section that starts from it."""
    lora = LoraConfig(rank=RANK, alpha=ALPHA, modules=tuple(modules), path=folder)
    if EXPERTS in modules:
        write_expert_adapter(lora, model, seed=seed)
    else:
        write_random_adapter(folder, model.folder, modules, rank=RANK, alpha=ALPHA, seed=seed)
    return lora


def write_expert_adapter(lora: LoraConfig, model: Model, *, seed: int) -> None:
    """Write what peft wrote when transformers had a module for each expert: it reads that, and writes another form."""
    assert lora.path is not None
    lora.path.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    specs = adapter_tensors(canonical_tensors(model.shape), LoraShape.of(lora))
    tensors = {name: 0.1 * torch.randn(spec.shape, generator=generator) for name, spec in specs.items()}
    save_file(tensors, lora.path / ADAPTER_FILE)
    fields = lora.peft_fields(base=model.folder, modules=lora.peft_modules(model.shape))
    (lora.path / ADAPTER_CONFIG_FILE).write_text(json.dumps(fields))


def whole_adapter(
    outcomes: Sequence[jobs.Outcome], model: Model, actor: ActorConfig, lora: LoraConfig
) -> dict[str, Tensor]:
    """Assemble the adapter's tensors from every rank's."""
    base = megatron_layout(model.shape, parallel_of(outcomes, actor), dtype="float32")
    layout = adapter_layout(base, LoraShape.of(lora))
    for holding, outcome in zip(layout.holdings, outcomes, strict=True):
        assert set(outcome.tensors) == set(holding.tensors), "something else is trained"
    return assembled_tensors(outcomes, layout)


class Dropout(torch.nn.Module):
    """Leaves out of the inputs of one matrix what an update of the ranks does."""

    def __init__(self, place: str, rate: float, token_ids: list[int]) -> None:
        super().__init__()
        self._place, self._rate, self._token_ids = place, rate, token_ids

    def forward(self, inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return inputs
        kept = torch.tensor(kept_inputs(self._place, self._rate, tuple(self._token_ids), inputs.shape[-1]))
        assert abs(kept.float().mean() - (1 - self._rate)) < 0.1
        return inputs * kept / (1 - self._rate)


@cache
def kept_inputs(place: str, rate: float, token_ids: tuple[int, ...], width: int) -> list[list[bool]]:
    """Apply the rule slowly, number by number, in the first update of a run with seed 1."""
    keys = [mixed(mixed(token_id ^ number_of("1/0")) ^ position) for position, token_id in enumerate(token_ids)]
    columns = [(column * 0x9E3779B1 + number_of(place)) % (1 << 32) for column in range(width)]
    least = int(rate * 0x7FFFFFFF)
    return [[mixed(key ^ column) & 0x7FFFFFFF >= least for column in columns] for key in keys]


def number_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF


def mixed(number: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        number = (number ^ number >> shift) * factor % (1 << 32)
    return number ^ number >> 16


BLOCKS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "self_attention.linear_qkv"),
    "o_proj": "self_attention.linear_proj",
    **dict.fromkeys(("gate_proj", "up_proj"), "mlp.linear_fc1"),
    "down_proj": "mlp.linear_fc2",
}


def drop_inputs(adapted: torch.nn.Module, rate: float) -> None:
    from peft.tuners.lora import LoraLayer

    token_ids: list[int] = []

    def remember(_: torch.nn.Module, arguments: tuple[Tensor]) -> None:
        token_ids[:] = arguments[0][0].tolist()

    adapted.register_forward_pre_hook(remember)
    for name, module in adapted.named_modules():
        if isinstance(module, LoraLayer):
            layer, _, path = name.partition(".layers.")[2].partition(".")
            place = f"{int(layer) + 1}/{BLOCKS[path.rpartition('.')[2]]}"
            module.lora_dropout["default"] = Dropout(place, rate, token_ids)


def check_equals_peft(
    model: Model,
    split: tuple[int, ActorConfig],
    lora: LoraConfig,
    cluster: Cluster,
) -> None:
    samples = make_samples(7, vocab=model.shape.vocab)
    assert lora.path is not None
    reference = Reference(model, DESCENT, GRPO, TEMPERATURE, adapter=lora.path)
    old = reference.logprobs(samples)
    before = reference.adapter()
    if lora.dropout:
        drop_inputs(reference._model, lora.dropout)
    # An update of new rollouts takes its own log-probabilities as the old ones.
    own = [reference.distributions(sample)[0].detach() for sample in samples] if lora.dropout else old
    loss, _, grad_norm = reference.update(samples, own)
    world, actor = split
    asked = packed(samples, world=world, actor=actor, is_forward=True)
    trained = packed(samples, world=world, actor=actor, budget=20)
    setup = replace(setup_of(model, actor), lora=lora)

    outcomes = cluster.run(world, jobs.train, setup, [asked], trained)

    parts = [outcome.logprobs[0] for outcome in outcomes]
    assert_same_logprobs(assembled(parts, data_parallel=world // actor.model_parallel), old)
    for outcome in outcomes:
        assert outcome.stats.loss == pytest.approx(loss, abs=TOLERANCE)
        assert outcome.stats.grad_norm == pytest.approx(grad_norm, abs=TOLERANCE)
    after = reference.adapter()
    assert_close(whole_adapter(outcomes, model, actor, lora), after)
    assert all((after[name] - before[name]).abs().max() > 10 * TOLERANCE for name in after), "a gradient is tiny"


@pytest.mark.parametrize("split", ["TP2-SP", *slow("TP2", "PP2", "CP2")])
def test_equals_peft(split: str, cluster: Cluster, models: Models, tmp_path: Path) -> None:
    """The splits below have dropout as well, from the same log-probabilities."""
    model = models.get("qwen2", tied=True)
    check_equals_peft(model, SPLITS[split], random_adapter(tmp_path, model, ALL_MODULES), cluster)


@pytest.mark.parametrize("split", ["TP2-PP2", "CP2", "PP2-VPP2 recomputed", *slow("TP1", "TP2-SP", "DP2")])
def test_an_update_leaves_out_the_same_inputs_as_peft_in_every_split(
    split: str, cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    """The log-probabilities that it starts from are those of the whole adapter."""
    model = models.get("qwen2", tied=True)
    name, _, recomputed = split.partition(" ")
    world, actor = SPLITS[name]
    if recomputed:
        actor = actor.model_copy(update={"megatron": FULL})
    lora = random_adapter(tmp_path, model, ALL_MODULES).model_copy(update={"dropout": 0.25})
    check_equals_peft(model, (world, actor), lora, cluster)


@pytest.mark.parametrize("family", ["llama", *slow("mistral")])
def test_some_modules_of_a_fused_parameter_are_enough(
    family: str, cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    model = models.get(family, tied=False)
    lora = random_adapter(tmp_path, model, ["q_proj", "v_proj", "up_proj"])
    check_equals_peft(model, SPLITS["TP2-SP"], lora, cluster)


@pytest.mark.parametrize("is_sequence_parallel", [*slow(False), True])
def test_ranks_that_share_a_key_head_hold_the_whole_of_a(
    is_sequence_parallel: bool, cluster: Cluster, tmp_path: Path
) -> None:
    shape = write_tiny_model(tmp_path / "model", "llama", heads=4, kv_heads=2)
    model = Model(folder=tmp_path / "model", shape=shape)
    lora = random_adapter(tmp_path / "adapter", model, ALL_MODULES)
    actor = ActorConfig(pool="train", tensor=4, is_sequence_parallel=is_sequence_parallel)
    check_equals_peft(model, (4, actor), lora, cluster)


@pytest.mark.parametrize("family", ["qwen3_moe", *slow("glm4_moe")])
def test_the_attention_of_a_mixture_can_be_adapted(
    family: str, cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    model = models.get(family, tied=False)
    check_equals_peft(model, MIXTURE_SPLITS["TP2-EP2"], random_adapter(tmp_path, model, ATTENTION_MODULES), cluster)


@pytest.mark.parametrize("split", ["TP2-EP2-ETP1", *slow("PP2-VPP2")])
def test_the_shared_expert_of_a_mixture_can_be_adapted(
    split: str, cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    """By the names of a dense block; peft is told to leave the other experts alone."""
    model = models.get("qwen2_moe", tied=False)
    lora = LoraConfig(rank=RANK, alpha=ALPHA, path=tmp_path)
    write_random_adapter(tmp_path, model.folder, lora.peft_modules(model.shape), rank=RANK, alpha=ALPHA)
    assert adapter_problem(lora, tmp_path, model.shape) is None
    check_equals_peft(model, MIXTURE_SPLITS[split], lora, cluster)


@pytest.mark.parametrize(
    ("family", "split"),
    [
        ("qwen3_moe", "TP2-EP2-ETP1"),
        ("qwen3_moe", "TP2-EP2"),
        ("mixtral", "PP2-VPP2"),
        *slow(
            *(("qwen3_moe", split) for split in MIXTURE_SPLITS if split not in ("TP2-EP2-ETP1", "TP2-EP2")),
            ("mixtral", "TP2-SP"),
        ),
    ],
)
def test_every_expert_of_a_mixture_can_be_adapted(
    family: str, split: str, cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    model = models.get(family, tied=False)
    lora = random_adapter(tmp_path, model, (*ATTENTION_MODULES, EXPERTS))
    assert adapter_problem(lora, tmp_path, model.shape) is None
    check_equals_peft(model, MIXTURE_SPLITS[split], lora, cluster)


@pytest.mark.parametrize("split", ["TP2-EP2", *slow("TP1", "PP2-VPP2")])
def test_what_is_sent_to_engines_is_base_and_adapter_merged(
    split: str, cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    model = models.get("qwen3_moe", tied=False)
    lora = random_adapter(tmp_path, model, (*ATTENTION_MODULES, EXPERTS))
    world, actor = MIXTURE_SPLITS[split]
    outcomes = cluster.run(world, jobs.merge, replace(setup_of(model, actor), lora=lora))
    expected = load_folder(model.folder)
    adapter = load_file(tmp_path / ADAPTER_FILE)
    changed = [name for name in expected if canonical_a(name) in adapter]
    assert model.shape.experts is not None
    assert len(changed) == model.shape.num_layers * (4 + 3 * model.shape.experts.num)
    for name in changed:
        expected[name] = expected[name] + ALPHA / RANK * adapter[canonical_b(name)] @ adapter[canonical_a(name)]
    assert_close(whole_weights(outcomes, model, actor), expected, tolerance=1e-6)


def test_the_reference_is_the_base_without_the_adapter(cluster: Cluster, models: Models, tmp_path: Path) -> None:
    model = models.get("qwen2", tied=True)
    samples = make_samples(6, vocab=model.shape.vocab, seed=8)
    expected = Reference(model, DESCENT, GRPO, TEMPERATURE).logprobs(samples)
    lora = random_adapter(tmp_path, model, ALL_MODULES)
    world, actor = SPLITS["TP2-PP2"]
    batch = packed(samples, world=world, actor=actor)
    answers = cluster.run(world, jobs.ask_reference, replace(setup_of(model, actor), lora=lora), model.folder, batch)
    before, reference, after = (assembled(parts, data_parallel=1) for parts in zip(*answers, strict=True))
    assert_same_logprobs(reference, expected)
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))
    assert not all(np.array_equal(*pair) for pair in zip(before, reference, strict=True))


@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
def test_a_new_adapter_is_the_same_in_every_split_and_leaves_the_policy_as_the_base(
    init: str, cluster: Cluster, models: Models
) -> None:
    model = models.get("qwen2", tied=True)
    samples = make_samples(6, vocab=model.shape.vocab, seed=8)
    expected = Reference(model, DESCENT, GRPO, TEMPERATURE).logprobs(samples)
    lora = LoraConfig(rank=RANK, alpha=ALPHA, init="gaussian" if init == "gaussian" else "kaiming")
    found = []
    for split in ("TP1", "TP2-PP2") if init == "kaiming" else ("TP2-PP2",):
        world, actor = SPLITS[split]
        setup = replace(setup_of(model, actor), lora=lora, optimizer=DESCENT.model_copy(update={"weight_decay": 0.0}))
        batch = packed(samples, world=world, actor=actor)
        outcomes = cluster.run(world, jobs.train, setup, [batch], batch)
        assert_same_logprobs(assembled([each.logprobs[0] for each in outcomes], data_parallel=1), expected)
        found.append(whole_adapter(outcomes, model, actor, lora))
    assert_close(found[-1], found[0], tolerance=1e-6)
    first, last = (found[0][f"base_model.model.model.layers.{layer}.mlp.up_proj.lora_A.weight"] for layer in (0, 3))
    assert not torch.equal(first, last)
    # B was zero, so that A had no gradient yet.
    assert first.std().item() == pytest.approx(1 / RANK if init == "gaussian" else (1 / 3 / 64) ** 0.5, rel=0.2)


def test_a_checkpoint_is_a_folder_that_peft_loads_and_any_split_continues_from(
    cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    from peft import get_peft_model_state_dict

    model = models.get("qwen2", tied=True)
    samples = make_samples(8, vocab=model.shape.vocab, seed=3)
    lora = LoraConfig(rank=RANK, alpha=ALPHA)
    adam = DESCENT.model_copy(update={"learning_rate": 1e-2, "eps": 1e-8})
    batches = {
        split: [packed(part, world=SPLITS[split][0], actor=SPLITS[split][1]) for part in (samples[:4], samples[4:])]
        for split in ("TP2-PP2", "DP2", "TP2-SP")
    }
    setups = {split: replace(setup_of(model, SPLITS[split][1]), lora=lora, optimizer=adam) for split in batches}
    saved = cluster.run(4, jobs.train_and_save, setups["TP2-PP2"], batches["TP2-PP2"][:1], tmp_path / "one")
    files = {name for _, of_rank, _ in saved for name in of_rank}
    assert {name for name in files if name.startswith("model/")} == {
        "model/adapter_model.safetensors",
        "model/adapter_config.json",
        "model/generation_config.json",
    }
    folder = tmp_path / "one" / "model"
    assert read_adapter_config(folder) == (LoraConfig(rank=RANK, alpha=ALPHA), model.folder)
    found = get_peft_model_state_dict(load_adapted(model.folder, folder))
    outcomes = [
        jobs.Outcome(logprobs=[], result=UpdateResult(version=PolicyVersion(0), stats=None), tensors=tensors)
        for _, _, tensors in saved
    ]
    assert_close(found, whole_adapter(outcomes, model, SPLITS["TP2-PP2"][1], lora), tolerance=1e-12)

    state = saved[0][0]
    cluster.run(4, jobs.train_and_save, setups["TP2-PP2"], batches["TP2-PP2"], tmp_path / "two")
    expected = {
        kind: load_folder(tmp_path / "two" / kind) for kind in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    }
    for split in ("DP2", "TP2-SP"):
        there = tmp_path / split
        arguments = (setups[split], tmp_path / "one", state, batches[split][1:], there)
        reached, _ = cluster.run(SPLITS[split][0], jobs.resume_and_train, *arguments)[0]
        assert reached.num_updates == 2
        for kind, tensors in expected.items():
            # Adam divides rounding differences by small moments: a hundredth of a step, where a wrong one is whole.
            tolerance = 0.01 * adam.learning_rate if kind == "model" else TOLERANCE
            assert_close(load_folder(there / kind), tensors, tolerance=tolerance)
    cluster.run(
        4, jobs.resume_and_train, setups["TP2-PP2"], tmp_path / "one", state, batches["TP2-PP2"][1:], tmp_path / "three"
    )
    for kind, tensors in expected.items():
        assert_close(load_folder(tmp_path / "three" / kind), tensors, tolerance=1e-30)


@pytest.mark.patient
def test_what_is_left_out_looks_random() -> None:
    token_ids, positions = torch.arange(64).repeat_interleave(8), torch.arange(8).repeat(64)
    module = Plain()
    module.lora_a = torch.nn.Parameter(torch.eye(256))
    module.lora_dropout = 0.5
    seen = []
    for update, salt in ((0, 1), (1, 1), (0, 2)):
        module.lora_keys, module.lora_salt = dropout_keys(token_ids, positions, seed=3, update=update), salt
        thin = module._thin(torch.ones(512, 1, 256), has_columns=False)
        assert set(thin.flatten().tolist()) == {0.0, 2.0}
        seen.append(thin.detach()[:, 0] / 2)
    for kept in seen:
        # Means over 512 or 256 draws: five standard deviations.
        assert (kept.mean(0) - 0.5).abs().max() < 5 * 0.5 / 512**0.5
        assert (kept.mean(1) - 0.5).abs().max() < 5 * 0.5 / 256**0.5
        centred = kept - 0.5
        for other in (centred.roll(1, 0), centred.roll(8, 0), centred.roll(1, 1)):
            assert abs(float((centred * other).mean())) < 5 * 0.25 / kept.numel() ** 0.5
    assert abs(float(((seen[0] - 0.5) * (seen[1] - 0.5)).mean())) < 5 * 0.25 / seen[0].numel() ** 0.5
    assert abs(float(((seen[0] - 0.5) * (seen[2] - 0.5)).mean())) < 5 * 0.25 / seen[0].numel() ** 0.5


class Plain(_Adapted):
    tp_group = None


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe"])
def test_the_planner_counts_what_torch_keeps_of_inputs_that_are_left_out(family: str) -> None:
    shape, num_tokens = make_shape(family), 16
    lora = LoraConfig(rank=RANK, alpha=ALPHA, dropout=0.25)
    width = shape.ffn_hidden if shape.experts is None else shape.experts.shared
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in given:
            kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    outputs = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        for columns in (shape.hidden, shape.num_heads * shape.head_dim, shape.hidden, width):
            module, inputs = Plain(), torch.randn(num_tokens, 1, columns, requires_grad=True)
            module.lora_a = torch.nn.Parameter(torch.randn(RANK, columns))
            module.lora_dropout = lora.dropout
            module.lora_keys = dropout_keys(torch.arange(num_tokens), torch.arange(num_tokens), seed=3, update=0)
            given = {tensor.untyped_storage().data_ptr() for tensor in (inputs, module.lora_a)}
            outputs.append((module._thin(inputs, has_columns=False), module))
    work = ModelWork(shape=shape, split=ActorConfig(pool="train"), tokens=num_tokens, device="cpu", lora=lora)
    plain = replace(work, lora=lora.model_copy(update={"dropout": 0.0}))
    assert sum(kept.values()) == num_tokens * (work.layer_bytes.total - plain.layer_bytes.total)
    assert activation_bytes(work, 0) > activation_bytes(plain, 0)
    assert forward_bytes(work) == forward_bytes(plain)


@pytest.mark.parametrize("has_columns", [True, False], ids=["columns", "tokens"])
def test_ranks_that_share_an_input_leave_out_what_one_does(has_columns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids, positions = torch.arange(40, 48), torch.arange(8)
    module, inputs = Plain(), torch.ones(8, 1, 64)
    module.lora_keys = dropout_keys(token_ids, positions, seed=1, update=0)
    module.lora_dropout, module.lora_salt = 0.25, number_of("3/mlp.linear_fc2")
    expected = torch.tensor(kept_inputs("3/mlp.linear_fc2", 0.25, tuple(token_ids.tolist()), 64)) / 0.75
    module.tp_group = object()  # type: ignore[assignment]  # its rank is set below
    for part in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda _, part=part: part)
        mine = (slice(None), slice(32 * part, 32 * part + 32)) if has_columns else (slice(4 * part, 4 * part + 4),)
        share = inputs[:, 0][mine][:, None]
        module.lora_a = torch.nn.Parameter(torch.eye(share.shape[-1]))
        assert torch.allclose(module._thin(share, has_columns=has_columns)[:, 0], expected[mine])


def test_an_adapter_that_is_not_finite_is_not_sent(cluster: Cluster, models: Models) -> None:
    """Large values are: their squares overflow, they do not."""
    model = models.get("qwen2", tied=True)
    world, actor = SPLITS["TP2"]
    setup = replace(setup_of(model, actor), lora=LoraConfig(rank=RANK, alpha=ALPHA))
    for rank, message in enumerate(cluster.run(world, jobs.send_unfinite, setup)):
        assert re.match(
            rf"actor rank {rank}: version 0 was not published: 2 of \d+ values of chunk0\.decoder\S+ are NaN or "
            r"infinite; engines keep the one before; lower train\.optimizer\.learning_rate and resume",
            message,
        ), message


def load_folder(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_a_critic_trains_its_adapter_and_its_value_head(cluster: Cluster, models: Models, tmp_path: Path) -> None:
    model = models.get("qwen2", tied=False)
    samples = critic_samples(model)
    lora = LoraConfig(rank=RANK, alpha=ALPHA)
    found = []
    for split in ("TP1", "TP2-SP", "PP2"):
        world, actor = SPLITS[split]
        setup = replace(critic_setup(model, of_split(actor)), lora=lora)
        batch = packed(samples, world=world, actor=actor)
        there = tmp_path / split
        outcomes = cluster.run(world, jobs.train_critic, setup, batch, there)
        found.append(load_folder(there / "model"))
        head = found[-1]["base_model.model.score.weight"]
        assert head.shape == (1, model.shape.hidden)
        assert head.abs().max() > 0
    for other in found[1:]:
        assert_close(other, found[0])
    values = cluster.run(world, jobs.resume_critic, setup, there, outcomes[0].state, batch)
    assert any(np.abs(part.numbers).max() > 0 for part in values if part is not None)
