"""Released SGLang on a machine without a GPU: `python -m megarl.engine.cpu <arguments of sglang.launch_server>`.

SGLang's wheel has no compiled kernels for CPUs; this module installs stand-ins in torch before SGLang starts. It is
never run on a machine with a GPU. SGLang's workers are forked, with the stand-ins in place.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from enum import Enum
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from multiprocessing.context import ForkContext
from typing import Protocol

import torch

from megarl.engine.cpu_drafts import KERNELS, draw_first
from megarl.engine.cpu_kernels import (
    add_gated,
    add_product_in_blocks,
    addmm_in_blocks,
    assign_req_to_token_pool,
    mm_in_blocks,
    murmur_hash32,
    own_experts,
    unpinned,
)
from megarl.engine.server import DRAFT_OPTION, run
from megarl.system.imports import uncollected


def install() -> None:
    """Install everything that SGLang lacks on a CPU, once per process."""
    if torch.cuda.is_available():
        raise RuntimeError("megarl.engine.cpu is for machines without a GPU; on this one start megarl.engine.server")
    provide_torchvision()
    kernels = StandIn("sgl_kernel", version="0.0.0+cpu")
    kernels.__dict__["assign_req_to_token_pool_cpu"] = assign_req_to_token_pool
    kernels.__dict__.update(KERNELS)
    sys.modules["sgl_kernel"] = kernels
    torch.library.define("sgl_kernel::murmur_hash32_cpu", "(Tensor seed, Tensor positions, Tensor cols) -> Tensor")
    torch.library.impl("sgl_kernel::murmur_hash32_cpu", "CPU", murmur_hash32)
    _use_gloo_on_arm()
    _allow_deterministic_inference()
    _divide_experts()
    _gate_shared_experts()
    _absorb_latent_keys()
    _turn_latent_keys()
    _add_sinks()
    _add_delta_nets(kernels)
    _unpin_memory()
    _fork_workers()


def _use_gloo_on_arm() -> None:
    """Make SGLang believe that this is not ARM, where it binds threads and reduces through compiled kernels.

    SGLang asks its own function for the architecture, after it has determined (and cached) that this is a CPU.
    """
    from sglang.srt import utils  # noqa: PLC0415 - needs the stand-ins
    from sglang.srt.utils import common  # noqa: PLC0415 - needs the stand-ins

    assert common.is_cpu(), "SGLANG_USE_CPU_ENGINE=1 is not set, or this is neither x86 nor ARM"
    for module in (utils, common):
        module.is_host_cpu_arm64 = lambda: False


def _allow_deterministic_inference() -> None:
    from sglang.srt import batch_invariant_ops  # noqa: PLC0415 - needs the stand-ins
    from sglang.srt.arg_groups import choices  # noqa: PLC0415 - needs the stand-ins

    choices.add_deterministic_attention_backend_choices(["torch_native", "intel_amx"])
    # SGLang refuses latent attention by backends that are not in this list, too. `process` disables the cache.
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native", "intel_amx"])
    batch_invariant_ops.enable_batch_invariant_mode = _enable_batch_invariant_mode


class _Experts(Protocol):
    """The fields of SGLang's layer that are used here."""

    moe_ep_size: int
    w13_weight: torch.Tensor
    w2_weight: torch.Tensor


class _Routing(Protocol):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def _divide_experts() -> None:
    """Let a rank hold a part of the experts: SGLang's CPU version assumes all, unlike its compiled kernels."""
    from sglang.srt.layers.moe import fused_moe_native  # noqa: PLC0415 - needs the stand-ins

    undivided = fused_moe_native.moe_forward_native

    def forward(layer: _Experts, tokens: torch.Tensor, routing: _Routing, config: object) -> torch.Tensor:
        if layer.moe_ep_size == 1:
            output: torch.Tensor = undivided(layer, tokens, routing, config)
            return output
        return own_experts(tokens, routing.topk_weights, routing.topk_ids, layer.w13_weight, layer.w2_weight)

    fused_moe_native.moe_forward_native = forward


def _gate_shared_experts() -> None:
    """Replace the Triton kernel that adds a shared expert's output, before the models that import it."""
    from sglang.kernels.ops.elementwise import elementwise  # noqa: PLC0415 - needs the stand-ins

    elementwise.fused_gate_sigmoid_mul_add = add_gated


def _absorb_latent_keys() -> None:
    """Let latent attention read its cache in every pass: without a word SGLang takes the cached vectors for keys."""
    from sglang.srt.models.deepseek_common import (  # noqa: PLC0415 - needs the stand-ins
        attention_backend_handler as handlers,
    )

    method = handlers.AttnForwardMethod.MLA
    handlers.AttentionBackendRegistry.register("torch_native", lambda *_: method)


def _turn_latent_keys() -> None:
    """Let latent attention have rotary frequencies that nothing scales, as Moonlight: on a CPU SGLang refuses them."""
    from sglang.srt.layers.rotary_embedding import factory  # noqa: PLC0415 - needs the stand-ins

    scaled = factory.get_rope_cpu

    def turn(*arguments: object) -> object:
        if arguments[5] is not None:
            return scaled(*arguments)
        return factory.get_rope(*arguments[:-1])  # without the device

    factory.get_rope_cpu = turn


