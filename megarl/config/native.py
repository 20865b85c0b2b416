"""Options of Megatron and SGLang that a recipe passes on: they exist, have the right type, and are not megarl's own.

Neither library is imported: a file per library in `native_options`, written from the pinned release, lists its options.
The tables here name options that a recipe must not pass on, each with its remedy, because megarl sets them, or they
would break or do nothing. The first name or pattern that matches counts; a test compares the tables with the options
that `train` and `engine` set.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Literal, TypeAlias

from megarl.config.roles import RolesConfig, TrainedModelConfig
from megarl.config.section import Device
from megarl.errors import Problem

JSON = "json"
"""The type of an option that is a mapping or a list and is passed on as text."""
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    JSON: (dict, list),
}

Library: TypeAlias = Literal["megatron", "megatron_optimizer", "megatron_ddp", "sglang"]

_SHAPE = "comes from the model's config.json; remove it"
_LAYOUT = "megarl divides a model by the keys of roles.actor only; remove it"
_OTHER = "megarl trains transformers of the supported families only; remove it"
_ROUTING = "tokens are routed as the model's config.json says, and no loss balances them; remove it"
_PRECISION = "follows run.device: bfloat16 on GPUs, float32 on CPUs; remove it"
_FP8 = "set roles.actor.precision and roles.actor.fp8_scaling instead"
KERNELS = "megarl chooses this kernel; remove it"
_ONE_LENGTH = "needs buffers for micro-batches of one length, and packs differ in length; remove it"
_WHOLE_BACKWARD = "splits the backward pass of a layer, for schedules that megarl does not run; remove it"
_ATTENTION = "is for the attention of Transformer Engine, and megarl has its own for packs; remove it"
_ENGINE_PARTS = "megarl takes the linear layers of Transformer Engine and nothing else of it; remove it"
_ACTIVATIONS = "activations stay on the GPU: set recompute_granularity, or roles.actor.offload for the optimizer"
_SCORES = "megarl makes log-probabilities without Megatron's output layer; remove it"
_WEIGHTS = "engines get their weights from the trainer, as they are there; remove it"
_QUANTIZED = "engines cannot quantize what is published; set roles.rollout.precision: fp8 instead"
_ENGINE_LAYOUT = "an engine is divided by roles.rollout.tensor and expert only; remove it"
_EXPERT_ORDER = "experts would lie in another order than megarl delivers; remove it"
_TOKENS = "engines work on token ids and load no tokenizer; remove it"
_SECRETS = "a recipe holds no secrets: megarl makes the keys of every engine; remove it"
_GENERATES = "Megatron does not generate in megarl; remove it"
_LOADED = "weights are loaded, not drawn; remove it"
_ALWAYS = "always set by megarl; remove it"
_ADDRESS = "megarl chooses where an engine listens; remove it"
_UNSEEN = "its output is not collected; remove it"
_NO_GRAPHS = "megarl's micro-batches differ in length, graphs do not apply; remove it"

_MEGATRON: Mapping[str, str] = {
    "tensor_model_parallel_size": "set roles.actor.tensor instead",
    "pipeline_model_parallel_size": "set roles.actor.pipeline instead",
    "virtual_pipeline_model_parallel_size": "set roles.actor.virtual_pipeline instead",
    "sequence_parallel": "set roles.actor.is_sequence_parallel instead",
    "num_layers": _SHAPE,
    "hidden_size": _SHAPE,
    "ffn_hidden_size": _SHAPE,
    "num_attention_heads": _SHAPE,
    "num_query_groups": _SHAPE,
    "kv_channels": _SHAPE,
    "normalization": _SHAPE,
    "layernorm_*": _SHAPE,
    "qk_layernorm": _SHAPE,
    "qk_l2_norm": _SHAPE,
    "add_bias_linear": _SHAPE,
    "add_qkv_bias": _SHAPE,
    "gated_linear_unit": _SHAPE,
    "activation_func*": _SHAPE,
    "glu_linear_offset": _SHAPE,
    "rotary_interleaved": _SHAPE,
    "softmax_*": _SHAPE,
    "window_*": _SHAPE,
    "no_rope_freq": _SHAPE,
    "mrope_section": _SHAPE,
    "attention_output_gate": _SHAPE,
    "apply_residual_connection_post_layernorm": _SHAPE,
    "multi_latent_attention": _OTHER,
    "experimental_attention_variant": _OTHER,
    "moe_grouped_gemm": "set roles.actor.kernels instead: te runs the experts of a rank together",
    "moe_use_legacy_grouped_gemm": "set roles.actor.kernels instead: te runs the experts of a rank together",
    "moe_token_dispatcher_type": "set roles.actor.dispatcher instead",
    "moe_flex_dispatcher_backend": "set roles.actor.dispatcher instead",
    "moe_enable_deepep": "set roles.actor.dispatcher instead",
    "moe_router_padding_*": "with FP8 the tokens of every expert are padded already; remove it",
    "overlap_moe_expert_parallel_comm": _WHOLE_BACKWARD,
    "moe_layer_recompute": "set recompute_granularity: selective and recompute_modules: [moe] instead",
    "moe_[aefiz]*": _ROUTING,
    "moe_hybridep_*": _ROUTING,
    "moe_l*": _ROUTING,
    "moe_pad_*": _ROUTING,
    "moe_per_layer_logging": _UNSEEN,
    "moe_router_*": _ROUTING,
    "moe_shared_*": _ROUTING,
    "moe_token_*": _ROUTING,
    "num_moe_experts": _ROUTING,
    "mtp_*": _OTHER,
    "mamba_*": _OTHER,
    "use_mamba_*": _OTHER,
    "linear_*": _OTHER,
    "dsa_*": _OTHER,
    "is_hybrid_model": _OTHER,
    "heter*": _OTHER,
    "num_layers_in_first_pipeline_stage": "set roles.actor.first_stage_layers instead",
    "num_layers_in_last_pipeline_stage": "set roles.actor.last_stage_layers instead",
    "pipeline_model_parallel_layout": _LAYOUT,
    "account_for_*": _LAYOUT,
    "expert_model_parallel_size": "set roles.actor.expert instead",
    "expert_tensor_parallel_size": "set roles.actor.expert_tensor instead",
    "ep_*": _LAYOUT,
    "context_parallel_size": "set roles.actor.context instead",
    "*context_parallel*": _LAYOUT,
    "max_seqlen_per_dp_cp_rank": _LAYOUT,
    "cp_comm_type": "set roles.actor.context_exchange instead",
    "variable_seq_lengths": _LAYOUT,
    "*_dropout": "the policy that is trained must be the one that generates: no dropout; remove it",
    "fp16": _PRECISION,
    "bf16": _PRECISION,
    "params_dtype": _PRECISION,
    "pipeline_dtype": _PRECISION,
    "*autocast*": _PRECISION,
    "fp32_residual_connection": _PRECISION,
    "*_in_bf16": "with precision fp8 the first and the last layer stay in bf16; remove it",
    "first_last_layers_bf16": _FP8,
    "fp8*": _FP8,
    "fp4*": _PRECISION,
    "calculate_per_token_loss": _ALWAYS,
    "batch_p2p_comm": _ALWAYS,
    "overlap_p2p_comm": _ALWAYS,
    "*init_method*": _LOADED,
    "perform_initialization": _LOADED,
    "init_model_with_meta_device": _LOADED,
    "use_cpu_initialization": _LOADED,
    "attention_backend": KERNELS,
    "masked_softmax_fusion": KERNELS,
    "bias_activation_fusion": KERNELS,
    "bias_dropout_fusion": KERNELS,
    "gradient_accumulation_fusion": KERNELS,
    "cross_entropy_*": _SCORES,
    "defer_embedding_wgrad_compute": _SCORES,
    "wgrad_deferral_limit": _SCORES,
    # Rotary angles are given per position of the pack; the fused kernels count positions themselves.
    "*rope*": KERNELS,
    "transformer_impl": KERNELS,
    "attention_softmax_in_fp32": KERNELS,
    "apply_query_key_layer_scaling": KERNELS,
    "persist_layer_norm": KERNELS,
    "memory_efficient_layer_norm": KERNELS,
    "*kitchen*": KERNELS,
    "use_fused_weighted_squared_relu": KERNELS,
    "tp_comm_*": _ONE_LENGTH,
    "tp_only_amax_red": _FP8,
    "use_te_*": _ENGINE_PARTS,
    "*offload*": _ACTIVATIONS,
    "delay_wgrad_compute": _WHOLE_BACKWARD,
    "batch_invariant_mode": _ENGINE_PARTS,
    "qk_clip*": _ATTENTION,
    "log_max_attention_logit": _ATTENTION,
    "flash_decode": KERNELS,
    "symmetric_ar_type": _GENERATES,
    "mlp_chunks_for_prefill": _GENERATES,
    "inference_*": _GENERATES,
    "use_inference_*": _GENERATES,
    "*cuda_graph*": _NO_GRAPHS,
    "num_microbatches_with_partial_activation_checkpoints": "every micro-batch is treated alike; remove it",
    "test_mode": "would train on nothing real; remove it",
}

_ADAM = "megarl trains with Adam; remove it"
_WHOLE = "weights are published right after an update and must be complete by then; remove it"
_STATE = "checkpoints hold master weights and moments in float32; remove it"
_ON_HOST = "set roles.actor.offload instead"
_SHARDS = "gradients and optimizer are sharded by Megatron's distributed optimizer only; remove it"
_FINITE = "updates that are not finite are skipped and counted; remove it"
_SUMS = "gradients are summed in float32: the loss has its global denominator; remove it"
_MEGATRON_OPTIMIZER: Mapping[str, str] = {
    "lr": "set learning_rate in the optimizer section instead",
    "min_lr": "set min_learning_rate in the optimizer section instead",
    "weight_decay": "set weight_decay in the optimizer section instead",
    "adam_beta1": "set beta1 in the optimizer section instead",
    "adam_beta2": "set beta2 in the optimizer section instead",
    "adam_eps": "set eps in the optimizer section instead",
    "clip_grad": "set clip_grad_norm in the optimizer section instead",
    "decoupled_*lr": "all weights have the same learning rate; remove it",
    "optimizer": _ADAM,
    "sgd_*": _ADAM,
    "muon_*": _ADAM,
    "fp8_recipe": _PRECISION,
    "fp16": _PRECISION,
    "bf16": _PRECISION,
    "params_dtype": _PRECISION,
    "reuse_grad_buf_for_mxfp8_param_ag": _PRECISION,
    "*loss_scale*": "bfloat16 and float32 need no loss scale; remove it",
    "hysteresis": "bfloat16 and float32 need no loss scale; remove it",
    "use_precision_aware_optimizer": _STATE,
    "store_param_remainders": _STATE,
    "*_dtype": _STATE,
    "*offload*": _ON_HOST,
    "overlap_cpu_optimizer_d2h_h2d": _ON_HOST,
    "pin_cpu_*": _ON_HOST,
    "use_distributed_optimizer": _ALWAYS,
    "overlap_param_gather*": _WHOLE,
    "log_num_zeros_in_grad": _UNSEEN,
    "barrier_with_L1_time": _UNSEEN,
    "timers": _UNSEEN,
    "config_logger_dir": _UNSEEN,
}

_MEGATRON_DDP: Mapping[str, str] = {
    "grad_reduce_in_fp32": _ALWAYS,
    "use_distributed_optimizer": _ALWAYS,
    "overlap_param_gather": _WHOLE,
    "align_param_gather": _WHOLE,
    "num_distributed_optimizer_instances": _SHARDS,
    "*fsdp*": _SHARDS,
    "*sharding_strategy": _SHARDS,
    "gradient_reduce_div_fusion": _SHARDS,
    "suggested_communication_unit_size": _SHARDS,
    "preserve_fp32_weights": _SHARDS,
    "check_for_*": _FINITE,
    "average_in_collective": _SUMS,
    "reduce_scatter_with_fp32_accumulation": _SUMS,
    "*fp8*": _PRECISION,
    "delay_wgrad_compute": _WHOLE_BACKWARD,
}

_SGLANG: Mapping[str, str] = {
    "model_path": "set model.path instead",
    "device": "set run.device instead",
    "random_seed": "set run.seed instead",
    "tp_size": "set roles.rollout.tensor instead",
    "max_running_requests": "set roles.rollout.max_running_requests instead",
    "max_total_tokens": "set roles.rollout.max_cached_tokens instead",
    "mem_fraction_static": "set roles.rollout.memory_fraction instead",
    "enable_fp32_lm_head": "set model.has_float32_head instead",
    "enable_deterministic_inference": "set roles.rollout.is_deterministic instead",
    "enable_return_routed_experts": "set train.routing instead",
    "enable_memory_saver": "follows from the pools: on where both roles share one; remove it",
    "dtype": _PRECISION,
    "host": _ADDRESS,
    "port": _ADDRESS,
    "fastapi_root_path": _ADDRESS,
    "api_key": _SECRETS,
    "admin_api_key": _SECRETS,
    "ssl_*": _SECRETS,
    "enable_ssl_refresh": _SECRETS,
    "skip_tokenizer_init": _ALWAYS,
    "skip_server_warmup": _ALWAYS,
    "sleep_on_idle": _ALWAYS,
    "log_level_http": _ALWAYS,
    "enable_metrics": _ALWAYS,
    "weight_version": _WEIGHTS,
    "trust_remote_code": "code in a model folder is not run; remove it",
    "custom_weight_loader": _WEIGHTS,
    "load_format": _WEIGHTS,
    "revision": _WEIGHTS,
    "model_impl": _WEIGHTS,
    "json_model_override_args": _WEIGHTS,
    "quantiz*": _QUANTIZED,
    "modelopt_*": _WEIGHTS,
    "rl_quant_profile": _QUANTIZED,
    "*lora*": _WEIGHTS,
    "remote_instance_weight_*": _WEIGHTS,
    "weight_cache_*": _WEIGHTS,
    "startup_weight_load_mode": _WEIGHTS,
    "cpu_offload_gb": _WEIGHTS,
    "pp_*": _ENGINE_LAYOUT,
    "dp_size": _ENGINE_LAYOUT,
    "ep_size": "set roles.rollout.expert instead",
    "moe_runner_backend": _EXPERT_ORDER,
    "moe_a2a_backend": _EXPERT_ORDER,
    "ep_num_redundant_experts": _EXPERT_ORDER,
    "init_expert_location": _EXPERT_ORDER,
    "enable_eplb": _EXPERT_ORDER,
    "*_cp_size": _ENGINE_LAYOUT,
    "dcp_*": _ENGINE_LAYOUT,
    "dwdp_size": _ENGINE_LAYOUT,
    "moe_d*_size": _ENGINE_LAYOUT,
    "enable_dp_*": _ENGINE_LAYOUT,
    "nnodes": _ENGINE_LAYOUT,
    "node_rank": _ENGINE_LAYOUT,
    "dist_init_addr": _ENGINE_LAYOUT,
    "base_gpu_id": _ENGINE_LAYOUT,
    "gpu_id_step": _ENGINE_LAYOUT,
    "use_ray": _ENGINE_LAYOUT,
    "elastic_ep_*": _ENGINE_LAYOUT,
    "disaggregation_*": "prefill and decoding are not split over engines; remove it",
    "tokenizer_path": _TOKENS,
    "tokenizer_mode": _TOKENS,
    "*chat_template*": _TOKENS,
    "reasoning_parser": _TOKENS,
    "tool_call_parser": _TOKENS,
    "is_embedding": "a policy generates; remove it",
    "enable_draft_weights_cpu_backup": "follows from roles.rollout.draft and the pools; remove it",
    "speculative_*": "set roles.rollout.draft instead",
}

_SGLANG_ON_CPU: Mapping[str, str] = {
    "attention_backend": "torch_native is the only one on a CPU; remove it",
    "chunked_prefill_size": "prompts are never cut on a CPU; remove it",
    "disable_radix_cache": "a deterministic engine on a CPU has none; set roles.rollout.is_deterministic instead",
}

OWNED: Mapping[Library, tuple[Mapping[str, str], ...]] = {
    "megatron": (_MEGATRON,),
    "megatron_optimizer": (_MEGATRON_OPTIMIZER,),
    "megatron_ddp": (_MEGATRON_DDP,),
    "sglang": (_SGLANG, _SGLANG_ON_CPU),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeField:
    types: tuple[str, ...]
    """bool, int, float, str, `list[...]` of one of them, json; empty for an option that YAML cannot express."""
    choices: tuple[str | int | float, ...] = ()
    """Allowed values, or allowed items of a list; empty allows all."""
    flag: str | None = None
    """The flag, unless it is `--` and the name."""
    negation: str | None = None
    """The flag for false; None where false is the library's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLibrary:
    name: str
    version: str
    fields: Mapping[str, NativeField]


