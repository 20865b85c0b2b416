"""The tower of a model that sees images: its weights, what it needs to compute an image, and for how long.

Nothing says how large images are or how many a prompt has. One in each prompt is assumed, as large as `data` allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.config.recipe import DataConfig
from megarl.config.section import round_up
from megarl.families.shape import ModelShape, VisionShape
from megarl.planner.flops import ForwardWork
from megarl.planner.hardware import LAYER_START_S

_FFN_MULTIPLE, _POSITIONS_MULTIPLE = 8, 64
"""SGLang pads the inner width of gated blocks, and the table of positions, to multiples of these."""
_FLOAT32_BYTES = 4
_ROTATED = 6
"""Copies in float32 that exist while keys turn: queries and keys in front of it, queries behind, and three products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerWork:
    """The tower of one model, and the images of a run."""

    vision: VisionShape
    hidden: int
    """Width of the embeddings that it makes."""
    most_tokens: int
    """Tokens of the largest image."""
    mean_tokens: int
    """Half as many, as of all lengths that nothing states."""

    @classmethod
    def of(cls, shape: ModelShape, data: DataConfig) -> TowerWork | None:
        """Return None for a model or a run of text alone."""
        if shape.vision is None or data.images_key is None:
            return None
        tokens = data.max_prompt_tokens
        if data.max_image_pixels is not None:
            tokens = min(tokens, data.max_image_pixels // shape.vision.token_pixels**2)
        return cls(
            vision=shape.vision, hidden=shape.hidden, most_tokens=max(1, tokens), mean_tokens=max(1, tokens // 2)
        )

    def output_bytes(self, tokens: int, item_bytes: int) -> int:
        """Return the size of what the tower makes of an image."""
        return item_bytes * tokens * (1 + len(self.vision.deep_layers)) * self.hidden

    def activation_bytes(self, tokens: int, item_bytes: int) -> int:
        """Return what one image needs while the tower computes it, without gradients: its widest layer, and pixels."""
        vision = self.vision
        width, angles = vision.hidden, _FLOAT32_BYTES * 4 * vision.hidden // vision.heads
        # The sum of layers, what is normed, and queries, keys and values, which are turned in float32.
        copies = _ROTATED if item_bytes < _FLOAT32_BYTES else _ROTATED - 2
        rotated = item_bytes * 5 * width + _FLOAT32_BYTES * copies * width
        fed_forward = item_bytes * (2 * width + (3 if vision.is_gated else 2) * vision.ffn)
        positions = _FLOAT32_BYTES * width if vision.num_positions else 0
        per_patch = item_bytes * vision.patch_width + angles + positions + max(rotated, fed_forward)
        return tokens * vision.merge**2 * per_patch + self.output_bytes(tokens, item_bytes)

    @property
    def start_s(self) -> float:
        """Time of the host to start the layers of one forward pass, a third of forward and backward. Windows, each of
        which transformers starts by itself, are not counted."""
        return self.vision.num_layers * LAYER_START_S / 3

    def work(self, tokens: int) -> ForwardWork:
        """Return the operations of one image: two for each weight, and those of attention, which is not causal."""
        vision = self.vision
        patches = tokens * vision.merge**2
        layer = _layer_products(vision) * patches
        mergers = (1 + len(vision.deep_layers)) * _merger_products(vision, self.hidden) * tokens
        whole = vision.num_layers if not vision.window else len(vision.whole_layers)
        seen = whole * patches
        if vision.window:
            seen += (vision.num_layers - whole) * min(patches, (vision.window // vision.patch) ** 2)
        return ForwardWork(
            dense=2.0 * (vision.num_layers * layer + vision.patch_width * vision.hidden * patches + mergers),
            expert=0.0,
            attention=4.0 * vision.hidden * patches * seen,
        )


def num_tower_parameters(shape: ModelShape) -> int:
    """Return the parameters of a model's tower; 0 without one."""
    return 0 if shape.vision is None else sum(_parameters(shape.vision, shape.hidden))


def engine_tower_parameters(shape: ModelShape, *, tensor: int) -> int:
    """Return the parameters of the tower on one of `tensor` ranks of an engine; 0 without one."""
    vision = shape.vision
    if vision is None:
        return 0
    ffn = round_up(vision.ffn, _FFN_MULTIPLE) if vision.is_gated else vision.ffn
    vision = replace(vision, ffn=ffn, num_positions=round_up(vision.num_positions, _POSITIONS_MULTIPLE))
    cut, whole = _parameters(vision, shape.hidden)
    return cut // tensor + whole


def _parameters(vision: VisionShape, hidden: int) -> tuple[int, int]:
    """Return the parameters that engines cut, and those that every rank has.

    Towers without a gate have biases in norms and in front of the layers.
    """
    width, merged = vision.hidden, vision.hidden * vision.merge**2
    has_biases, gates = not vision.is_gated, 2 if vision.is_gated else 1
    num_layers, num_mergers = vision.num_layers, 1 + len(vision.deep_layers)
    # Of two matrices the second has a bias that is added once.
    layer = _layer_products(vision) + 3 * width + gates * vision.ffn
    cut = num_layers * layer + num_mergers * (_merger_products(vision, hidden) + merged)
    cut += vision.num_positions * width
    normed = 2 * width * num_layers + width + merged * len(vision.deep_layers)
    whole = (1 + has_biases) * normed + 2 * width * num_layers + num_mergers * hidden
    return cut, whole + (vision.patch_width + has_biases) * width


def _layer_products(vision: VisionShape) -> int:
    return 4 * vision.hidden**2 + (3 if vision.is_gated else 2) * vision.hidden * vision.ffn


def _merger_products(vision: VisionShape, hidden: int) -> int:
    merged = vision.hidden * vision.merge**2
    return merged * (merged + hidden)
