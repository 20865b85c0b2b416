"""Real Megatron ranks of large recipes without memory: torch's fake process group, and tensors that are only shapes.

`python -m tests.planner.meta_ranks layouts RECIPE` builds every rank of every trained model on the meta device, one
after the other; `activations RECIPE` runs a micro-batch through first stages in a FakeTensorMode, `layers NAME` one
through a few layers of a public model on one rank. Each prints a line of JSON per model. In a process of its own: the
CPU stand-in of Megatron replaces functions of torch.
"""

from __future__ import annotations

import json
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config.load import read_recipe
from megarl.config.lora import LoraConfig
from megarl.config.recipe import Recipe
from megarl.config.roles import ActorConfig, OptimizerConfig, TrainedModelConfig
from megarl.families import PUBLIC_MODELS
from megarl.families.shape import ModelShape
from megarl.planner.activations import ModelWork, _kept_bytes_per_token
from megarl.planner.deployment import find_shapes
from megarl.planner.fit import planned
from megarl.planner.hardware import gpu_of
from megarl.planner.memory import stage_memory
from megarl.train import attention, cpu, layers
from megarl.train.attention import PackedSequences, Rotation
from megarl.train.build import build_chunks
from megarl.train.flash_attention import Spans, attend_by_flash
from megarl.train.layers import RMSNorm
from megarl.train.long_attention import ContextPart
from megarl.train.lora import attach_adapters
from megarl.train.model import Model, named_weights
from megarl.train.optimizer import ModelOptimizer
from megarl.train.seen_keys import SeenKeys
from megarl.train.softmax import Softmax
from megarl.train.topology import Topology, joined_topology
from megarl.weights.algebra.slices import Layout
from megarl.weights.executors.tensors import check_holding, specs_of
from megarl.weights.layouts.lora import LoraShape, adapter_layout
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.pieces import FlatRange, restrict

_DTYPE = "bfloat16"
_DIVISIBLE_TOKENS = 7680
"""Experts of all public models get equal parts of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    role: str
    shape: ModelShape
    split: TrainedModelConfig
    lora: LoraConfig | None
    world: int

    @property
    def parallel(self) -> MegatronParallel:
        return MegatronParallel.of(self.split, data=self.world // self.split.model_parallel)


def trained_models(recipe: Recipe) -> Iterator[TrainedModel]:
    shapes = find_shapes(recipe.model, recipe.roles, algorithm=recipe.algorithm)
    for role, split in recipe.roles.megatron_roles.items():
        if isinstance(split, TrainedModelConfig):
            world = recipe.pools[recipe.roles.used_pools[role]].gpus
            yield TrainedModel(role=role, shape=shapes.of(role), split=split, lora=recipe.model.lora, world=world)


class _CudaMeans(TorchFunctionMode):
    """`device="cuda"` means another device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if kwargs and str(kwargs.get("device")).startswith("cuda"):
            return func(*args, **{**kwargs, "device": self._device})
        return func(*args, **(kwargs or {}))


