"""The CPU stand-in for Megatron: released megatron-core, unpatched, on a machine without a GPU.

Megatron calls `torch.cuda` for devices, streams and random states, and creates tensors with `device="cuda"`. This
module replaces those calls by their CPU equivalents and adds the collectives that gloo lacks. It is the one place in
`train` that assigns into another package's modules; it is used only with `device: cpu` and changes no arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def install() -> None:
    """Replace the functions of `torch.cuda` that Megatron calls, in this process. Calling it again changes nothing."""
    assert not torch.cuda.is_available(), "the CPU stand-in is for machines without a GPU"
    for name, function in _CUDA_FUNCTIONS.items():
        setattr(torch.cuda, name, function)
    # Megatron keeps one random state per parallel domain on the device; here it is the state of the CPU's generator.
    for name, function in _RANDOM_FUNCTIONS.items():
        setattr(megatron_random, name, function)
    for name, method in _TENSOR_METHODS.items():
        setattr(torch.Tensor, name, method)
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    for name, collective in _COLLECTIVES.items():
        setattr(mappings, name, collective)


@contextlib.contextmanager
def literal_devices() -> Iterator[None]:
    """Within the context, in this thread, `device="cuda"` means the CPU. A replaced `torch.zeros` would not end."""
    with _CudaMeansCpu():
        yield


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if kwargs and kwargs.get("device") == "cuda":
            return func(*args, **{**kwargs, "device": _CPU})
        return func(*args, **(kwargs or {}))


class _Stream:
    """A stream that has nothing to wait for."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        return self


def _nothing(*_: object, **__: object) -> None: ...


def _to_host(tensor: object, *, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Convert to numpy on request, which Megatron skips for tensors that are on the host already."""
    del record_stream
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


_gather_along_first_dim = mappings._gather_along_first_dim
_reduce_scatter_along_first_dim = mappings._reduce_scatter_along_first_dim


def _gather(
    values: torch.Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, use_global_buffer: bool = False
) -> torch.Tensor:
    """Gather; parts of unequal size are broadcast one by one, because gloo gathers equal parts only."""
    if sizes is None or group.size() == 1:
        gathered: torch.Tensor = _gather_along_first_dim(values, group, sizes, use_global_buffer)
        return gathered
    parts = [values.new_empty((size, *values.shape[1:])) for size in sizes]
    parts[group.rank()] = values.contiguous()
    for source, part in enumerate(parts):
        if part.numel():
            dist.broadcast(part, group=group, group_src=source)
    return torch.cat(parts)


def _reduce_scatter(
    values: torch.Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, use_global_buffer: bool = False
) -> torch.Tensor:
    if sizes is None or group.size() == 1:
        reduced: torch.Tensor = _reduce_scatter_along_first_dim(values, group, sizes, use_global_buffer)
        return reduced
    parts = [part.clone() for part in torch.split(values, sizes)]
    for target, part in enumerate(parts):
        if part.numel():
            dist.reduce(part, group=group, group_dst=target)
    return parts[group.rank()]


def _rng_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(state)


_tensor_type = torch.Tensor.type


def _type(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
    """Return the type name of a GPU tensor, by which Megatron recognises dtypes; conversions are unchanged."""
    result = _tensor_type(tensor, *args, **kwargs)  # type: ignore[call-overload]
    # Within `literal_devices` torch calls this method once more from the original one.
    if isinstance(result, str) and not result.startswith("torch.cuda."):
        return result.replace("torch.", "torch.cuda.", 1)
    return result


_CUDA_FUNCTIONS: Mapping[str, object] = {
    "current_device": lambda: _CPU,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "Stream": _Stream,
    "current_stream": _Stream,
    "default_stream": _Stream,
    "stream": lambda _: contextlib.nullcontext(),
    "manual_seed": torch.manual_seed,
    "get_rng_state": _rng_state,
    "set_rng_state": _set_rng_state,
}

_COLLECTIVES: Mapping[str, object] = {
    "_gather_along_first_dim": _gather,
    "_reduce_scatter_along_first_dim": _reduce_scatter,
}

_RANDOM_FUNCTIONS: Mapping[str, object] = {"_get_cuda_rng_state": _rng_state, "_set_cuda_rng_state": _set_rng_state}

_TENSOR_METHODS: Mapping[str, object] = {"cuda": lambda tensor, *_, **__: tensor, "type": _type}