def _add_sinks() -> None:
    """Give attention in torch sinks. SGLang chooses it, for want of AMX, where a family asks for Intel's."""
    from sglang.srt.layers.attention import torch_native_backend  # noqa: PLC0415 - needs the stand-ins

    from megarl.engine.cpu_attention import SinkAttention  # noqa: PLC0415 - needs the stand-ins

    torch_native_backend.TorchNativeAttnBackend = SinkAttention


def _add_delta_nets(kernels: StandIn) -> None:
    """Give gated delta nets in torch, before the modules that import their kernels."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated  # noqa: PLC0415 - needs the stand-ins

    from megarl.engine import cpu_delta  # noqa: PLC0415 - no other model needs it

    module = StandIn("sgl_kernel.mamba", version=kernels.__version__)
    module.__dict__["causal_conv1d_fn_cpu"] = cpu_delta.convolve
    module.__dict__["causal_conv1d_update_cpu"] = cpu_delta.convolve_next
    module.__dict__["chunk_gated_delta_rule_cpu"] = cpu_delta.read_prompts
    sys.modules["sgl_kernel.mamba"] = module
    for name, schema, function in cpu_delta.OPERATORS:
        torch.library.define(f"sgl_kernel::{name}", schema)
        torch.library.impl(f"sgl_kernel::{name}", "CPU", function)
    fused_norm_gate.rms_norm_gated = cpu_delta.gated_norm
    layernorm_gated.layernorm_fn = cpu_delta.gated_norm_of


def start() -> None:
    """Run the server that the arguments describe, in a process with the stand-ins."""
    if DRAFT_OPTION in sys.argv:
        _draft()
    run()


def _draft() -> None:
    """Let a draft read prompts with attention in torch, and hook its worker: forked ones have the hooks from here."""
    from sglang.srt.speculative import eagle_worker_common  # noqa: PLC0415 - needs the stand-ins
    from sglang.srt.speculative.draft_utils import DraftBackendFactory  # noqa: PLC0415 - needs the stand-ins

    from megarl.engine.drafts import register_hooks  # noqa: PLC0415 - few engines have a draft

    DraftBackendFactory.create_draft_extend_backend = lambda _: None  # it keeps the backend of its runner
    eagle_worker_common.eagle_sample = partial(draw_first, eagle_worker_common.eagle_sample)
    register_hooks(sys.argv)


def _unpin_memory() -> None:
    """Ignore the wish for pinned memory, which adapters and recorded experts have."""
    from sglang.srt.mem_cache.pool_host import common  # noqa: PLC0415 - needs the stand-ins

    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment, misc]
    common.ALLOC_MEMORY_FUNCS["cpu"] = common.alloc_with_pin_memory


class _ForkOnly(ForkContext):
    """A multiprocessing context that ignores SGLang's choice of another one."""

    def set_start_method(self, method: str | None, force: bool = False) -> None:
        pass


def _fork_workers() -> None:
    """Fork the workers. SGLang spawns them for CUDA; each would import SGLang again, which triples the start's time."""
    from sglang.srt.entrypoints import engine  # noqa: PLC0415 - needs the stand-ins

    engine.mp = _ForkOnly()


def _enable_batch_invariant_mode() -> None:
    """Replace SGLang's Triton version: the logits of a request do not depend on the rest of its batch.

    The other operators of a decoder (norms, softmax, attention request by request) treat rows alike already.
    """
    torch.library.impl("aten::mm", "CPU", mm_in_blocks)
    torch.library.impl("aten::addmm", "CPU", addmm_in_blocks)
    # The products of adapters.
    torch.library.impl("aten::addmm_", "CPU", add_product_in_blocks)


class StandIn(types.ModuleType):
    """Replaces a package that is not installed: importing a name succeeds, calling it fails."""

    def __init__(self, name: str, *, version: str) -> None:
        super().__init__(name)
        self.__version__ = version
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_arguments: object, **_options: object) -> object:
            raise NotImplementedError(f"{self.__name__}.{name} has no stand-in on a CPU")

        return missing


class _InterpolationMode(Enum):
    """torchvision's, of which transformers builds a table when it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def provide_torchvision() -> None:
    """Let SGLang import torchvision where it is not installed; call it before transformers is imported.

    No build of torchvision on PyPI fits a CPU build of torch. transformers works without one, but SGLang's server
    imports it, and through transformers' image processors again. Only models of images call it.
    """
    if find_spec("torchvision") is not None:
        return
    modules = {
        name: StandIn(name, version="0.28.0")
        for name in (
            "torchvision",
            "torchvision.io",
            "torchvision.transforms",
            "torchvision.transforms.functional",
            "torchvision.transforms.v2",
            "torchvision.transforms.v2.functional",
        )
    }
    for name, module in modules.items():
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(modules[parent], leaf, module)
        module.__dict__["InterpolationMode"] = _InterpolationMode
    sys.modules.update(modules)


if __name__ == "__main__":
    with uncollected():
        install()
    start()