@contextmanager
def joined(model: TrainedModel, rank: int, device: torch.device) -> Iterator[Topology]:
    """Make this process a rank among others that do not exist; a collective returns what it got."""
    split = model.split
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=model.world)  # type: ignore[no-untyped-call]
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=split.tensor,
        context_parallel_size=split.context,
        pipeline_model_parallel_size=split.pipeline,
        virtual_pipeline_model_parallel_size=split.virtual_pipeline if split.virtual_pipeline > 1 else None,
        expert_model_parallel_size=split.expert,
        expert_tensor_parallel_size=split.expert_tensor,
        create_gloo_process_groups=False,
    )
    torch.cuda.current_device = lambda: device  # type: ignore[assignment,return-value]
    model_parallel_cuda_manual_seed(1)
    try:
        with _CudaMeans(device):
            yield joined_topology(split, rank=rank, world=model.world, device=device)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(model: TrainedModel, topology: Topology) -> list[Model]:
    with topology.device:
        return build_chunks(
            model.shape, topology, model.split, device="cuda", is_adapted=model.lora is not None, has_float32_head=False
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All ranks of a model against layouts and plan; the lists say what is wrong."""

    role: str
    ranks: int
    wrong_layouts: list[str]
    wrong_sizes: list[str]
    wrong_shards: list[str]


def check_ranks(model: TrainedModel) -> Found:
    parallel, meta = model.parallel, torch.device("meta")
    whole = megatron_layout(model.shape, parallel, dtype=_DTYPE)
    trained = whole if model.lora is None else adapter_layout(whole, LoraShape.of(model.lora), dtype=_DTYPE)
    stages = stage_memory(model.shape, parallel, dtype=_DTYPE, lora=model.lora)
    layouts, sizes = list[str](), list[str]()
    ranges: dict[int, dict[str, FlatRange]] = {}
    buffered = set[str]()
    for rank in range(model.world):
        with joined(model, rank, meta) as topology:
            chunks = build(model, topology)
            weights = {name: each.data for name, each in named_weights(chunks).items()}
            try:
                check_holding(whole.by_rank[rank], specs_of(weights.items()), holder=f"rank {rank}")
                if model.lora is not None:
                    attach_adapters(chunks, trained.by_rank[rank], model.lora, device=meta)
                    adapters = {name: each.data for name, each in named_weights(chunks).items() if each.requires_grad}
                    check_holding(trained.by_rank[rank], specs_of(adapters.items()), holder=f"rank {rank}")
            except AssertionError as error:
                layouts.append(f"rank {rank}: {str(error)[:300]}")
                continue
            with meta:
                optimizer = ModelOptimizer(chunks, OptimizerConfig(), model.split)
            ranges[rank] = {name: shard.range for name, shard in optimizer.shards().items()}
            buffered |= weights.keys() - optimizer.parameters().keys()
            buffers = [each for chunk in optimizer.chunks for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            frozen = sum(2 * each.numel() for chunk in chunks for each in chunk.parameters() if not each.requires_grad)
            stage = stages[topology.pipeline_rank]
            held = frozen + sum(buffer.param_data.nbytes for buffer in buffers)
            summed = sum(buffer.grad_data.nbytes for buffer in buffers)
            kept = 12 * sum(end - start for start, end in ranges[rank].values())
            if held > stage.weight_bytes or summed > stage.gradient_bytes or kept > stage.optimizer_bytes:
                sizes.append(f"rank {rank}: {held, summed, kept} bytes, planned {stage}")
            if rank % (model.world // parallel.pipeline) == 0 and (held, summed) != (
                stage.weight_bytes,
                stage.gradient_bytes,
            ):
                sizes.append(f"rank {rank}, the fullest of its stage: {held, summed} bytes, planned {stage}")
    return Found(
        role=model.role,
        ranks=len(ranges),
        wrong_layouts=layouts,
        wrong_sizes=sizes,
        wrong_shards=list(_uncovered(trained, ranges, buffered=buffered if model.lora is None else frozenset())),
    )


def _uncovered(layout: Layout, ranges: Mapping[int, Mapping[str, FlatRange]], *, buffered: Set[str]) -> Iterator[str]:
    """Yield what the checkpoint boxes of all shards together do not have exactly once per copy of a weight.

    Ranks that hold the same boxes are replicas; their shards are a partition of them. The optimizer has no shards of
    buffers (`buffered`), such as the bias of a router.
    """
    held, boxed = defaultdict[tuple[object, ...], int](int), defaultdict[tuple[object, ...], int](int)
    for rank, of_rank in ranges.items():
        holding = layout.by_rank[rank]
        shard = restrict(holding, of_rank, dtype="float32")
        by_name = defaultdict[str, list[object]](list)
        for piece in holding.pieces:
            by_name[piece.local_name].append((piece.slice, piece.local_offsets))
        elements = defaultdict[str, int](int)
        for piece in shard.pieces:
            elements[piece.local_name] += piece.slice.num_elements
        for name, boxes in by_name.items():
            key = (name, *boxes)
            held[key] = sum(piece.slice.num_elements for piece in holding.pieces if piece.local_name == name)
            boxed[key] += elements[name]
    for key, num_elements in held.items():
        if key[0] not in buffered and (boxed[key] % num_elements or not boxed[key]):
            yield f"{key[0]}: {boxed[key]} elements in shards, {num_elements} in the weight"


def install() -> None:
    """Replace what Megatron asks of torch.cuda in this process; tensors without memory have the type of a GPU's."""
    cpu.install()
    type_name = torch.Tensor.type

    def without_device(tensor: Tensor, *args: object, **kwargs: object) -> object:
        result = type_name(tensor, *args, **kwargs)  # type: ignore[call-overload]
        return result.replace("cuda.meta.", "cuda.") if isinstance(result, str) else result

    torch.Tensor.type = without_device  # type: ignore[assignment]
    # Random states are compared by value, which tensors without memory do not have.
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # type: ignore[method-assign,misc]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes that a chunk of the first stage keeps for its backward pass, and what the planner expects."""

    role: str
    kept_bytes: int
    planned_bytes: int


def kept_by_a_micro_batch(model: TrainedModel, *, tokens_per_micro_batch: int) -> Kept:
    """Run one micro-batch of whole sequences through the first chunk, with the kernels of a GPU replaced by shapes."""
    work = ModelWork.of(
        model.shape, model.split, tokens_per_micro_batch=tokens_per_micro_batch, device="cuda", lora=model.lora
    )
    host = torch.device("cpu")
    with joined(model, 0, host) as topology, FakeTensorMode(allow_non_fake_inputs=True):
        chunk = build(model, topology)[0]
        if model.lora is not None:
            layout = megatron_layout(model.shape, model.parallel, dtype=_DTYPE)
            holding = adapter_layout(layout, LoraShape.of(model.lora), dtype=_DTYPE).by_rank[0]
            attach_adapters([chunk], holding, model.lora, device=host)
        planned = _kept_bytes_per_token(work.chunks(0)[0])
        own = {each.untyped_storage()._cdata for each in (*chunk.parameters(), *chunk.buffers())}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage.nbytes()
                alive.append(storage)
            return tensor

        alive: list[torch.UntypedStorage] = []  # no other gets its address
        hidden = torch.empty(
            work.tokens // (model.split.tensor if model.split.is_sequence_parallel else 1),
            1,
            model.shape.hidden,
            dtype=torch.bfloat16,
            requires_grad=True,
        )
        sequences = _sequences(model, work.tokens, topology)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            chunk.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=sequences)
    return Kept(
        role=model.role,
        kept_bytes=sum(kept.values()),
        planned_bytes=work.tokens * planned,
    )


