"""Sizes that are no keys of a recipe: nobody has to choose them, but who acts on them and who plans must agree."""

from __future__ import annotations

LOGIT_CHUNK_BYTES = 640 << 20
"""Of logits at a time: large enough for full-speed matrix kernels, small beside the activations."""

PAD_MULTIPLE = 8
"""Packed lengths are rounded up to this times the tensor-parallel size: even shares under sequence parallelism."""

CPU_CACHED_TOKENS = 32_768
"""Of an engine's KV cache on a CPU: there it could take all memory of the machine."""
