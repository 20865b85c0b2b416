"""Records the inputs and outputs of a rank's modules, to be compared with an engine's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from megarl.train.model import Model
from megarl.weights.algebra.slices import Holding
from megarl.weights.recordings import ModuleHook, Recorder, module_hooks, write_patches


@contextmanager
def recorded(models: Sequence[Model], holding: Holding, path: Path, *, part: int) -> Iterator[None]:
    """Record the pass inside the block and write it to `path`; `part` is this rank's part of a sequence."""
    modules = {
        f"chunk{index}.{name}": module for index, model in enumerate(models) for name, module in model.named_modules()
    }
    # If micro-batches come in multiples, the sample is in the first and the others are padding.
    recorder = Recorder(modules, recordable(module_hooks(holding), modules), max_calls=1)
    try:
        yield
    finally:
        recorder.close()
    write_patches(path, recorder.patches(part=part))


def recordable(hooks: Iterable[ModuleHook], modules: Mapping[str, torch.nn.Module]) -> Iterator[ModuleHook]:
    """Yield the hooks that these modules have: the input of a layer with a norm inside is not the norm's output, and
    grouped experts have no modules of their own."""
    for hook in hooks:
        module = modules.get(hook.module)
        if module is not None:
            yield replace(hook, inputs=()) if hasattr(module, "layer_norm_weight") else hook
        elif not _is_inside(hook.module):
            # The recorder reports what is missing for no known reason.
            yield hook


def _is_inside(module: str) -> bool:
    """Whether Transformer Engine's layers have this module's weights inside another one."""
    return ".local_experts." in module or module.endswith(("input_layernorm", "pre_mlp_layernorm"))