def _sequences(model: TrainedModel, tokens: int, topology: Topology) -> PackedSequences:
    """Return one sequence that fills the micro-batch."""
    angles = torch.empty(tokens, model.shape.head_dim // 2)
    starts = torch.empty(2, dtype=torch.int32)
    part = None
    if topology.context > 1:
        size = topology.context
        lengths = [tokens // 2, tokens // 2]
        # Of the zigzag's two chunks rank r sees r + 1 and 2 size - r of 2 size.
        keys = [tokens // 2, tokens // 2 * 2 * size]
        places = torch.empty(tokens * size, dtype=torch.int64)
        part = ContextPart(
            group=topology.context_group,
            places=places,
            gathered=places,
            lengths=[tokens * size],
            seen=SeenKeys(
                places=torch.empty(sum(keys), dtype=torch.int32),
                order=torch.empty(sum(keys), dtype=torch.int32),
                bounds=torch.empty(tokens * size + 1, dtype=torch.int32),
                spans=_spans(lengths, keys),
                group=topology.context_group,
            ),
            whole=PackedSequences(starts=starts, lengths=[tokens]),
        )
    rotation = Rotation(cosines=angles, sines=angles.clone())
    return PackedSequences(starts=starts, lengths=[tokens], rotations=(rotation, rotation), part=part)


def replace_kernels() -> None:
    """Replace the kernels of a GPU by functions with the same shapes, and choose them where a CPU has others."""
    kernels = types.ModuleType("megarl.train.kernels")
    functions: dict[tuple[object, str], Callable[..., object]] = {
        (kernels, "rotate"): lambda values, *_, **__: torch.empty_like(values),
        (kernels, "gate"): lambda gate_up: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
        (attention, "rotated"): lambda values, by: _apply(attention._Rotated, values, by.cosines, by.sines),
        (attention, "attend_to_seen"): _attend_to_seen,
        (attention, "group_by_length"): lambda _: None,
        (attention, "attend_by_length"): lambda q, k, v, _, softmax: _flash(q, k, v, len(q), softmax),
        (layers, "gated"): lambda gate_up, **_: _apply(layers._Gated, gate_up),
        (layers.RMSNorm, "forward"): _norm,
        (token_dispatcher, "permute"): _permute,
        (MoEAlltoAllTokenDispatcher, "preprocess"): _count_equally,
        (Model, "to"): lambda model, *_, **__: model,  # it is there already
    }
    for (owner, name), function in functions.items():
        assert owner is kernels or hasattr(owner, name), f"{owner} has no {name}"
        setattr(owner, name, function)
    sys.modules[kernels.__name__] = kernels


def _apply(function: type[torch.autograd.Function], *arguments: Tensor) -> Tensor:
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _Selected(torch.autograd.Function):
    """Keeps what `masked_select` keeps, and returns as many values as there are places."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(values, mask)
        return values.new_empty(len(places))


def _norm(norm: RMSNorm, hidden: Tensor) -> Tensor:
    return _apply(_Normed, hidden.float() if norm.is_centred else hidden, norm.weight).type_as(hidden)


class _Normed(torch.autograd.Function):
    """Keeps what CUDA's kernel keeps; a CPU would keep the products of its own norm."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(hidden)


def _count_equally(dispatcher: MoEAlltoAllTokenDispatcher, routing_map: Tensor) -> npt.NDArray[np.int64]:
    """Send each expert as many tokens: how many it gets is data, which no fake tensor has."""
    ranks, number = dispatcher.ep_size * dispatcher.tp_size, dispatcher.num_local_experts
    dispatcher.num_out_tokens = len(routing_map) * dispatcher.config.moe_router_topk
    counts = np.full((ranks, number), dispatcher.num_out_tokens // dispatcher.num_experts)
    assert counts.sum() * dispatcher.ep_size == dispatcher.num_out_tokens * ranks, "experts get unequal parts"
    dispatcher.input_splits = dispatcher.output_splits = counts[: dispatcher.ep_size].sum(axis=1).tolist()
    dispatcher.output_splits_tp = np.full(dispatcher.tp_size, dispatcher.num_out_tokens // dispatcher.ep_size)
    dispatcher.num_global_tokens_per_local_expert = counts
    chunks = np.arange(counts.size)
    dispatcher.sort_input_by_local_experts = chunks.reshape(-1, number).T.ravel()
    dispatcher.restore_output_by_local_experts = chunks.reshape(number, -1).T.ravel()
    tokens: npt.NDArray[np.int64] = counts.sum(axis=0)
    return tokens


def _permute(
    tokens: Tensor, routing_map: Tensor, *, probs: Tensor, num_out_tokens: int, **_: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Megatron's, of a map without values."""
    places = torch.empty(num_out_tokens, dtype=torch.int64)
    weights = _apply(_Selected, probs.T.contiguous(), routing_map.T.contiguous(), places)
    return tokens.index_select(0, places), weights, places


def _attend_to_seen(query: Tensor, key: Tensor, value: Tensor, seen: SeenKeys, softmax: Softmax) -> Tensor:
    whole = gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=seen.group)
    parts = whole.split((key.shape[-1], value.shape[-1]), dim=-1)
    keys, values = (part.index_select(0, seen.places) for part in parts)
    return _flash(query, keys, values, seen.spans.most_keys, softmax)


def _flash(query: Tensor, keys: Tensor, values: Tensor, longest: int, softmax: Softmax) -> Tensor:
    return attend_by_flash(query, keys, values, _spans([longest], [longest]), softmax)


def _spans(query_lengths: list[int], key_lengths: list[int]) -> Spans:
    starts = torch.empty(len(query_lengths) + 1, dtype=torch.int32)
    return Spans(query_starts=starts, key_starts=starts, query_lengths=query_lengths, key_lengths=key_lengths)


def few_layers(name: str) -> TrainedModel:
    """Return the first layers of a public model, on one rank."""
    shape, few = PUBLIC_MODELS[name], range(4)
    shape = replace(
        shape,
        num_layers=len(few),
        vocab=32_000,
        window_layers=tuple(layer for layer in shape.window_layers if layer in few),
        delta_layers=tuple(layer for layer in shape.delta_layers if layer in few),
    )
    return TrainedModel(role="actor", shape=shape, split=ActorConfig(pool="train"), lora=None, world=1)


def findings(what: str, subject: str) -> Iterator[Found | Kept]:
    if what == "layers":
        yield kept_by_a_micro_batch(few_layers(subject), tokens_per_micro_batch=_DIVISIBLE_TOKENS)
        return
    recipe = read_recipe(Path(subject), []).recipe
    recipe = planned(recipe, gpu_of(recipe.cluster))
    for model in trained_models(recipe):
        tokens = recipe.train.micro_batch_tokens
        yield check_ranks(model) if what == "layouts" else kept_by_a_micro_batch(model, tokens_per_micro_batch=tokens)


def main(what: str, subject: str) -> None:
    torch.set_num_threads(1)
    install()
    if what != "layouts":
        replace_kernels()
    for found in findings(what, subject):
        sys.stdout.write(f"{json.dumps(asdict(found))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
