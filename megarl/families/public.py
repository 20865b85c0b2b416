"""Numbers that the shapes of many public models share. Pure."""

from __future__ import annotations

from megarl.families.shape import ModelShape


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
