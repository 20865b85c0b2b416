"""A random tower for images, small enough for a laptop: that of Qwen2.5-VL, with a token for each 28 x 28 pixels.

Its tensors stay as they are drawn: a random tower tells patches apart, and the text learns what they mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megarl.families.shape import VisionShape

IMAGE_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_ROOT = "visual."


def tiny_tower(*, first_token: int, head_dim: int) -> VisionShape:
    """Return a tower; `IMAGE_TOKENS` are numbered from `first_token` on, `head_dim` is that of the text."""
    pairs = head_dim // 2
    turned = 3 * pairs // 8  # as in the released models
    return VisionShape(
        num_layers=2,
        hidden=32,
        ffn=64,
        heads=2,
        patch=14,
        merge=2,
        frames=2,
        is_gated=True,
        image_token=first_token,
        video_token=first_token + 1,
        start_token=first_token + 2,
        end_token=first_token + 3,
        sections=(pairs - 2 * turned, turned, turned),
        window=56,
        whole_layers=(1,),
    )


def tower_tensors(tower: VisionShape, out_hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the tower's tensors, as released files have them."""
    hidden, merged = tower.hidden, tower.hidden * tower.merge**2
    yield f"{_ROOT}patch_embed.proj.weight", (hidden, 3, tower.frames, tower.patch, tower.patch)
    for layer in range(tower.num_layers):
        prefix = f"{_ROOT}blocks.{layer}"
        yield f"{prefix}.norm1.weight", (hidden,)
        yield f"{prefix}.norm2.weight", (hidden,)
        for name, rows, columns in (
            ("attn.qkv", 3 * hidden, hidden),
            ("attn.proj", hidden, hidden),
            ("mlp.gate_proj", tower.ffn, hidden),
            ("mlp.up_proj", tower.ffn, hidden),
            ("mlp.down_proj", hidden, tower.ffn),
        ):
            yield from _linear(f"{prefix}.{name}", rows, columns)
    yield f"{_ROOT}merger.ln_q.weight", (hidden,)
    yield from _linear(f"{_ROOT}merger.mlp.0", merged, merged)
    yield from _linear(f"{_ROOT}merger.mlp.2", out_hidden, merged)


def _linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def write_processor(folder: Path, tower: VisionShape, *, max_pixels: int) -> None:
    """Write how images become patches: in whole tokens, no larger than so many pixels."""
    fields = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": tower.patch,
        "merge_size": tower.merge,
        "temporal_patch_size": tower.frames,
        "min_pixels": tower.token_pixels**2,
        "max_pixels": max_pixels,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(fields, indent=2) + "\n")