@cache
def read_library(library: Library) -> NativeLibrary:
    raw = json.loads((files("megarl.config") / "native_options" / f"{library}.json").read_text(encoding="utf-8"))
    return NativeLibrary(
        name=raw["name"],
        version=raw["version"],
        fields={name: _read(field) for name, field in raw["fields"].items()},
    )


def _read(raw: Mapping[str, object]) -> NativeField:
    types, choices = raw["types"], raw.get("choices", [])
    flag, negation = raw.get("flag"), raw.get("negation")
    assert isinstance(types, list), raw
    assert isinstance(choices, list), raw
    assert isinstance(flag, str | None), raw
    assert isinstance(negation, str | None), raw
    return NativeField(types=tuple(types), choices=tuple(choices), flag=flag, negation=negation)


def check_native(roles: RolesConfig, *, device: Device) -> Iterator[Problem]:
    """Yield every option of the roles' `megatron` and `sglang` sections that cannot be passed on."""
    for role, split in roles.megatron_roles.items():
        section = f"roles.{role}.megatron"
        yield from _refused("megatron", section, split.megatron, device)
        yield from _recomputation(split.megatron, section)
        if isinstance(split, TrainedModelConfig):
            yield from _refused("megatron_optimizer", f"{section}_optimizer", split.megatron_optimizer, device)
            yield from _refused("megatron_ddp", f"{section}_ddp", split.megatron_ddp, device)
            yield from _buckets(split.megatron_ddp, f"{section}_ddp")
    for role, engines in roles.on_engines.items():
        yield from _refused("sglang", f"roles.{role}.sglang", engines.sglang, device)


