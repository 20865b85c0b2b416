"""The shape of a model, read once from its Hugging Face `config.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from megarl.errors import ConfigError, Problem
from megarl.routes import RouteShape


class Family(StrEnum):
    LLAMA = "llama"
    QWEN2 = "qwen2"
    MIXTRAL = "mixtral"
    QWEN2_MOE = "qwen2_moe"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"


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
    """A mixture in place of every layer's feed-forward block: a router sends each token to a few of them."""

    num: int
    per_token: int
    is_normalized: bool
    """A token's weights add up to 1 over the experts it is sent to; false: over all experts."""
    shared: int = 0
    """Inner size of the expert that every token is sent to, through a gate of its own; 0 is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer: RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

    family: Family
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

    @property
    def routes(self) -> RouteShape | None:
        """None in a dense model."""
        experts = self.experts
        if experts is None:
            return None
        return RouteShape(num_layers=self.num_layers, per_token=experts.per_token, num_experts=experts.num)

    def as_critic(self) -> ModelShape:
        """Return the same shape with a value head in place of the language head."""
        return replace(self, has_value_head=True, has_tied_embeddings=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How a family differs from the others; everything else is in `config.json`."""

    architecture: str
    """The name of the language model in transformers."""
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_experts: bool = False
    has_shared_expert: bool = False
    block: str = "mlp."
    """Prefix of the feed-forward block in a layer of a checkpoint, and in SGLang."""
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of the three matrices of an expert, or of a dense block."""


TRAITS: Mapping[Family, Traits] = {
    Family.LLAMA: Traits(architecture="LlamaForCausalLM"),
    Family.MIXTRAL: Traits(
        architecture="MixtralForCausalLM", has_experts=True, block="block_sparse_moe.", matrices=("w1", "w3", "w2")
    ),
    Family.QWEN2: Traits(architecture="Qwen2ForCausalLM", has_qkv_bias=True),
    Family.QWEN2_MOE: Traits(
        architecture="Qwen2MoeForCausalLM", has_qkv_bias=True, has_experts=True, has_shared_expert=True
    ),
    Family.QWEN3: Traits(architecture="Qwen3ForCausalLM", has_qk_norm=True),
    Family.QWEN3_MOE: Traits(architecture="Qwen3MoeForCausalLM", has_qk_norm=True, has_experts=True),
}

_FAMILIES = {traits.architecture: family for family, traits in TRAITS.items()}


def critic_architecture(language_model: str) -> str:
    """Return transformers' name for a model with the same layers and one output per token."""
    return language_model.replace("ForCausalLM", "ForSequenceClassification")


_CRITICS = {critic_architecture(name): family for name, family in _FAMILIES.items()}


