"""A family of models: one file of this package, which everything else is derived from. Pure.

How a file is written
---------------------
A file has one subclass of `Family`; `families/__init__.py` or `qwen.py` lists it, and nothing else outside of tests,
recipes and documentation names it.

1. `name` is the `model_type` of config.json, `architecture` the class of transformers and SGLang.
2. `read` makes a `ModelShape` of config.json, and refuses in one line what trainer or engine would compute
   differently: `fields.shape(...)` reads what families have in common.
3. `blocks` describes the tensors of one layer of each kind, by adding blocks of `families/blocks.py`. A `Block` has the
   tensors of the files (`Weight`) and the parameters of both sides (`Param`), each of which consists of rows of these
   tensors (`Part`) that are cut among ranks in one of six ways (`Cut`). Names are within the layer. Layers are of
   the kinds `dense` and `mixture` (`Experts.num_dense_layers`). A family with others overrides `kinds`, the kind of
   each layer, and `alone`, a model with layers of one kind only: what is built, its memory, times and divisibility
   are derived from it, and added up over the layers.
4. `options` has the further options of Megatron's TransformerConfig. What a layer computes is chosen in
   `train/build.py` from the shape, not from the family's name.
5. `engine` says what is special about the model in SGLang: its module, its options, what it records and rounds.
6. `tiny` adapts a shape that was made small for rehearsals, `config_json` writes the fields that `read` reads, and
   `models` has the shapes of public models, which can be planned by name.
7. `refuses` has a reason for each feature that was not tried with the family.

`megarl family probe FOLDER` compares a description with the files, with transformers and with SGLang's own loading.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto
from typing import ClassVar, Literal, TypeAlias

from megarl.families.fields import Fields
from megarl.families.shape import ModelShape, YarnScaling

Extents: TypeAlias = tuple[int, ...]
Feature: TypeAlias = Literal["fp8", "lora", "critic"]


class Cut(Enum):
    """How the parts of a parameter are divided among ranks."""

    WHOLE = auto()
    """Every rank has all of them, end to end."""
    EACH = auto()
    """Each part is cut into equal rows; a rank has its rows of every part, end to end."""
    STACK = auto()
    """The parts are laid end to end, group by group, and these rows are cut: Megatron's queries, keys and values."""
    HEADS = auto()
    """Each part is cut by heads; one with fewer heads than ranks is repeated: SGLang's queries, keys and values."""
    COLUMNS = auto()
    """The columns of the one part are cut."""
    FIRST = auto()
    """The first rank has all, the others have zeros: a bias behind a product that is summed over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor of a checkpoint, named within its layer; "{e}" is the number of an expert."""

    name: str
    shape: Extents
    dtype: str | None = None
    """None: that of the checkpoint."""
    is_trained: bool = True
    """False: a buffer, which is loaded, saved and published, and has no gradient."""
    codec: str | None = None
    """How files hold it, by a name of `weights.executors.codecs`; None: as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of a tensor of a checkpoint."""

    name: str
    start: int = 0
    num_rows: int | None = None
    """None: all from `start` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A parameter of a trainer or an engine, named within its layer.

    A name with "{i}" stands for one parameter for each expert of a rank. Without it the experts of a rank are stacked.
    """

    name: str
    parts: tuple[Part, ...]
    cut: Cut
    is_expert: bool = False
    """Whether it is divided by the ranks of an expert, not by all tensor-parallel ranks."""
    heads: tuple[int, ...] = ()
    """Number of heads of each part, for HEADS, and for COLUMNS that belong to heads."""
    groups: int = 0
    """Key/value heads that the heads belong to."""
    is_padded: bool = False
    """Whether an engine on a CPU pads the share of a rank: that of a feed-forward block."""
    dtype: str | None = None
    """None: that of the model on this side."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some tensors of a layer, and the parameters that they are in. Blocks are added to make a layer."""

    weights: tuple[Weight, ...] = ()
    megatron: tuple[Param, ...] = ()
    sglang: tuple[Param, ...] = ()

    def __add__(self, other: Block) -> Block:
        return Block(self.weights + other.weights, self.megatron + other.megatron, self.sglang + other.sglang)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """The particularities of a family in SGLang."""

    module: str
    """Module of `sglang.srt.models` that has the architecture's class."""
    classifier: str | None = None
    """Module of the class with one output per sequence, whose head has a bias that no checkpoint fills."""
    options: tuple[str, ...] = ()
    """Options of the server's command line."""
    cpu_options: tuple[str, ...] = ()
    """Options on a CPU, in the place of `options`."""
    unnumbered: str | None = None
    """Module of a layer that chooses experts without knowing the layer's number, by which choices are recorded."""
    has_cache_scales: bool = False
    """Whether attention gets scales of an FP8 cache as soon as weights are in FP8."""
    adapts_shared_expert: bool = False
    """Whether the shared expert can have adapters: SGLang's class needs layers of other names for it."""
    ties_head: bool = True
    """Whether the class reads the embedding as its head where a model ties them."""
    has_whole_embedding: bool = False
    """Whether every rank has the whole embedding, without padding."""
    is_text_alone: bool = False
    """Whether engines leave out what sees images, with which the files come."""
    unplanned: tuple[str, ...] = ()
    """Beginnings of the names of parameters that engines load from the folder and keep: a tower that is not trained."""
    is_dequantized: bool = False
    """Whether files may be quantized: engines then start without, since tensors of the model's dtype are published."""

    def options_on(self, device: str) -> tuple[str, ...]:
        return self.cpu_options if device == "cpu" else self.options


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """Cost of a layer that reads a state in place of the tokens before, over all ranks."""

    operations: int
    """Operations of a token in a forward pass, beside the products with weights."""
    state_bytes: int
    """State of a request in an engine."""
    working_bytes: int
    """Memory per token while a trainer computes one layer's backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """Elements per token of one layer's attention, over all ranks."""

    queries: int
    keys: int
    values: int
    outputs: int
    """Elements that the output's projection reads."""
    gates: int = 0
    """Elements that are projected beside queries, keys and values."""
    cached_heads: int
    """Heads of the cache, which ranks divide; 1 for a cache that every rank has."""
    cached: int
    """Elements of the cache per head."""
    recurrence: Recurrence | None = None
    """None where tokens attend to tokens."""

    def cached_on(self, num_ranks: int) -> int:
        """Return the elements of the cache on each of so many ranks."""
        return -(-self.cached_heads // num_ranks) * self.cached


class Family(ABC):
    """A family of models: see the module."""

    name: ClassVar[str]
    architecture: ClassVar[str]
    engine: ClassVar[EngineTraits]
    root: ClassVar[str] = "model."
    """Beginning of the names of tensors in files, but for heads; engines have `model.`."""
    kept: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of tensors in files that are read where they are needed, and saved as they were."""
    refuses: ClassVar[Mapping[Feature, str]] = {}

    @abstractmethod
    def read(self, fields: Fields) -> ModelShape:
        """Return the shape that a config.json describes; refuse what is not supported."""

    @abstractmethod
    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        """Return the tensors of a layer of each kind."""

    @property
    def models(self) -> Mapping[str, ModelShape]:
        """Public models by name."""
        return {}

    @property
    def critic(self) -> str:
        return critic_architecture(self.architecture)

    def kinds(self, shape: ModelShape) -> tuple[str, ...]:
        """Return the kind of each layer: dense, mixture, or some dense ones before mixtures."""
        num_dense = shape.experts.num_dense_layers if shape.experts else shape.num_layers
        return tuple("dense" if index < num_dense else "mixture" for index in range(shape.num_layers))

    def alone(self, shape: ModelShape, kind: str) -> ModelShape:
        """Return the shape of a model with layers of one kind only."""
        if shape.experts is None:
            return shape
        if kind == "dense":
            return replace(shape, experts=None, ffn_hidden=shape.dense_hidden, dense_hidden=0)
        return replace(shape, experts=replace(shape.experts, num_dense_layers=0), dense_hidden=0)

    def attention(self, shape: ModelShape) -> AttentionCost:
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return AttentionCost(
            queries=queries,
            keys=keys,
            values=keys,
            outputs=queries,
            cached_heads=shape.num_kv_heads,
            cached=2 * shape.head_dim,
        )

    def options(self, shape: ModelShape) -> dict[str, object]:
        """Return options of Megatron's TransformerConfig beside those that follow from the shape."""
        del shape
        return {}

    def tiny(self, shape: ModelShape) -> ModelShape:
        """Return a shape of which sizes were made small with all its sizes fitting each other."""
        return shape

    def config_json(self, shape: ModelShape) -> dict[str, object]:
        """Return the content of `config.json`."""
        config: dict[str, object] = {
            "architectures": [self.architecture],
            "model_type": self.name,
            "dtype": shape.dtype,
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.ffn_hidden,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": shape.max_context_tokens,
            "hidden_act": "silu",
            "rms_norm_eps": shape.norm_eps,
            "rope_theta": shape.rope_theta,
            "rope_parameters": _rope(shape),
            "tie_word_embeddings": shape.has_tied_embeddings,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }
        if shape.experts is not None:
            config |= {
                "moe_intermediate_size": shape.ffn_hidden,
                "num_experts": shape.experts.num,
                "num_experts_per_tok": shape.experts.per_token,
                "norm_topk_prob": shape.experts.is_normalized,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
            if shape.experts.shared:
                config["shared_expert_intermediate_size"] = shape.experts.shared
        return config


def critic_architecture(language_model: str) -> str:
    """Return transformers' name for a model with the same layers and one output per token."""
    return re.sub("For(CausalLM|ConditionalGeneration)$", "ForSequenceClassification", language_model)


def _rope(shape: ModelShape) -> dict[str, object]:
    if shape.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": shape.rope_theta}
    scaling = {name: value for name, value in asdict(shape.rope_scaling).items() if value is not None}
    scaling["original_max_position_embeddings"] = scaling.pop("original_max_position")
    kind = "yarn" if isinstance(shape.rope_scaling, YarnScaling) else "llama3"
    return {"rope_type": kind, "rope_theta": shape.rope_theta, **scaling}