def _refused(library: Library, section: str, options: Mapping[str, object], device: Device) -> Iterator[Problem]:
    for name, value in options.items():
        message = refusal(library, name, value, device=device)
        if message is not None:
            yield Problem(key=f"{section}.{name}", message=message)


def refusal(library: Library, name: str, value: object, *, device: Device) -> str | None:
    """Return what is wrong with one option and the way out; None for an option that can be passed on."""
    remedy = owned(library, name, device=device)
    if remedy is not None:
        return remedy
    options = read_library(library)
    field = options.fields.get(name)
    if field is None:
        return f"{options.name} {options.version} has no such option{_nearest(library, name, options, device)}"
    if not field.types:
        return "takes an object of Python, which a recipe cannot hold; remove it"
    if not any(_fits(value, kind) for kind in field.types):
        return f"{json.dumps(value)}: {options.name} takes {' or '.join(field.types)} here"
    return _outside_choices(field, value)


def _recomputation(options: Mapping[str, object], section: str) -> Iterator[Problem]:
    """Yield what breaks Megatron's rules for these fields, which a rank would otherwise report after it started."""
    match options.get("recompute_granularity"):
        case "full":
            missing = [name for name in ("recompute_method", "recompute_num_layers") if name not in options]
            message = "missing; recompute_granularity full needs it (method uniform and num_layers 1 save most memory)"
            yield from (Problem(key=f"{section}.{name}", message=message) for name in missing)
        case "selective" if "recompute_num_layers" in options:
            message = "recompute_granularity selective takes recompute_modules, not layers; remove it"
            yield Problem(key=f"{section}.recompute_num_layers", message=message)
        case None:
            details = [
                name for name in ("recompute_method", "recompute_num_layers", "recompute_modules") if name in options
            ]
            message = "does nothing without recompute_granularity; set that to full or selective, or remove this"
            yield from (Problem(key=f"{section}.{name}", message=message) for name in details)


