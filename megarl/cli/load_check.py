"""Whether transformers makes the same of an exported model as of its source: log-probabilities on a fixed prompt."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import torch

from megarl.checkpoint.locate import CONFIG_FILE, ModelSource
from megarl.errors import CheckpointError, MachineError
from megarl.rollout.cpu_kernels import declare_torchvision_ops
from megarl.weights.executors.tensors import torch_dtype

NUM_TOKENS = 64

_TOLERANCE = 1e-5
"""The same bytes in the same dtype make the same numbers; a wrong configuration makes others."""
_TOKEN_STEP = 7919
"""A prime: the prompt walks through the whole vocabulary."""
_MEMORY_FACTOR = 1.25
_SPARE_BYTES = 1 << 30


class LoadCheck:
    """Made before the export, so that one that cannot be checked is refused before an hour of work."""

    def __init__(self, source: ModelSource, *, dtype: str | None) -> None:
        config = json.loads((source.folder / CONFIG_FILE).read_text())
        self._reference = source.folder
        own_dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        # In the coarser of the two dtypes both have the same weights, to the last bit.
        self._dtype = "bfloat16" if dtype == "bfloat16" else own_dtype
        self.max_difference = float("nan")
        _refuse_too_large(source.folder)

    def __call__(self, folder: Path) -> None:
        expected = logprobs(self._reference, dtype=self._dtype)
        found = logprobs(folder, dtype=self._dtype)
        self.max_difference = float((expected - found).abs().max())
        # Not `>`: what is not a number is a difference too.
        if not self.max_difference <= _TOLERANCE:
            raise CheckpointError(
                f"{folder}: transformers computes other log-probabilities than from {self._reference}: "
                f"they differ by {self.max_difference:g}; nothing was kept"
            )

    def __str__(self) -> str:
        figures = f"{self.max_difference:g} at most over {NUM_TOKENS} tokens in {self._dtype}"
        return f"log-probabilities differ from the source's by {figures}"


@torch.no_grad()
def logprobs(folder: Path, *, dtype: str) -> torch.Tensor:
    """Of every token at every place of the prompt; of a model with another head, what that head says."""
    declare_torchvision_ops()
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    architecture = (json.loads((folder / CONFIG_FILE).read_text()).get("architectures") or ["AutoModelForCausalLM"])[0]
    try:
        model, report = getattr(transformers, architecture).from_pretrained(
            folder, dtype=torch_dtype(dtype), local_files_only=True, output_loading_info=True
        )
    except (AttributeError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: transformers cannot load it: {str(error).splitlines()[0]}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(kind):
            raise CheckpointError(f"{folder}: loaded with transformers it has {kind}: {sorted(report[kind])[:3]}")
    token_ids = torch.arange(NUM_TOKENS) * _TOKEN_STEP % model.config.vocab_size
    outputs = model.eval()(input_ids=token_ids[None], use_cache=False).logits.float()
    assert isinstance(outputs, torch.Tensor)
    return outputs.log_softmax(-1) if outputs.dim() == 3 else outputs


def _refuse_too_large(folder: Path) -> None:
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    needed = int(num_bytes * _MEMORY_FACTOR) + _SPARE_BYTES
    available = _available_bytes()
    if needed > available:
        raise MachineError(
            f"{folder}: loading it to compare log-probabilities needs about {needed / 1e9:.0f} GB of memory, "
            f"{available / 1e9:.0f} GB are available; --no-load-check exports without"
        )


def _available_bytes() -> int:
    available: int = psutil.virtual_memory().available
    return available
