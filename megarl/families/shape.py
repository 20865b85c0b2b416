"""The shape of a model: the numbers that its tensors, its layers and its costs follow from. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from megarl.routes import RouteShape

Activation: TypeAlias = Literal["silu", "gelu_tanh", "clamped"]
"""The function of the gate of a feed-forward block; `clamped` is gpt-oss's, whose gate and up rows alternate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's scaling of the rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN's scaling of the rotary frequencies (arXiv 2309.00071), as Qwen uses it for long contexts."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """Channels that turn more often than the first in the original context are kept, less often than the second
    stretched by `factor`."""
    truncate: bool = True
    """The bounds between them are whole channels."""
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def magnitude(self) -> float:
        """The factor of rotated queries and keys."""
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture in place of the feed-forward block: a router sends each token to a few of them."""

    num: int
    per_token: int
    is_normalized: bool
    """A token's weights add up to 1 over the experts it is sent to; false: over all experts."""
    shared: int = 0
    """Inner size of the expert that every token is sent to; 0 is none."""
    is_shared_gated: bool = True
    """Whether a gate of its own weighs the output of the shared expert."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """The function that turns the router's logits into the weights of experts."""
    has_bias: bool = False
    """Whether a bias, which no gradient changes, is added to the scores before experts are chosen by them."""
    scale: float = 1.0
    """Factor of the weights of a token's experts."""
    num_groups: int = 1
    groups_per_token: int = 1
    """Experts are in groups of equal size, and a token is sent to those of the best few groups."""
    num_dense_layers: int = 0
    """Layers in front with a dense block of `ModelShape.dense_hidden` in place of a mixture."""

    @property
    def is_alone(self) -> bool:
        """Whether no layer has a feed-forward block beside routed experts."""
        return not self.shared and not self.num_dense_layers


