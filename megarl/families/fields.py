"""The fields of a `config.json`, as families read them; a field that cannot be used is a ConfigError. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from megarl.errors import ConfigError, Problem
from megarl.families.shape import Experts, ModelShape, RopeScaling, YarnScaling, sigmoid_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    content: Mapping[str, object]
    source: str
    """The file, for messages."""

    def get(self, key: str) -> object:
        return self.content.get(key)

    def has(self, key: str) -> bool:
        """Whether a field is there and neither null nor false."""
        return bool(self.content.get(key))

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.content.get(key)
        value = default if value is None else value
        if value is None:
            self.refuse(f"{key} is missing")
        return int(value)  # type: ignore[call-overload,no-any-return]

    def number(self, key: str, default: float) -> float:
        value = self.content.get(key)
        return default if value is None else float(value)  # type: ignore[arg-type]

    def refuse(self, message: str) -> NoReturn:
        raise refused(f"{self.source}: {message}")

    def refuse_window(self, *keys: str) -> None:
        """Refuse a sliding window where one of the fields has one."""
        if any(self.has(key) for key in keys):
            self.refuse("a sliding window is not supported; set it to false or null if the context allows")

    def refuse_biases(self, family: str) -> None:
        if self.has("attention_bias") or self.has("mlp_bias"):
            self.refuse(f"attention_bias and mlp_bias are not supported for {family}; choose a model without")

    @property
    def rope(self) -> Mapping[str, object]:
        # transformers 5 writes `rope_parameters`; earlier versions `rope_theta` and `rope_scaling`.
        rope = self.content.get("rope_parameters") or self.content.get("rope_scaling") or {}
        assert isinstance(rope, dict), f"{self.source}: rope parameters are {rope}"
        return rope

    def shape(
        self,
        family: str,
        *,
        has_qkv_bias: bool = False,
        has_qk_norm: bool = False,
        experts: Experts | None = None,
        ffn: str = "intermediate_size",
    ) -> ModelShape:
        """Return what most families have in common; `ffn` is the field with the inner size of a block."""
        num_heads, hidden, rope = self.integer("num_attention_heads"), self.integer("hidden_size"), self.rope
        theta = rope.get("rope_theta") or self.content.get("rope_theta") or 10000.0
        return ModelShape(
            family=family,
            num_layers=self.integer("num_hidden_layers"),
            hidden=hidden,
            ffn_hidden=self.integer(ffn),
            num_heads=num_heads,
            num_kv_heads=self.integer("num_key_value_heads", num_heads),
            head_dim=self.integer("head_dim", hidden // num_heads),
            vocab=self.integer("vocab_size"),
            max_context_tokens=self.integer("max_position_embeddings"),
            norm_eps=self.number("rms_norm_eps", 1e-6),
            rope_theta=float(theta),  # type: ignore[arg-type]
            rope_scaling=self._rope_scaling(rope),
            has_tied_embeddings=self.has("tie_word_embeddings"),
            has_qkv_bias=has_qkv_bias,
            has_qk_norm=has_qk_norm,
            dtype=str(self.content.get("dtype") or self.content.get("torch_dtype") or "float32"),
            experts=experts,
        )

    def softmax_experts(self, *, is_normalized: bool, shared: int = 0) -> Experts:
        """Return a mixture in every layer, with the router that most families have."""
        # transformers 5 writes `num_local_experts`; earlier versions `num_experts`.
        num = self.integer("num_local_experts" if "num_local_experts" in self.content else "num_experts")
        per_token = self.integer("num_experts_per_tok")
        if self.content.get("decoder_sparse_step", 1) != 1 or self.has("mlp_only_layers"):
            self.refuse("layers without experts are not supported; choose a model with experts in every one")
        if per_token == 1 and is_normalized:
            # The one weight is always 1.
            self.refuse("norm_topk_prob with num_experts_per_tok 1 leaves the router untrained; not supported")
        return Experts(num=num, per_token=per_token, is_normalized=is_normalized, shared=shared)

    def sigmoid_experts(self, *, num_dense: int) -> Experts:
        """Return the mixtures that DeepSeek-V3 began with; `num_dense` dense layers where no field says otherwise."""
        if self.get("norm_topk_prob") is False:
            self.refuse("norm_topk_prob false is not supported with a sigmoid router; choose a model with it")
        return sigmoid_experts(
            num=self.integer("n_routed_experts"),
            per_token=self.integer("num_experts_per_tok"),
            shared=self.integer("n_shared_experts", 0) * self.integer("moe_intermediate_size"),
            scale=self.number("routed_scaling_factor", 1.0),
            num_groups=self.integer("n_group", 1),
            groups_per_token=self.integer("topk_group", 1),
            num_dense=self.integer("first_k_dense_replace", num_dense),
        )

    def _rope_scaling(self, rope: Mapping[str, object]) -> RopeScaling | YarnScaling | None:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind in (None, "default"):
            return None
        if kind == "yarn":
            return self._yarn(rope)
        if kind != "llama3":
            self.refuse(f"rope type {kind} is not supported; supported are default, llama3 and yarn")
        missing = [
            name
            for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            if rope.get(name) is None
        ]
        if missing:
            self.refuse(f"{missing[0]} is missing")
        return RopeScaling(
            factor=float(rope["factor"]),  # type: ignore[arg-type]
            low_freq_factor=float(rope["low_freq_factor"]),  # type: ignore[arg-type]
            high_freq_factor=float(rope["high_freq_factor"]),  # type: ignore[arg-type]
            original_max_position=int(rope["original_max_position_embeddings"]),  # type: ignore[call-overload]
        )

    def _yarn(self, rope: Mapping[str, object]) -> YarnScaling:
        """Return the scaling where transformers and SGLang read the same from the fields."""
        missing = [name for name in ("factor", "original_max_position_embeddings") if rope.get(name) is None]
        if missing:
            self.refuse(
                f"rope type yarn lacks {' and '.join(missing)}; "
                "add it as the model's page says, such as factor 4.0 for an original context of 32768"
            )
        for name in ("attention_factor", "attn_factor"):
            if rope.get(name) is not None:
                reader = "SGLang does not read" if name == "attention_factor" else "transformers does not read"
                self.refuse(f"{reader} {name} of rope type yarn; remove it, or use mscale and mscale_all_dim")
        if (rope.get("mscale") is None) != (rope.get("mscale_all_dim") is None):
            self.refuse("rope type yarn needs both of mscale and mscale_all_dim, or neither")
        numbers = {
            name: float(value)  # type: ignore[arg-type]
            for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
            if (value := rope.get(name)) is not None
        }
        factor = float(rope["factor"])  # type: ignore[arg-type]
        if factor <= 1:
            self.refuse(f"factor {factor:g} of rope type yarn stretches nothing; it must be above 1")
        return YarnScaling(
            factor=factor,
            original_max_position=int(rope["original_max_position_embeddings"]),  # type: ignore[call-overload]
            truncate=bool(rope.get("truncate", True)),
            **numbers,
        )


def refused(message: str) -> ConfigError:
    return ConfigError("model.path", (Problem(key="model.path", message=message),))
