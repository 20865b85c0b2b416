"""Released SGLang on a machine without a GPU: `python -m megarl.rollout.cpu <arguments of sglang.launch_server>`.

SGLang's wheel lacks what only its compiled kernels bring; this module stands in for that before SGLang starts. It is
never loaded where there is a GPU. SGLang spawns its workers, and each of them imports the main module again: whatever
they need runs at module level here.
"""

from __future__ import annotations

import importlib.machinery
import runpy
import sys
import types
from collections.abc import Callable
from typing import Protocol

import torch

from megarl.rollout.cpu_kernels import (
    addmm_in_blocks,
    assign_req_to_token_pool,
    mm_in_blocks,
    murmur_hash32,
    own_experts,
)
from megarl.rollout.torchvision_ops import declare_torchvision_ops


def _install() -> None:
    """Everything SGLang misses on a CPU, once per process."""
    declare_torchvision_ops()
    sys.modules["sgl_kernel"] = _kernel_module()
    torch.library.define("sgl_kernel::murmur_hash32_cpu", "(Tensor seed, Tensor positions, Tensor cols) -> Tensor")
    torch.library.impl("sgl_kernel::murmur_hash32_cpu", "CPU", murmur_hash32)
    _use_gloo_on_arm()
    _allow_deterministic_inference()
    _divide_experts()


class _KernelModule(types.ModuleType):
    """In place of the compiled `sgl_kernel`: importing a name succeeds, calling it does not."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_arguments: object, **_options: object) -> object:
            raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on a CPU")

        return missing


def _kernel_module() -> types.ModuleType:
    module = _KernelModule("sgl_kernel")
    module.__dict__.update(
        __path__=[],
        __spec__=importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True),
        __version__="0.0.0+cpu",
        assign_req_to_token_pool_cpu=assign_req_to_token_pool,
    )
    return module


def _use_gloo_on_arm() -> None:
    """On ARM SGLang binds threads and reduces through compiled kernels; on other CPUs it does without.

    It asks its own function for the architecture, after it has settled (and remembered) that this is a CPU.
    """
    from sglang.srt import utils  # noqa: PLC0415
    from sglang.srt.utils import common  # noqa: PLC0415

    assert common.is_cpu(), "SGLANG_USE_CPU_ENGINE=1 is not set, or this is neither x86 nor ARM"
    for module in (utils, common):
        module.is_host_cpu_arm64 = lambda: False


def _allow_deterministic_inference() -> None:
    from sglang.srt import batch_invariant_ops  # noqa: PLC0415
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices  # noqa: PLC0415

    add_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = _enable_batch_invariant_mode


class _Experts(Protocol):
    """SGLang's layer, as far as it is needed here."""

    moe_ep_size: int
    w13_weight: torch.Tensor
    w2_weight: torch.Tensor


class _Routing(Protocol):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def _divide_experts() -> None:
    """SGLang's CPU version of a mixture takes it that a rank has all experts; its compiled kernels do not."""
    from sglang.srt.layers.moe import fused_moe_native  # noqa: PLC0415

    undivided = fused_moe_native.moe_forward_native

    def forward(layer: _Experts, tokens: torch.Tensor, routing: _Routing, config: object) -> torch.Tensor:
        if layer.moe_ep_size == 1:
            output: torch.Tensor = undivided(layer, tokens, routing, config)
            return output
        return own_experts(tokens, routing.topk_weights, routing.topk_ids, layer.w13_weight, layer.w2_weight)

    fused_moe_native.moe_forward_native = forward


def _enable_batch_invariant_mode() -> None:
    """In place of SGLang's Triton version: the same logits for a request, whatever shares its batch.

    The other operators of a decoder (norms, softmax, attention request by request) treat rows alike as they are.
    """
    torch.library.impl("aten::mm", "CPU", mm_in_blocks)
    torch.library.impl("aten::addmm", "CPU", addmm_in_blocks)


if torch.cuda.is_available():
    raise RuntimeError("megarl.rollout.cpu is for machines without a GPU; start sglang.launch_server there")
_install()

if __name__ == "__main__":
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__")