def sigmoid_experts(
    *,
    num: int,
    per_token: int,
    shared: int,
    scale: float,
    num_dense: int,
    num_groups: int = 1,
    groups_per_token: int = 1,
) -> Experts:
    """Return a mixture with a sigmoid router, a bias of its scores, and a shared expert without a gate."""
    return Experts(
        num=num,
        per_token=per_token,
        is_normalized=True,
        shared=shared,
        is_shared_gated=False,
        score="sigmoid",
        has_bias=True,
        scale=scale,
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        num_dense_layers=num_dense,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWidths:
    """Attention whose queries, keys and values are products of small vectors, of which an engine caches the keys'."""

    query_rank: int | None
    """Size of the vector that queries come from; None: they come from the hidden state."""
    key_rank: int
    """Size of the vector that keys and values come from."""
    plain: int
    """Channels of a head's query and key that do not turn with the position."""
    rotary: int
    """Channels that do; keys of all heads share them."""
    value: int
    """Channels of a head's value: `ModelShape.head_dim`."""

    @property
    def query(self) -> int:
        return self.plain + self.rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWidths:
    """A gated delta net in place of attention: each head has a state, which every token decays and corrects."""

    key_heads: int
    value_heads: int
    """Each key head belongs to as many of them."""
    key: int
    """Channels of a head's query and key."""
    value: int
    kernel: int
    """Tokens, its own included, that a short convolution reads before queries, keys and values."""

    @property
    def keys(self) -> int:
        """Channels of all heads."""
        return self.key_heads * self.key

    @property
    def values(self) -> int:
        return self.value_heads * self.value

    @property
    def convolved(self) -> int:
        """Channels of queries, keys and values together."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """Rows of the projection of the hidden state: with gates of the output, and two numbers for each value head."""
        return self.convolved + self.values + 2 * self.value_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """The tower that makes hidden states of an image, and the tokens that they take the place of. It is not trained."""

    num_layers: int
    hidden: int
    ffn: int
    heads: int
    patch: int
    """Pixels on each side of a patch, the unit that the tower computes with."""
    merge: int
    """Patches on each side of a token."""
    frames: int
    """Copies of a still image, which the first layer expects."""
    is_gated: bool
    """Whether feed-forward blocks have three matrices."""
    image_token: int
    video_token: int
    start_token: int
    end_token: int
    sections: tuple[int, int, int]
    """Rotary frequencies that turn with the time, the row and the column of a token."""
    is_interleaved: bool = False
    """Whether frequencies of the three take turns, or are in three runs."""
    window: int = 0
    """Pixels on each side of the windows that layers attend within; 0: all layers see the whole image."""
    whole_layers: tuple[int, ...] = ()
    """Layers that see the whole image where the others have windows."""
    num_positions: int = 0
    """Rows of a learnt table of positions; 0 is none."""
    deep_layers: tuple[int, ...] = ()
    """Layers of the tower whose output is added behind the first layers of the text, one behind each."""

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return 3 * self.frames * self.patch**2

    @property
    def token_pixels(self) -> int:
        """Pixels on each side of a token."""
        return self.patch * self.merge

    @property
    def axes(self) -> tuple[int, ...]:
        """Return what each rotary frequency turns with: 0 the time, 1 the row, 2 the column."""
        if not self.is_interleaved:
            return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))
        axes = [0] * sum(self.sections)
        for axis in (1, 2):
            axes[axis : 3 * self.sections[axis] : 3] = [axis] * len(axes[axis : 3 * self.sections[axis] : 3])
        return tuple(axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer: RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

    family: str
    """A `Family.name`."""
    num_layers: int
    hidden: int
    ffn_hidden: int
    """Inner size of a feed-forward block; in a mixture, of one expert."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_context_tokens: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | YarnScaling | None
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    dtype: str
    """The checkpoint's: float32, bfloat16 or float16."""
    experts: Experts | None = None
    """None in a dense model."""
    has_value_head: bool = False
    """True for a critic: one number per token in the place of logits."""
    dense_hidden: int = 0
    """Inner size of the dense blocks of a mixture; 0 where every layer is a mixture."""
    rotary_dim: int | None = None
    """Channels of a head that turn with the position, the first ones; None: all."""
    latent: LatentWidths | None = None
    """None: queries, keys and values are products of the hidden state."""
    attention_scale: float | None = None
    """Factor of the logits of attention; None: one over the root of `head_dim`."""
    window: int | None = None
    """Tokens before its own that a token sees in the layers of `window_layers`."""
    window_layers: tuple[int, ...] = ()
    window_theta: float | None = None
    """Base of the rotary frequencies in these layers, which nothing scales; None: as in the others."""
    has_sinks: bool = False
    """Whether each head has a logit that takes its share of attention and has no value."""
    has_biases: bool = False
    """Whether every linear layer has a bias, that of the router and of experts included."""
    activation: Activation = "silu"
    has_centred_norms: bool = False
    """Whether norms multiply by one plus their weight."""
    has_post_norms: bool = False
    """Whether outputs of attention and feed-forward block are normed before they are added."""
    embedding_scale: float = 1.0
    delta: DeltaWidths | None = None
    """Gated delta nets in the layers of `delta_layers`, in place of attention; None: every layer has attention."""
    delta_layers: tuple[int, ...] = ()
    has_output_gate: bool = False
    """Whether a gate weighs each channel of attention's output; rows of a head's gate follow those of its query."""
    vision: VisionShape | None = None
    """None where prompts are text alone."""

    @property
    def routes(self) -> RouteShape | None:
        """None in a dense model."""
        experts = self.experts
        if experts is None:
            return None
        return RouteShape(
            num_layers=self.num_layers,
            per_token=experts.per_token,
            num_experts=experts.num,
            dense_layers=frozenset(range(experts.num_dense_layers)),
        )

    def as_critic(self) -> ModelShape:
        """Return the same shape with a value head in place of the language head."""
        return replace(self, has_value_head=True, has_tied_embeddings=False)


def public_shape(
    family: str,
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    is_tied: bool = False,
    has_qkv_bias: bool = False,
    has_qk_norm: bool = False,
) -> ModelShape:
    """Return a shape in bfloat16 with heads of 128 channels and a context of 32768 tokens."""
    return ModelShape(
        family=family,
        num_layers=layers,
        hidden=hidden,
        ffn_hidden=ffn,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        vocab=vocab,
        max_context_tokens=32768,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        has_tied_embeddings=is_tied,
        has_qkv_bias=has_qkv_bias,
        has_qk_norm=has_qk_norm,
        dtype="bfloat16",
    )
