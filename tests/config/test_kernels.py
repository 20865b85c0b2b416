from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config import kernels
from megarl.config.kernels import check_blocks, check_kernels, check_packages, check_widths, finds_deepep, uses_te
from megarl.config.roles import ActorConfig, CriticConfig, ReferenceConfig, RolesConfig, RolloutRoleConfig
from megarl.errors import Problem
from megarl.families import PUBLIC_MODELS
from megarl.families.shape import ModelShape

DENSE = PUBLIC_MODELS["qwen2.5-7b"]


def with_packages(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: object() if name in names else None)


def actor(**keys: object) -> RolesConfig:
    return RolesConfig(actor=ActorConfig.model_validate({"pool": "gpu", **keys}))


def texts(problems: list[Problem]) -> list[str]:
    return [f"{problem.key}: {problem.message}" for problem in problems]


@pytest.mark.parametrize(
    ("keys", "has_experts", "expected"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"precision": "fp8"}, False, True),
        ({"kernels": "te"}, False, True),
        ({"kernels": "local"}, True, False),
    ],
)
def test_auto_takes_transformer_engine_where_it_gives_something(
    keys: dict[str, object], has_experts: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_packages(monkeypatch, "transformer_engine")
    split = actor(**keys).actor
    assert uses_te(split, has_experts=has_experts, device="cuda") is expected


def test_auto_does_without_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_packages(monkeypatch)
    assert not uses_te(actor().actor, has_experts=True, device="cuda")
    with_packages(monkeypatch, "transformer_engine")
    assert not uses_te(actor().actor, has_experts=True, device="cpu")


def test_a_missing_package_is_named_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with_packages(monkeypatch)
    roles = actor(kernels="te", precision="fp8", dispatcher="deepep")
    found = texts(list(check_packages(roles, device="cuda")))
    assert [text.split(":")[0] for text in found] == [
        "roles.actor.kernels",
        "roles.actor.precision",
        "roles.actor.dispatcher",
    ]
    assert "fp8 needs the package transformer_engine, which is not installed here" in found[1]
    assert "deepep needs the package deep_ep" in found[2]
    with_packages(monkeypatch, "transformer_engine", "deep_ep")
    monkeypatch.setattr(kernels, "is_deepep_found", lambda: True)
    assert list(check_packages(roles, device="cuda")) == []
    monkeypatch.setattr(kernels, "is_deepep_found", lambda: False)
    (problem,) = check_packages(roles, device="cuda")
    assert problem.key == "roles.actor.dispatcher"
    assert "`make patches`" in problem.message


RELEASED = "from deep_ep import Buffer\nfrom deep_ep.utils import EventHandle, EventOverlap\n"
PATCHED = "from deep_ep import Buffer, EventOverlap\nfrom deep_ep.utils import EventHandle\n"


@pytest.mark.parametrize(
    ("megatron", "utils", "expected"),
    [
        (RELEASED, "utils.py", True),
        (RELEASED, "utils/__init__.py", False),
        (PATCHED, "utils/__init__.py", True),
        (PATCHED, "utils.py", True),
    ],
    ids=["first release", "second release", "second release, patched", "first release, patched"],
)
def test_megatron_as_released_does_not_find_the_second_release_of_deepep(
    megatron: str, utils: str, expected: bool, tmp_path: Path
) -> None:
    asking = tmp_path / "megatron" / "core" / "transformer" / "moe" / "fused_a2a.py"
    answering = tmp_path / "deep_ep" / utils
    for path in (asking, answering):
        path.parent.mkdir(parents=True)
    asking.write_text(megatron)
    answering.write_text("from .event import EventHandle\n")
    assert finds_deepep(tmp_path / "megatron", tmp_path / "deep_ep") is expected


def test_contradictions_are_refused_for_every_role() -> None:
    roles = RolesConfig(
        actor=ActorConfig(pool="gpu", kernels="te"),
        reference=ReferenceConfig(pool="other", kernels="local", precision="fp8"),
    )
    # An adapter may have a base in layers of Transformer Engine.
    assert texts(list(check_kernels(roles, is_adapted=True, device="cuda"))) == [
        "roles.reference.kernels: local has no FP8; use auto or te with precision fp8",
    ]
    (problem,) = check_kernels(actor(precision="fp8", kernels="torch"), is_adapted=False, device="cuda")
    assert str(problem) == "roles.actor.kernels: torch has no FP8; use auto or te with precision fp8"
    assert not actor(kernels="torch").actor.is_fused


def test_a_gpu_without_fp8_is_not_asked_for_it() -> None:
    roles = actor(precision="fp8")
    assert texts(list(check_kernels(roles, is_adapted=False, device="cuda", gpu="a100"))) == [
        "roles.actor.precision: cluster.gpu a100 has no FP8; use bf16"
    ]
    assert list(check_kernels(roles, is_adapted=False, device="cuda", gpu="h200")) == []


def test_options_of_layers_that_are_not_there_are_refused() -> None:
    fused = {"moe_permute_fusion": True}
    assert list(check_kernels(actor(kernels="te", megatron=fused), is_adapted=False, device="cuda")) == []
    assert texts(list(check_kernels(actor(megatron=fused), is_adapted=False, device="cuda"))) == [
        "roles.actor.megatron.moe_permute_fusion: needs the kernels of Transformer Engine; set kernels to te, "
        "or remove it"
    ]
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    delayed = actor(precision="fp8", fp8_scaling="delayed", megatron=recomputed)
    assert texts(list(check_kernels(delayed, is_adapted=False, device="cuda"))) == [
        "roles.actor.megatron.recompute_modules: layernorm cannot be recomputed with fp8_scaling delayed; "
        "use tensorwise"
    ]


def test_widths_that_fp8_cannot_multiply_are_refused() -> None:
    split = actor(precision="fp8").actor
    assert list(check_widths(DENSE, split, prefix="")) == []
    narrow = replace(DENSE, ffn_hidden=8 * 1001, num_layers=2)
    assert texts(list(check_widths(narrow, split, prefix="roles.actor."))) == [
        "roles.actor.precision: fp8 leaves the first and last layer in bf16, and the model has 2; use bf16",
        "roles.actor.precision: fp8 needs widths that are multiples of 16, and the intermediate size on a rank is "
        "8008; use bf16",
    ]
    assert list(check_widths(narrow, actor().actor, prefix="")) == []
    parts = actor(precision="fp8", fp8_scaling="blockwise", tensor=2, is_sequence_parallel=True).actor
    assert list(check_widths(DENSE, parts, prefix="")) == []
    (problem,) = check_widths(replace(DENSE, hidden=3600), parts, prefix="")
    assert "multiple of 128 with is_sequence_parallel, and it is 3600; use tensorwise" in problem.message


@pytest.mark.parametrize(
    ("keys", "multiple"),
    [
        ({}, 8),
        ({"precision": "fp8"}, 16),
        ({"precision": "fp8", "tensor": 4}, 64),
        ({"precision": "fp8", "fp8_scaling": "blockwise", "tensor": 2}, 256),
    ],
)
def test_packs_have_lengths_that_fp8_takes_on_every_rank(keys: dict[str, object], multiple: int) -> None:
    assert actor(**keys).actor.pack_multiple == multiple


def test_float32_is_for_a_critic() -> None:
    critic = CriticConfig(pool="gpu", precision="fp32")
    roles = RolesConfig(actor=ActorConfig(pool="gpu"), critic=critic)
    assert list(check_kernels(roles, is_adapted=False, device="cuda")) == []
    assert (critic.dtype_on("cuda"), roles.actor.dtype_on("cuda")) == ("float32", "bfloat16")
    (problem,) = check_kernels(actor(precision="fp32"), is_adapted=False, device="cuda")
    assert str(problem).startswith("roles.actor.precision: fp32 is for a critic without model.lora")


def test_exchanges_of_long_sequences_are_transformer_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = actor(context=2, context_exchange="ring")
    assert list(check_kernels(ring, is_adapted=True, device="cuda")) == []
    (problem,) = check_kernels(ring, is_adapted=False, device="cpu")
    assert "ring is for GPUs that share sequences, and run.device is cpu; remove it" in str(problem)
    (problem,) = check_kernels(actor(context_exchange="ring"), is_adapted=False, device="cuda")
    assert "roles.actor.context_exchange: ring is for GPUs that share sequences, and context is 1" in str(problem)
    with_packages(monkeypatch)
    (problem,) = check_packages(ring, device="cuda")
    assert "ring needs the package transformer_engine" in str(problem)
    few = actor(context=4, context_exchange="all_to_all", tensor=4).actor
    (problem,) = check_widths(replace(DENSE, num_kv_heads=8), few, prefix="roles.actor.")
    assert str(problem) == (
        "roles.actor.context_exchange: all_to_all gives each of the 4 ranks of context as many key heads, and a "
        "rank of tensor has 2; use ring or gather"
    )
    assert list(check_widths(replace(DENSE, num_kv_heads=16), few, prefix="")) == []


def problems_in_fp8(shape: ModelShape, **keys: object) -> list[str]:
    rollout = RolloutRoleConfig.model_validate({"pool": "rollout", "precision": "fp8", **keys})
    return texts([*check_blocks(shape, ActorConfig(pool="train"), rollout)])


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen3-8b", "llama-3.1-70b", "qwen3-30b-a3b"])
def test_public_models_can_have_engines_in_fp8(name: str) -> None:
    assert problems_in_fp8(PUBLIC_MODELS[name]) == []


def test_an_engine_of_whole_experts_cuts_no_block_of_a_mixture() -> None:
    mixture = PUBLIC_MODELS["qwen3-235b-a22b"]
    (cut,) = problems_in_fp8(mixture, tensor=8)
    assert "gives a rank 192 rows of each feed-forward block" in cut
    assert "such as a larger expert" in cut
    assert problems_in_fp8(mixture, tensor=8, expert=8) == []


def test_a_cache_in_fp8_beside_fp8_weights_is_for_families_without_scales_of_their_own() -> None:
    cache: dict[str, object] = {"sglang": {"kv_cache_dtype": "fp8_e4m3"}}
    assert problems_in_fp8(PUBLIC_MODELS["qwen3-8b"], **cache) == []
    (refused,) = problems_in_fp8(PUBLIC_MODELS["qwen2.5-7b"], **cache)
    assert "random scales of the cache" in refused
