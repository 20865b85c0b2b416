from __future__ import annotations

from fnmatch import fnmatchcase
from typing import get_args

import pytest

from megarl.config.native import OWNED, Library, owned, read_library, refusal


@pytest.mark.parametrize(
    ("library", "name", "value"),
    [
        ("megatron", "recompute_granularity", "full"),
        ("megatron", "recompute_modules", ["mlp", "core_attn"]),
        ("megatron", "deterministic_mode", True),
        ("megatron", "microbatch_group_size_per_vp_stage", 4),
        ("megatron_optimizer", "decoupled_weight_decay", False),
        ("megatron_ddp", "bucket_size", 40_000_000),
        ("sglang", "attention_backend", "fa3"),
        ("sglang", "schedule_conservativeness", 1),
        ("sglang", "cuda_graph_bs_decode", [1, 2, 4]),
        ("sglang", "disable_radix_cache", False),
        ("sglang", "preferred_sampling_params", {"top_p": 0.9}),
    ],
)
def test_an_option_of_the_right_type_is_passed_on(library: Library, name: str, value: object) -> None:
    assert refusal(library, name, value, device="cuda") is None


@pytest.mark.parametrize(
    ("library", "name", "value", "message"),
    [
        ("megatron", "microbatch_group_size_per_vp_stage", True, "true: megatron takes int here"),
        ("megatron", "microbatch_group_size_per_vp_stage", 1.5, "1.5: megatron takes int here"),
        ("megatron", "recompute_modules", [], "[]: megatron takes list[str] here"),
        ("sglang", "trust_remote_code", True, "code in a model folder is not run; remove it"),
        ("megatron", "recompute_granularity", "all", '"all": one of full, selective'),
        (
            "megatron",
            "sequence_paralel",
            True,
            "megatron 0.16.1 has no such option; sequence_parallel: set roles.actor.is_sequence_parallel instead",
        ),
        ("sglang", "cuda_graph_bs_decode", [1, "2"], '[1, "2"]: sglang takes list[int] here'),
        ("sglang", "tokenizer_path", "mine", "engines work on token ids and load no tokenizer; remove it"),
        ("sglang", "speculative_algorithm", "EAGLE3", "set roles.rollout.draft instead"),
        ("sglang", "xyzzy", 1, "sglang 0.5.21 has no such option; remove it"),
    ],
)
def test_what_cannot_be_passed_on_is_explained(library: Library, name: str, value: object, message: str) -> None:
    assert refusal(library, name, value, device="cuda") == message


@pytest.mark.parametrize(
    ("library", "name", "reason"),
    [
        ("megatron_ddp", "overlap_grad_reduce", None),
        ("megatron", "moe_permute_fusion", None),
        ("megatron", "disable_parameter_transpose_cache", None),
        ("megatron", "gradient_accumulation_fusion", "megarl chooses this kernel"),
        ("megatron", "tp_comm_overlap", "needs buffers for micro-batches of one length"),
        ("megatron", "delay_wgrad_compute", "splits the backward pass of a layer"),
        ("megatron", "overlap_moe_expert_parallel_comm", "splits the backward pass of a layer"),
        ("megatron", "cpu_offloading", "activations stay on the GPU"),
        ("megatron", "moe_grouped_gemm", "set roles.actor.kernels instead"),
        ("megatron", "moe_enable_deepep", "set roles.actor.dispatcher instead"),
        ("megatron", "moe_shared_expert_overlap", "tokens are routed as the model's config.json says"),
        ("megatron", "fp8_param", "set roles.actor.precision and roles.actor.fp8_scaling instead"),
        ("megatron", "use_te_rng_tracker", "megarl takes the linear layers of Transformer Engine"),
        ("megatron_ddp", "overlap_param_gather", "weights are published right after an update"),
        ("megatron_optimizer", "overlap_param_gather", "weights are published right after an update"),
        ("megatron_optimizer", "use_precision_aware_optimizer", "checkpoints hold master weights and moments in"),
        ("megatron_optimizer", "optimizer_cpu_offload", "set roles.actor.offload instead"),
    ],
)
def test_an_option_for_speed_passes_or_has_its_reason(library: Library, name: str, reason: str | None) -> None:
    message = refusal(library, name, True, device="cuda")
    assert message is None if reason is None else message is not None and message.startswith(reason), message


def test_an_option_may_be_owned_on_one_device_only() -> None:
    assert refusal("sglang", "chunked_prefill_size", 4096, device="cuda") is None
    assert refusal("sglang", "chunked_prefill_size", 4096, device="cpu") == (
        "prompts are never cut on a CPU; remove it"
    )


@pytest.mark.parametrize("library", get_args(Library))
def test_whatever_is_owned_exists(library: Library) -> None:
    fields = read_library(library).fields
    patterns = [pattern for table in OWNED[library] for pattern in table]
    assert [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in fields)] == []


@pytest.mark.parametrize(
    ("library", "fewest"), [("megatron", 15), ("megatron_optimizer", 2), ("megatron_ddp", 5), ("sglang", 350)]
)
def test_most_of_a_library_stays_open_to_recipes(library: Library, fewest: int) -> None:
    """A pattern that is too wide would show here."""
    names = read_library(library).fields
    assert sum(owned(library, name, device="cuda") is None for name in names) >= fewest
