"""Writes a first description of a family that is not known, in the manner of `megarl/families/*.py`.

transformers says which tensors a model has. A tiny one, each element a number of its own, is loaded by SGLang; the
numbers in its parameters say which rows of which tensors they consist of, and how ranks divide them. A block of
`families/blocks.py` is taken where its parameters are, element by element, those of the engines; other parameters are
traced. What neither shows is marked with UNDECIDED: names in Megatron, fields of config.json that nothing reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from megarl.families import FAMILIES
from megarl.families import blocks as shared_blocks
from megarl.families.fields import Fields
from megarl.families.interface import Block, Cut, Extents, Family, Param, Part
from megarl.families.shape import ModelShape
from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.executors.tensors import box_of
from megarl.weights.layouts.canonical import EXPERT, layer_prefix
from megarl.weights.layouts.pieces import LocalTensor
from megarl.weights.layouts.sglang import engine_shares

UNDECIDED = "UNDECIDED"
"""Marks what a person has to decide in a draft."""

_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OF_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
_OUTSIDE = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
_EXPERT_NAMES = (shared_blocks.GATE_UP_DOWN, ("w1", "w3", "w2"))
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PLAIN = frozenset(
    {
        "architectures",
        "model_type",
        "transformers_version",
        "auto_map",
        "_name_or_path",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "attention_dropout",
        "pretraining_tp",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "output_router_logits",
        "router_aux_loss_coef",
    }
)
"""Fields that no tensor of a trained or served model depends on, or that every family reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """The parameters of each TP rank of an engine that loaded the numbered model by itself."""

    expert: int
    ranks: tuple[Mapping[str, Tensor], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The tiny model, and what was seen of it."""

    config: Mapping[str, object]
    """Its config.json."""
    own_config: Mapping[str, object]
    """That of the model's folder."""
    numbered: Mapping[str, Tensor]
    """Its tensors, in which every element is a number of its own."""
    engines: tuple[LoadedEngine, ...]
    """Undivided first."""
    notes: tuple[str, ...] = ()
    """Other findings, for the person who completes the draft."""

    @property
    def architecture(self) -> str:
        named = self.config["architectures"]
        assert isinstance(named, list), f"architectures are {named}"
        return str(named[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    source: str
    num_described: int
    """Parameters of layers of the undivided engine that the source describes, element by element on all engines."""
    num_parameters: int
    undecided: tuple[str, ...]


def draft(evidence: Evidence) -> Draft:
    """Return a description with what could not be decided."""
    undecided = [*evidence.notes, "parameters of a dtype of their own: engines were in float32"]
    undecided += _unread_fields(evidence)
    head = _head(evidence)
    shape = read_draft(_imports(head + _EMPTY) + head + _EMPTY, evidence.config)
    kinds = _kinds(evidence)
    parts, layers = [], list[_LayerDraft]()
    for kind, indices in kinds.items():
        layer = _LayerDraft(evidence, shape, indices)
        layers.append(layer)
        undecided += layer.undecided
        parts.append(f'            "{kind}": ' + "\n            + ".join(layer.lines) + ",")
    undecided = list(dict.fromkeys([*undecided, *_outside_layers(evidence)]))
    numbers = [(len(layer.described) * len(layer.indices), layer.num_parameters) for layer in layers]
    opening = ["    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:", "        return {"]
    text = head + "\n".join([*opening, *parts, "        }", ""])
    return Draft(
        source=_docstring(evidence, undecided) + _imports(text) + text,
        num_described=sum(described for described, _ in numbers),
        num_parameters=sum(count for _, count in numbers),
        undecided=tuple(undecided),
    )


def load_draft(source: str) -> Family:
    """Return the family of a draft."""
    names: dict[str, object] = {}
    exec(compile(source, "draft", "exec"), names)  # noqa: S102 - our own text
    (family,) = (
        each for each in names.values() if isinstance(each, type) and issubclass(each, Family) and each is not Family
    )
    return family()


def read_draft(source: str, config: Mapping[str, object]) -> ModelShape:
    return load_draft(source).read(Fields(content=config, source="config.json"))


_EMPTY = """    def blocks(self, shape: ModelShape) -> Mapping[str, Block]:
        return {}
"""
_BLOCKS = (
    "attention",
    "fused_attention",
    "fused_gated",
    "gated",
    "input_norm",
    "mixture",
    "post_norm",
    "router",
    "same",
)
_INTERFACE = ("Block", "Cut", "EngineTraits", "Family", "Param", "Part", "Weight")


def _imports(body: str) -> str:
    blocks, interface = (
        ", ".join(name for name in names if re.search(rf"(?<!\w){name}\b", body)) for names in (_BLOCKS, _INTERFACE)
    )
    return f"""
from __future__ import annotations

from collections.abc import Mapping

from megarl.families.blocks import {blocks or "same"}
from megarl.families.fields import Fields
from megarl.families.interface import {interface}
from megarl.families.shape import ModelShape


"""


def _docstring(evidence: Evidence, undecided: Sequence[str]) -> str:
    lines = [f'"""{evidence.architecture}: a draft. Refused: {UNDECIDED}.', ""]
    lines += [f"{UNDECIDED}: {each}" for each in undecided]
    return "\n".join([*lines, '"""', ""])


def _head(evidence: Evidence) -> str:
    """Return imports, names and `read`."""
    lines = [f"class {evidence.architecture.removesuffix('ForCausalLM')}(Family):"]
    lines += [f'    name = "{evidence.config["model_type"]}"', f'    architecture = "{evidence.architecture}"']
    lines += [f'    engine = EngineTraits(module="{_engine_module(evidence.architecture)}")', ""]
    lines += ["    def read(self, fields: Fields) -> ModelShape:"]
    first = _layer_shapes(evidence, 0)
    if not any(evidence.config.get(key) for key in ("attention_bias", "mlp_bias")):
        lines += ["        fields.refuse_biases(self.name)"]
    windows = [f'"{key}"' for key in ("use_sliding_window", "sliding_window") if key in evidence.config]
    if windows and not any(evidence.config[key.strip('"')] for key in windows):
        lines += [f"        fields.refuse_window({', '.join(windows)})"]
    flags = ["self.name"]
    flags += ["has_qkv_bias=True"] if "self_attn.q_proj.bias" in first else []
    # A norm of whole queries is another layer than that of each head.
    head_dim = evidence.config.get("head_dim") or _number(evidence, "hidden_size") // _number(
        evidence, "num_attention_heads"
    )
    flags += ["has_qk_norm=True"] if first.get("self_attn.q_norm.weight") == (head_dim,) else []
    if any(evidence.config.get(key) for key in _NUM_EXPERTS):
        flags += [f"experts={_experts(evidence)}"]
        flags += ['ffn="moe_intermediate_size"'] if "moe_intermediate_size" in evidence.config else []
    lines += [f"        return fields.shape({', '.join(flags)})", "", ""]
    return "\n".join(lines)


def _number(evidence: Evidence, key: str) -> int:
    return Fields(content=evidence.config, source="config.json").integer(key)


def _experts(evidence: Evidence) -> str:
    """Return the source of the mixture's fields."""
    if "n_routed_experts" in evidence.config:
        return "fields.sigmoid_experts(num_dense=0)"
    normalized = 'fields.has("norm_topk_prob")' if "norm_topk_prob" in evidence.config else "True"
    key = "shared_expert_intermediate_size"
    shared = f', shared=fields.integer("{key}")' if evidence.config.get(key) else ""
    return f"fields.softmax_experts(is_normalized={normalized}{shared})"


def _engine_module(architecture: str) -> str:
    spec = find_spec("sglang")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in sorted((Path(folder) / "srt" / "models").glob("*.py")):
            if f"class {architecture}(" in path.read_text():
                return path.stem
    return UNDECIDED


class _Recorded(dict[str, object]):
    """Fields that remember which of them were read."""

    def __init__(self, content: Mapping[str, object]) -> None:
        super().__init__(content)
        self.read: set[str] = set()

    def get(self, key: str, default: object = None) -> object:
        self.read.add(key)
        return super().get(key, default)


def _unread_fields(evidence: Evidence) -> Iterator[str]:
    """Yield the fields of config.json that the draft does not read, and that may change what layers compute."""
    recorded = _Recorded(evidence.config)
    read_draft(_imports(_head(evidence) + _EMPTY) + _head(evidence) + _EMPTY, recorded)
    for key, value in evidence.own_config.items():
        if (
            key in recorded.read
            or key in _PLAIN
            or value in (None, False, [], {})
            or (key, value) == ("hidden_act", "silu")
        ):
            continue
        yield f"config.json has {key}: {value!r}, which nothing reads"
    if "rms_norm_eps" not in evidence.own_config:
        yield "config.json has no rms_norm_eps: the norms are of another kind, or their field has another name"


def _layer_shapes(evidence: Evidence, index: int) -> dict[str, Extents]:
    """Return the tensors of a layer, named within it."""
    prefix = layer_prefix(index)
    return {
        name.removeprefix(prefix): tuple(tensor.shape)
        for name, tensor in evidence.numbered.items()
        if name.startswith(prefix)
    }


def _kinds(evidence: Evidence) -> dict[str, list[int]]:
    """Return the layers with the same tensors, by a name of the kind."""
    indices = sorted({int(match[1]) for name in evidence.numbered if (match := _IN_LAYER.match(name))})
    by_tensors: dict[tuple[tuple[str, Extents], ...], list[int]] = {}
    for index in indices:
        by_tensors.setdefault(tuple(_layer_shapes(evidence, index).items()), []).append(index)
    kinds: dict[str, list[int]] = {}
    for tensors, layers in by_tensors.items():
        kind = "mixture" if any(_OF_EXPERT.search(name) for name, _ in tensors) else "dense"
        kinds[kind if kind not in kinds else f"{kind}_{layers[0]}"] = layers
    return kinds


def _outside_layers(evidence: Evidence) -> Iterator[str]:
    for name in evidence.numbered:
        if _IN_LAYER.match(name) is None and name not in _OUTSIDE:
            yield f"{name} is outside of the layers, where only {', '.join(_OUTSIDE)} are known"


class _LayerDraft:
    """The source of the layers of one kind."""

    def __init__(self, evidence: Evidence, shape: ModelShape, indices: Sequence[int]) -> None:
        self._evidence = evidence
        self._shape = shape
        self.indices = indices
        self.tensors = _layer_shapes(evidence, indices[0])
        self.lines: list[str] = []
        self.undecided: list[str] = []
        self.described: set[str] = set()
        """Parameters of the engine, named within the layer."""
        self._described_tensors: set[str] = set()
        prefix = layer_prefix(indices[0])
        self._parameters = {
            name.removeprefix(prefix): tensor
            for name, tensor in evidence.engines[0].ranks[0].items()
            if name.startswith(prefix)
        }
        for line, block in self._candidates():
            names = {param.name for param in block.sglang}
            if not names & self.described and self._is_proven(block):
                self._take(line, block)
        for name, tensor in self._parameters.items():
            if name not in self.described:
                self._trace(name, tensor)
        lost = [name for name in self._patterns if name not in self._described_tensors]
        self.undecided += [f"no parameter of the engine has elements of {name}" for name in lost]

    @property
    def num_parameters(self) -> int:
        return len(self._parameters) * len(self.indices)

    @property
    def _patterns(self) -> dict[str, Extents]:
        """Tensors by name, those of all experts under one."""
        return {_OF_EXPERT.sub(EXPERT, name): extents for name, extents in self.tensors.items()}

    def _take(self, line: str, block: Block) -> None:
        self.lines.append(line)
        self.described |= {param.name for param in block.sglang}
        self._described_tensors |= {part.name for param in block.sglang for part in param.parts}

    def _candidates(self) -> Iterator[tuple[str, Block]]:
        """Yield blocks whose tensors the layer has, in the order of a layer."""
        shape, patterns = self._shape, self._patterns
        yield from self._if_there("input_norm(shape)", shared_blocks.input_norm(shape))
        yield from self._if_there("attention(shape)", shared_blocks.attention(shape))
        yield from self._if_there("fused_attention(shape)", shared_blocks.fused_attention(shape))
        if not any("feedforward" in name for name in patterns):
            yield from self._if_there("post_norm(shape)", shared_blocks.post_norm(shape))
        for name, (rows, *columns) in patterns.items():
            prefix, _, leaf = name.removesuffix(".weight").rpartition(".")
            if not columns or EXPERT in name:
                continue
            if leaf == "gate" and shape.experts is not None:
                block = prefix + "."
                line = "router(shape)" if block == "mlp." else f'router(shape, block="{block}")'
                yield from self._if_there(line, shared_blocks.router(shape, block=block))
            if leaf in ("gate_proj", "gate_up_proj"):
                yield from self._feed_forward(prefix + ".", rows, is_fused=leaf == "gate_up_proj")
        yield from self._mixtures()

    def _feed_forward(self, block: str, rows: int, *, is_fused: bool) -> Iterator[tuple[str, Block]]:
        megatron = "mlp.shared_experts." if "shared" in block else block if block == "mlp." else f"{UNDECIDED}.{block}"
        width = rows // 2 if is_fused else rows
        make = shared_blocks.fused_gated if is_fused else shared_blocks.gated
        line = f'{make.__name__}("{block}", "{megatron}", hidden=shape.hidden, width={self._size(width)})'
        yield from self._if_there(line, make(block, megatron, hidden=self._shape.hidden, width=width))

    def _mixtures(self) -> Iterator[tuple[str, Block]]:
        if self._shape.experts is None:
            return
        for name in self._patterns:
            block, found, _ = name.partition("experts." + EXPERT)
            if found:
                for names in _EXPERT_NAMES:
                    words = [f'block="{block}"'] if block != "mlp." else []
                    words += [f"names={names}"] if names != shared_blocks.GATE_UP_DOWN else []
                    line = f"mixture({', '.join(['shape', *words])})"
                    yield from self._if_there(line, shared_blocks.mixture(self._shape, block=block, names=names))
                return

    def _if_there(self, line: str, block: Block) -> Iterator[tuple[str, Block]]:
        patterns = self._patterns
        if all(patterns.get(weight.name) == weight.shape for weight in block.weights):
            yield line, block

    def _is_proven(self, block: Block) -> bool:
        """Whether all engines hold what the block says, element by element."""
        return bool(block.sglang) and all(
            _holds(self._evidence.numbered, engine, block.sglang, self.tensors, self.indices)
            for engine in self._evidence.engines
        )

    def _trace(self, name: str, tensor: Tensor) -> None:
        """Describe a parameter by the rows of tensors that were found in it."""
        parts = _traced_parts(tensor, self._evidence.numbered, layer_prefix(self.indices[0]))
        if parts is None:
            self.undecided.append(f"the elements of {name} of the engine are not whole rows of tensors of the files")
            return
        patterns = self._patterns
        is_expert = any(EXPERT in part.name for part in parts)
        heads = (self._shape.num_heads, self._shape.num_kv_heads, self._shape.num_kv_heads)[: len(parts)]
        groups = self._shape.num_kv_heads
        tries = [
            Param(name=name, parts=parts, cut=cut, is_expert=is_expert, is_padded=is_padded, heads=each, groups=groups)
            for cut, each in ((Cut.WHOLE, ()), (Cut.EACH, ()), (Cut.COLUMNS, ()), (Cut.FIRST, ()), (Cut.HEADS, heads))
            for is_padded in (False, True)
            if cut is not Cut.COLUMNS or (len(parts) == 1 and len(patterns[parts[0].name]) > 1)
            if cut is not Cut.HEADS or len(heads) == len(parts)
        ]
        proven = next((param for param in tries if self._is_proven(Block((), (), (param,)))), None)
        if proven is None:
            self.undecided.append(f"how ranks divide {name} of the engine")
            proven = replace(tries[0], cut=Cut.WHOLE)
        self._take(self._traced_line(proven), Block((), (), (proven,)))

    def _traced_line(self, param: Param) -> str:
        patterns, (first, *others) = self._patterns, param.parts
        known = _megatron_names(first.name, patterns[first.name], self._shape, self._evidence.architecture)
        megatron = next(iter(known)) if len(known) == 1 and not others else f"{UNDECIDED}.{first.name}"
        if megatron not in known:
            options = "; ".join(f"{family} has {name}" for name, family in known.items())
            self.undecided.append(
                f"the name of {param.name} in Megatron, and what computes it" + f" ({options})" * bool(known)
            )
        extents = self._extents(patterns[first.name])
        if not others and first == Part(name=param.name) and not param.is_expert:
            cut = "" if param.cut is Cut.WHOLE else f", Cut.{param.cut.name}"
            return f'same("{param.name}", {extents}, "{megatron}"{cut})'
        names = dict.fromkeys(part.name for part in param.parts)
        weights = "".join(
            f'Weight(name="{name}", shape=({", ".join(self._size(size) for size in patterns[name])},)), '
            for name in names
        )
        parts = "".join(_part_source(part) + ", " for part in param.parts)
        flags = "".join(f", {flag}=True" for flag in ("is_expert", "is_padded") if getattr(param, flag))
        flags += f", heads={param.heads}, groups={param.groups}" if param.heads else ""
        trained = f'Param(name="{megatron}", parts=({parts}), cut=Cut.{param.cut.name}{flags})'
        served = f'Param(name="{param.name}", parts=({parts}), cut=Cut.{param.cut.name}{flags})'
        return f"Block(({weights}), ({trained},), ({served},))"

    def _extents(self, extents: Extents) -> str:
        sizes = [self._size(size) for size in extents]
        return f"({', '.join(sizes)})" if len(sizes) > 1 else f"({sizes[0]},)"

    def _size(self, size: int) -> str:
        """Return the number of the shape that a size is; a draft has the bare number where none is."""
        found = next((name for name, value in _sizes(self._shape).items() if value == size and size > 1), None)
        if found is None and size > 1:
            fields = [key for key, value in self._evidence.config.items() if type(value) is int and value == size]
            self.undecided.append(f"a size of {size}: " + (" or ".join(fields) or "of no field of config.json"))
        return found or str(size)


def _sizes(shape: ModelShape) -> dict[str, int]:
    """Return the sizes that tensors have, by how a description says them."""
    sizes = {
        "shape.hidden": shape.hidden,
        "shape.ffn_hidden": shape.ffn_hidden,
        "shape.dense_hidden": shape.dense_hidden,
        "shape.head_dim": shape.head_dim,
        "shape.num_heads": shape.num_heads,
        "shape.num_heads * shape.head_dim": shape.num_heads * shape.head_dim,
        "shape.num_kv_heads * shape.head_dim": shape.num_kv_heads * shape.head_dim,
        "2 * shape.ffn_hidden": 2 * shape.ffn_hidden,
    }
    if shape.experts is not None:
        sizes |= {"shape.experts.num": shape.experts.num, "shape.experts.shared": shape.experts.shared}
    return sizes


def _part_source(part: Part) -> str:
    start = f", start={part.start}" if part.start else ""
    rows = f", num_rows={part.num_rows}" if part.num_rows is not None else ""
    return f'Part(name="{part.name}"{start}{rows})'


def _megatron_names(tensor: str, extents: Extents, shape: ModelShape, architecture: str) -> dict[str, str]:
    """Return the parameters that other families have a tensor of this name and size in, each with one of them."""
    wanted = [{name for name, value in _sizes(shape).items() if value == size} for size in extents]
    found: dict[str, str] = {}
    for family in FAMILIES:
        models = () if family.architecture == architecture else family.models.values()
        for other, block in ((model, block) for model in models for block in family.blocks(model).values()):
            weights = {weight.name: weight.shape for weight in block.weights}
            for param in block.megatron:
                if [part.name for part in param.parts] == [tensor] and len(weights[tensor]) == len(extents):
                    sizes = _sizes(other)
                    if all(
                        any(sizes.get(name) == size for name in names)
                        for names, size in zip(wanted, weights[tensor], strict=True)
                    ):
                        found.setdefault(param.name, family.name)
    return found


def _holds(
    numbered: Mapping[str, Tensor],
    engine: LoadedEngine,
    params: Sequence[Param],
    tensors: Mapping[str, Extents],
    indices: Sequence[int],
) -> bool:
    """Whether the ranks of an engine hold these parameters in all these layers."""
    specs = {name: TensorSpec(shape=extents, dtype="float32") for name, extents in tensors.items()}
    num_experts = 1 + max((int(match[0]) for name in tensors if (match := _OF_EXPERT.search(name))), default=-1)
    for rank, parameters in enumerate(engine.ranks):
        shares = engine_shares(
            num_experts, rank=rank, tensor=len(engine.ranks), expert=engine.expert, is_cpu_engine=True
        )
        try:
            locals_ = tuple(shares.layer(params, specs))
        except (AssertionError, ValueError, KeyError):
            return False  # it cannot be divided so
        for index in indices:
            prefix = layer_prefix(index)
            for local in locals_:
                held = parameters.get(prefix + local.name)
                if held is None or not held.equal(_expected(local, prefix, numbered)):
                    return False
    return True


def _expected(local: LocalTensor, prefix: str, numbered: Mapping[str, Tensor]) -> Tensor:
    values = torch.zeros(local.shape)
    for piece in local.pieces:
        box = box_of(numbered[prefix + piece.slice.name], piece.slice.offsets, piece.slice.shape)
        box_of(values, piece.local_offsets, piece.slice.shape).copy_(box)
    return values


def _traced_parts(tensor: Tensor, numbered: Mapping[str, Tensor], prefix: str) -> tuple[Part, ...] | None:
    """Return the rows that an undivided parameter consists of; None where it has others than whole rows.

    Of stacked experts the first one is looked at. Padding is at the end of a part.
    """
    names = [name for name in numbered if name.startswith(prefix)]
    starts = torch.tensor([float(numbered[name].flatten()[0]) for name in names])
    values = tensor[0] if tensor.dim() > 2 else tensor
    parts: list[Part] = []
    row, num_rows = 0, len(values)
    while row < num_rows:
        number = float(values[row].flatten()[0])
        if number == 0:
            row += 1
            continue
        which = int(torch.searchsorted(starts, number, right=True)) - 1
        if which < 0:
            return None
        source = numbered[names[which]]
        if source.dim() != values.dim():
            return None
        width = source[0].numel()
        start = int(number - float(starts[which])) // width
        count = 0
        while (
            row + count < num_rows
            and start + count < len(source)
            and _is_row(values[row + count], source[start + count])
        ):
            count += 1
        if not count:
            return None
        is_all = start + count == len(source)
        name = _OF_EXPERT.sub(EXPERT, names[which].removeprefix(prefix))
        parts.append(Part(name=name, start=start, num_rows=None if is_all else count))
        row += count
    return tuple(parts) or None


def _is_row(values: Tensor, row: Tensor) -> bool:
    """Whether a row of a parameter is that of a tensor, behind which there may be padding."""
    size = row.numel()
    held = values.flatten()
    return held.numel() >= size and held[:size].equal(row.flatten()) and not held[size:].any()