def read_model_shape(folder: Path) -> ModelShape:
    """Return the shape of the model in `folder`; raise ConfigError for what is missing or not supported."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise _error(f"{path} does not exist; model.path is a folder in Hugging Face format") from None
    except json.JSONDecodeError as error:
        raise _error(f"{path} is not JSON: {error}") from None
    architectures = raw.get("architectures") or ["(none)"]
    is_critic = architectures[0] in _CRITICS
    family = (_FAMILIES | _CRITICS).get(architectures[0])
    if family is None:
        supported = ", ".join(_FAMILIES)
        raise _error(f"{path}: architecture {architectures[0]} is not supported; supported are {supported}")
    if not TRAITS[family].has_qkv_bias and (raw.get("attention_bias") or raw.get("mlp_bias")):
        raise _error(f"{path}: attention_bias and mlp_bias are not supported for {family}; choose a model without")
    if not raw.get("qkv_bias", True):
        raise _error(f"{path}: qkv_bias false is not supported; choose a model with these biases")
    if raw.get("use_sliding_window") or (family is Family.MIXTRAL and raw.get("sliding_window")):
        raise _error(f"{path}: a sliding window is not supported; set it to false or null if the context allows")
    try:
        shape = _shape(raw, family)
    except KeyError as error:
        raise _error(f"{path}: {error.args[0]} is missing") from None
    if family is Family.MIXTRAL and shape.head_dim * shape.num_heads != shape.hidden:
        raise _error(f"{path}: SGLang does not read head_dim {shape.head_dim} of {family}; choose a model without it")
    return shape.as_critic() if is_critic else shape


def _shape(raw: dict[str, object], family: Family) -> ModelShape:
    def integer(key: str, default: int | None = None) -> int:
        value = default if raw.get(key) is None else raw[key]
        if value is None:
            raise KeyError(key)
        return int(value)  # type: ignore[call-overload,no-any-return]

    def experts() -> Experts:
        # transformers 5 writes `num_local_experts`; earlier versions `num_experts`.
        num = integer("num_local_experts" if "num_local_experts" in raw else "num_experts")
        shared = integer("shared_expert_intermediate_size") if traits.has_shared_expert else 0
        # Mixtral always normalises, and has no key for it.
        is_normalized = family is Family.MIXTRAL or bool(raw.get("norm_topk_prob", False))
        per_token = integer("num_experts_per_tok")
        return _experts(raw, num=num, per_token=per_token, is_normalized=is_normalized, shared=shared)

    num_heads = integer("num_attention_heads")
    hidden = integer("hidden_size")
    traits = TRAITS[family]
    is_mixture = traits.has_experts
    # transformers 5 writes `rope_parameters`; earlier versions `rope_theta` and `rope_scaling`.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    assert isinstance(rope, dict)
    return ModelShape(
        family=family,
        num_layers=integer("num_hidden_layers"),
        hidden=hidden,
        ffn_hidden=integer(
            "moe_intermediate_size" if is_mixture and family is not Family.MIXTRAL else "intermediate_size"
        ),
        num_heads=num_heads,
        num_kv_heads=integer("num_key_value_heads", num_heads),
        head_dim=integer("head_dim", hidden // num_heads),
        vocab=integer("vocab_size"),
        max_context_tokens=integer("max_position_embeddings"),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),  # type: ignore[arg-type]
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),  # type: ignore[arg-type]
        rope_scaling=_rope_scaling(rope),
        has_tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        has_qkv_bias=traits.has_qkv_bias,
        has_qk_norm=traits.has_qk_norm,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        experts=experts() if is_mixture else None,
    )


def _experts(raw: dict[str, object], *, num: int, per_token: int, is_normalized: bool, shared: int) -> Experts:
    if raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
        raise _error("config.json: layers without experts are not supported; choose a model with experts in every one")
    if per_token == 1 and is_normalized:
        # The one weight is always 1.
        raise _error(
            "config.json: norm_topk_prob with num_experts_per_tok 1 leaves the router untrained; not supported"
        )
    return Experts(num=num, per_token=per_token, is_normalized=is_normalized, shared=shared)


def _rope_scaling(rope: dict[str, object]) -> RopeScaling | YarnScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in (None, "default"):
        return None
    if kind == "yarn":
        return _yarn(rope)
    if kind != "llama3":
        raise _error(f"config.json: rope type {kind} is not supported; supported are default, llama3 and yarn")
    return RopeScaling(
        factor=float(rope["factor"]),  # type: ignore[arg-type]
        low_freq_factor=float(rope["low_freq_factor"]),  # type: ignore[arg-type]
        high_freq_factor=float(rope["high_freq_factor"]),  # type: ignore[arg-type]
        original_max_position=int(rope["original_max_position_embeddings"]),  # type: ignore[call-overload]
    )


def _yarn(rope: dict[str, object]) -> YarnScaling:
    """Return the scaling where transformers and SGLang read the same from the fields."""
    missing = [name for name in ("factor", "original_max_position_embeddings") if rope.get(name) is None]
    if missing:
        raise _error(
            f"config.json: rope type yarn lacks {' and '.join(missing)}; "
            "add it as the model's page says, such as factor 4.0 for an original context of 32768"
        )
    for name in ("attention_factor", "attn_factor"):
        if rope.get(name) is not None:
            reader = "SGLang does not read" if name == "attention_factor" else "transformers does not read"
            raise _error(f"config.json: {reader} {name} of rope type yarn; remove it, or use mscale and mscale_all_dim")
    if (rope.get("mscale") is None) != (rope.get("mscale_all_dim") is None):
        raise _error("config.json: rope type yarn needs both of mscale and mscale_all_dim, or neither")
    numbers = {
        name: float(value)  # type: ignore[arg-type]
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        if (value := rope.get(name)) is not None
    }
    factor = float(rope["factor"])  # type: ignore[arg-type]
    if factor <= 1:
        raise _error(f"config.json: factor {factor:g} of rope type yarn stretches nothing; it must be above 1")
    return YarnScaling(
        factor=factor,
        original_max_position=int(rope["original_max_position_embeddings"]),  # type: ignore[call-overload]
        truncate=bool(rope.get("truncate", True)),
        **numbers,
    )


def _error(message: str) -> ConfigError:
    return ConfigError("model.path", (Problem(key="model.path", message=message),))
