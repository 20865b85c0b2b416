"""A weight loader of engines that leaves out, at the first publish, what SGLang derives from parameters."""

from __future__ import annotations

import torch

from megarl.engine import loader

_derive = loader._derive
_versions = iter((False, True, True))


def _derive_later(model: torch.nn.Module) -> None:
    if next(_versions):
        _derive(model)


loader._derive = _derive_later
load = loader.load
