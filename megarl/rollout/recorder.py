"""What passes through an SGLang model, inside its TP process: torch's own hooks on the modules it serves with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megarl.compare.hook_points import LM_HEAD, module_hooks
from megarl.compare.recordings import (
    ActivationPatch,
    PatchPlace,
    Recorder,
    WeightDigests,
    weight_digests,
    write_patches,
)
from megarl.weights.algebra.slices import Layout

FILE_PREFIX = "engine_"
_LOGITS = "logits_processor"


class EngineRecorder:
    """One request at a time: passes follow each other, the prompt's first and then one per token."""

    def __init__(self, model: torch.nn.Module, layout: Layout, rank: int) -> None:
        self._model = model
        self._layout = layout
        self._rank = rank
        modules = dict(model.named_modules())
        self._recorder = Recorder(modules, module_hooks(layout.by_rank[rank]))
        self._logits: list[tuple[int, Tensor]] = []
        self._num_tokens = 0
        self._handle = modules[_LOGITS].register_forward_hook(self._keep_logits, with_kwargs=True)

    def close(self) -> None:
        self._recorder.close()
        self._handle.remove()

    def write(self, folder: Path) -> None:
        write_patches(folder / f"{FILE_PREFIX}{self._rank}.safetensors", self._patches())

    def weight_digests(self) -> WeightDigests:
        tensors = dict(self._model.named_parameters())
        return weight_digests(self._layout.by_rank[self._rank], self._layout.canonical, tensors)

    def _patches(self) -> Iterator[ActivationPatch]:
        yield from self._recorder.patches()
        for token, values in self._logits:
            yield ActivationPatch(place=PatchPlace(hook_point=LM_HEAD, token=token, column=0), values=values)

    def _keep_logits(
        self, _: torch.nn.Module, arguments: tuple[object, ...], named: dict[str, object], output: object
    ) -> None:
        """Logits are made of the last position of a pass; every rank has all columns of them."""
        logits = getattr(output, "next_token_logits", None)
        input_ids = arguments[0] if arguments else named["input_ids"]
        assert isinstance(input_ids, Tensor), f"logits of {type(input_ids).__name__}"
        self._num_tokens += len(input_ids)
        if isinstance(logits, Tensor):
            # A copy: sampling divides them by the temperature in place.
            self._logits.append((self._num_tokens - 1, logits.detach().to("cpu", torch.float32, copy=True)))