def _buckets(options: Mapping[str, object], section: str) -> Iterator[Problem]:
    if "bucket_size" in options and not options.get("overlap_grad_reduce"):
        message = "does nothing without overlap_grad_reduce; set that to true, or remove this"
        yield Problem(key=f"{section}.bucket_size", message=message)


def _nearest(library: Library, name: str, options: NativeLibrary, device: Device) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), options.fields, n=1, cutoff=0.6)
    if not near:
        return "; remove it"
    remedy = owned(library, near[0], device=device)
    return f"; did you mean {near[0]}?" if remedy is None else f"; {near[0]}: {remedy}"


def _fits(value: object, kind: str) -> bool:
    if kind.startswith("list["):
        item_kind = kind.removeprefix("list[").removesuffix("]")
        return isinstance(value, list) and bool(value) and all(_fits(item, item_kind) for item in value)
    # In Python a truth value is also an int.
    return isinstance(value, _PYTHON_TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))


def _outside_choices(field: NativeField, value: object) -> str | None:
    items = value if isinstance(value, list) else [value]
    wrong = [item for item in items if item not in field.choices]
    if not field.choices or not wrong:
        return None
    return f"{json.dumps(wrong[0])}: one of {', '.join(str(choice) for choice in field.choices)}"


def owned(library: Library, name: str, *, device: Device) -> str | None:
    """Return what to do instead of passing the option on; None for an option that may be passed on."""
    tables = [table for table in OWNED[library] if table is not _SGLANG_ON_CPU or device == "cpu"]
    for table in tables:
        for pattern, remedy in table.items():
            if fnmatchcase(name, pattern):
                return remedy
    return None
