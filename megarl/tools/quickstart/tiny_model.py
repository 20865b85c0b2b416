"""Write a random model small enough for a laptop: Qwen2, or Qwen2.5-VL, which sees images; bytes as tokens.

It is written from numpy with the names and shapes of a Hugging Face folder, so that neither torch nor a model class is
needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from safetensors import TensorSpec, serialize_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megarl.families import family_of
from megarl.families.shape import ModelShape, VisionShape
from megarl.tools.quickstart.tiny_tower import IMAGE_TOKENS, tiny_tower, tower_tensors, write_processor
from megarl.types import FloatArray

PAD, END, USER, ASSISTANT, TOOL = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>"
_SPECIAL = (PAD, END, USER, ASSISTANT)

# Loaders rebuild the tokenizer of a Qwen2 model as byte-level BPE whatever its files say. Without merges that is one
# token per byte, and one per character of plain text; with all 256 bytes every text can be encoded.
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_NUM_COMMON = len(_SPECIAL) + len(_BYTES)

# The role's token, then the content; an assistant's turn ends with the end token, which the model must generate.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}" + END + "{% else %}"
    "" + USER + "{{ message['content'] }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)

# Content in parts, some of which are images.
_IMAGE_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '" + ASSISTANT + "' if message['role'] == 'assistant' else '" + USER + "' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + "".join(IMAGE_TOKENS[place] for place in (2, 0, 3)) + "{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}" + END + "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)

# The names of tools come first; a call is its JSON, a result follows the tool's token.
_TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }}({{ tool['function']['parameters']['properties']"
    " | join(',') }}) {% endfor %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    """{"name": "{{ call['function']['name'] }}", "parameters": {{ call['function']['arguments'] | tojson }}}"""
    "{% endfor %}" + END + "{% elif message['role'] == 'tool' %}" + TOOL + "{{ message['content'] }}{% else %}"
    "" + USER + "{{ message['content'] }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyShape:
    num_layers: int = 2
    hidden: int = 64
    ffn_hidden: int = 192
    num_heads: int = 4
    num_kv_heads: int = 2
    max_context_tokens: int = 256
    has_tied_embeddings: bool = False
    weight_std: float = 0.1
    """Larger than the usual 0.02, with which a model this narrow learns nothing for its first hundreds of steps."""
    vocab: int = _NUM_COMMON
    """Rows of the embedding; the tokenizer never uses more than these."""
    rope_theta: float = 10_000.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    has_tools: bool = False
    """The chat template renders tools; it has a token more."""
    max_image_pixels: int | None = None
    """Sees images up to this size, by a random tower; it has four tokens more. None reads text alone."""

    @classmethod
    def like(cls, shape: ModelShape) -> TinyShape:
        """Return the size of a public model, with its usual initialisation."""
        return cls(
            num_layers=shape.num_layers,
            hidden=shape.hidden,
            ffn_hidden=shape.ffn_hidden,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            max_context_tokens=shape.max_context_tokens,
            has_tied_embeddings=shape.has_tied_embeddings,
            weight_std=0.02,
            vocab=shape.vocab,
            rope_theta=shape.rope_theta,
            dtype="bfloat16",
        )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def chat_template(self) -> str:
        if self.has_tools:
            return _TOOL_TEMPLATE
        return _CHAT_TEMPLATE if self.tower is None else _IMAGE_TEMPLATE

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Tokens behind those that every model has."""
        if self.has_tools:
            return (TOOL,)
        return () if self.tower is None else IMAGE_TOKENS

    @property
    def tower(self) -> VisionShape | None:
        if self.max_image_pixels is None:
            return None
        return tiny_tower(first_token=_NUM_COMMON, head_dim=self.head_dim)

    def as_model(self) -> ModelShape:
        return ModelShape(
            family="qwen2" if self.tower is None else "qwen2_5_vl",
            num_layers=self.num_layers,
            hidden=self.hidden,
            ffn_hidden=self.ffn_hidden,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab=self.vocab,
            max_context_tokens=self.max_context_tokens,
            norm_eps=1e-6,
            rope_theta=self.rope_theta,
            rope_scaling=None,
            has_tied_embeddings=self.has_tied_embeddings,
            has_qkv_bias=True,
            has_qk_norm=False,
            dtype=self.dtype,
            vision=self.tower,
        )


def write_tiny_model(folder: Path, shape: TinyShape, *, seed: int) -> None:
    """Write a complete Hugging Face folder."""
    write_config(folder, shape)
    generator = np.random.default_rng(seed)
    weights = {name: _random(name, shape_of, shape, generator) for name, shape_of in _tensors(shape)}
    raw = {name: _raw(values, shape) for name, values in weights.items()}
    tensors = {
        name: TensorSpec(dtype=shape.dtype, shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes)
        for name, bits in raw.items()
    }
    # Loaders refuse a file without the framework of its layout; all of them write "pt".
    serialize_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_config(folder: Path, shape: TinyShape) -> None:
    """Write config.json, generation_config.json and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, shape)
    _write_json(folder / "config.json", _config(shape))
    if shape.tower is not None and shape.max_image_pixels is not None:
        write_processor(folder, shape.tower, max_pixels=shape.max_image_pixels)
    end, pad = _SPECIAL.index(END), _SPECIAL.index(PAD)
    _write_json(folder / "generation_config.json", {"eos_token_id": [end], "pad_token_id": pad})


def _raw(values: FloatArray, shape: TinyShape) -> npt.NDArray[np.generic]:
    """Return the values as stored. numpy has no bfloat16: it is the upper half of a float32, rounded to even."""
    if shape.dtype == "float32":
        return values
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_tokenizer(folder: Path, shape: TinyShape) -> None:
    special = (*_SPECIAL, *shape.added_tokens)
    vocab = {token: index for index, token in enumerate((*_SPECIAL, *_BYTES, *shape.added_tokens))}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "chat_template": shape.chat_template,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _config(shape: TinyShape) -> dict[str, object]:
    model = shape.as_model()
    tokens = {"eos_token_id": _SPECIAL.index(END), "pad_token_id": _SPECIAL.index(PAD)}
    config = {**family_of(model).config_json(model), **tokens}
    if isinstance(text := config.get("text_config"), dict):
        config["text_config"] = {**text, **tokens}
    return config


def _tensors(shape: TinyShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the checkpoint, in its order."""
    hidden = shape.hidden
    queries = shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}.self_attn.{part}_proj.weight", (rows, hidden)
            yield f"{prefix}.self_attn.{part}_proj.bias", (rows,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        for part in ("gate", "up"):
            yield f"{prefix}.mlp.{part}_proj.weight", (shape.ffn_hidden, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, shape.ffn_hidden)
    yield "model.norm.weight", (hidden,)
    if not shape.has_tied_embeddings:
        yield "lm_head.weight", (shape.vocab, hidden)
    if shape.tower is not None:
        yield from tower_tensors(shape.tower, hidden)


def _random(name: str, tensor_shape: tuple[int, ...], shape: TinyShape, generator: np.random.Generator) -> FloatArray:
    if "norm" in name or ".ln_q." in name:
        return np.ones(tensor_shape, dtype=np.float32)
    if name.endswith("bias"):
        return np.zeros(tensor_shape, dtype=np.float32)
    return generator.normal(0.0, shape.weight_std, tensor_shape).astype(np.float32)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
