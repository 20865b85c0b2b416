"""Two operators that torchvision expects to find. Knows nothing of engines.

The torchvision of PyPI is a CUDA build: beside a CPU build of torch its compiled half does not load, and importing it,
which both SGLang and every model class of transformers do, fails while it describes `nms` and `qnms`. Declared here,
never implemented: nobody calls them on text.
"""

from __future__ import annotations

import torch

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_torchvision_ops() -> None:
    """Make `import torchvision` succeed beside a CPU build of torch. Does nothing the second time, or beside CUDA."""
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", _SIGNATURE)
