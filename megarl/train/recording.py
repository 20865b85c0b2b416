"""Records the inputs and outputs of a rank's modules, to be compared with an engine's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megarl.train.layer_spec import recordable
from megarl.train.model import Model
from megarl.weights.algebra.slices import Holding
from megarl.weights.hook_points import module_hooks
from megarl.weights.recordings import Recorder, write_patches


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
