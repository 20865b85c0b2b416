"""Saves canonical tensors as safetensors files, all trainer ranks together. Knows layouts and files, not Megatron.

Each rank is assigned whole canonical tensors, receives their pieces by plan and writes one file; no rank gathers the
model. A rank saves from a snapshot in host memory while the trainer already changes its tensors; it copies only the
boxes that the plan takes from it, so that replicas divide the work and nothing is held twice.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from megarl.checkpoint.manifest import FileDigest, FolderGrowth, TensorEntry, digest_file, read_chunks, sync
from megarl.checkpoint.tensor_files import TensorFile, read_tensor_folder, write_tensor_file
from megarl.config.lora import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from megarl.errors import CheckpointError, WeightSyncError
from megarl.families import BY_NAME
from megarl.families.interface import critic_architecture
from megarl.system.faults import reach, step_in
from megarl.weights.algebra.plan import Move, Plan, plan
from megarl.weights.algebra.slices import Holding, Index, Layout, Piece, TensorSpec, header_dtype, same_processes
from megarl.weights.executors.codecs import as_in_file
from megarl.weights.executors.exchange import exchange
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.hf import INDEX_FILE
from megarl.weights.executors.tensors import box_of, bytes_of, torch_dtype
from megarl.weights.layouts.pieces import stacked, whole
from megarl.weights.layouts.stored import file_shape, place_of

BoxView: TypeAlias = Callable[[str, Index, Index], torch.Tensor]
"""(name of a rank's own tensor, offsets, shape) -> that box of it."""

_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",
    "*.model",
)
"""Files that a model folder needs beside the weights."""
KEPT_FILE = "model-kept.safetensors"
"""Tensors that are not trained, such as those of a tower for images."""


def save_hf(
    folder: Path,
    *,
    source_folder: Path,
    layout: Layout,
    tensors: Mapping[str, torch.Tensor],
    group: TransferGroup,
    is_critic: bool = False,
    adapter_fields: Mapping[str, object] | None = None,
    kept: tuple[str, ...] = (),
) -> dict[str, FileDigest]:
    """Write the model that `layout` spreads over the peers of `group`; every peer calls this with its own tensors.

    It calls `save_tensors`, and peer 0 adds configuration and tokenizer of `source_folder`, a language model even for
    a critic. With `adapter_fields`, its configuration, an adapter is written as a folder of PEFT, which takes it from
    one file: peer 0 receives and writes all of it. Tensors of `source_folder` whose names begin with one of `kept` are
    copied.
    """
    file_name = None if adapter_fields is None else ADAPTER_FILE
    files = save_tensors(folder, layout=layout, tensors=tensors, group=group, file_name=file_name)
    with _failing_as_save(folder, group):
        if group.peer == 0 and adapter_fields is None:
            is_text_alone = _serves_text_alone(source_folder)
            files |= copy_companions(source_folder, folder, is_critic=is_critic, is_text_alone=is_text_alone)
            files |= _copy_kept(source_folder, folder, kept) if kept else {}
        elif group.peer == 0:
            path = folder / ADAPTER_CONFIG_FILE
            path.write_text(json.dumps(adapter_fields, indent=2) + "\n")
            # With the base's configuration the folder would pass for a whole model.
            files |= copy_companions(source_folder, folder, without=("config.json",))
            files[path.name] = _finish(path)
        if group.peer == 0:
            reach("companions_copied", step=step_in(folder), rank=group.peer)
        group.barrier(FolderGrowth(folder))
    return files


def save_tensors(
    folder: Path,
    *,
    layout: Layout,
    tensors: Mapping[str, torch.Tensor],
    group: TransferGroup,
    file_name: str | None = None,
) -> dict[str, FileDigest]:
    """Write canonical tensors and their index into a new folder, and return the files that this peer wrote, by name.

    Peer r of the (gloo) group is rank r of the layout. With `file_name` peer 0 writes one file of that name, without an
    index.
    """
    target = assign_tensors(layout) if file_name is None else _all_on_one(layout)
    moves = plan(layout, target, locations=same_processes(layout, target))
    files: dict[str, FileDigest] = {}
    with _failing_as_save(folder, group):
        if group.peer == 0:
            folder.mkdir(parents=True)
        group.barrier()
        names = _file_names(target) if file_name is None else {0: file_name}
        path = folder / names[group.peer] if group.peer in names else None
        written = receive_into(path, moves, tensors, group)
        if path is not None and written is not None:
            files[path.name] = written
            reach("file_written", step=step_in(folder), rank=group.peer)
            sync(path)
            reach("file_synced", step=step_in(folder), rank=group.peer)
        if group.peer == 0 and file_name is None:
            files[INDEX_FILE] = _write_index(folder, target, names)
            reach("index_written", step=step_in(folder), rank=group.peer)
        # The disk of another peer may be slow.
        group.barrier(FolderGrowth(folder))
    return files


@contextmanager
def _failing_as_save(folder: Path, group: TransferGroup) -> Iterator[None]:
    """Report a failure to the other peers too, so that they do not wait for this one."""
    try:
        yield
    except (WeightSyncError, UnfiniteError, OSError) as error:
        group.abandon(f"{folder} was not saved: {error}")
        raise CheckpointError(f"{folder} was not saved: {error}") from error


def assign_tensors(layout: Layout) -> Layout:
    """Assign every tensor of the files to one of the ranks that hold a part: largest first, to the least loaded."""
    holders: defaultdict[str, set[int]] = defaultdict(set)
    for holding in layout.holdings:
        for name in {piece.slice.name for piece in holding.pieces}:
            holders[place_of(name)[0]].add(holding.rank)
    sizes: defaultdict[str, int] = defaultdict(int)
    for name, spec in layout.canonical.items():
        sizes[place_of(name)[0]] += spec.num_bytes
    load = {holding.rank: 0 for holding in layout.holdings}
    assigned: defaultdict[int, list[str]] = defaultdict(list)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if not holders[name]:
            raise CheckpointError(f"no rank holds any of {name}")
        rank = min(holders[name], key=lambda rank: (load[rank], rank))
        load[rank] += sizes[name]
        assigned[rank].append(name)
    holdings = [_whole_holding(rank, sorted(assigned[rank]), layout.canonical) for rank in sorted(load)]
    return Layout(canonical=layout.canonical, holdings=tuple(holdings))


def _all_on_one(layout: Layout) -> Layout:
    others = [Holding(rank=holding.rank, tensors={}, pieces=()) for holding in layout.holdings if holding.rank]
    names = {place_of(name)[0] for name in layout.canonical}
    first = _whole_holding(0, sorted(names), layout.canonical)
    return Layout(canonical=layout.canonical, holdings=(first, *others))


def _whole_holding(rank: int, names: Iterable[str], canonical: Mapping[str, TensorSpec]) -> Holding:
    """Return tensors of the files, of which some are stacks of canonical ones, in their orientation."""
    stacks: defaultdict[str, list[str]] = defaultdict(list)
    for name in canonical:
        if (holder := place_of(name)[0]) != name:
            stacks[holder].append(name)
    tensors: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    for name in names:
        parts = [whole(part, part, canonical[part]) for part in stacks.get(name, ())]
        tensor = stacked(name, parts) if parts else whole(name, name, canonical[name])
        dtype = canonical[stacks[name][0] if parts else name].dtype
        tensors[name] = TensorSpec(shape=tensor.shape, dtype=dtype)
        pieces += tensor.pieces
    return Holding(rank=rank, tensors=tensors, pieces=tuple(pieces))


def _file_names(target: Layout) -> dict[int, str]:
    writers = [holding.rank for holding in target.holdings if holding.tensors]
    return {
        rank: f"model-{number:05d}-of-{len(writers):05d}.safetensors" for number, rank in enumerate(writers, start=1)
    }


def _write_index(folder: Path, target: Layout, names: Mapping[int, str]) -> FileDigest:
    weight_map = {name: names[holding.rank] for holding in target.holdings for name in holding.tensors}
    return write_index(folder, weight_map, num_bytes=sum(spec.num_bytes for spec in target.canonical.values()))


def write_index(folder: Path, weight_map: Mapping[str, str], *, num_bytes: int) -> FileDigest:
    """Write the index from tensor to file that transformers and SGLang read."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    path = folder / INDEX_FILE
    path.write_text(json.dumps(index, indent=2) + "\n")
    return _finish(path)


def copy_companions(
    source_folder: Path,
    folder: Path,
    *,
    dtype: str | None = None,
    is_critic: bool = False,
    is_text_alone: bool = False,
    without: Collection[str] = (),
) -> dict[str, FileDigest]:
    """Copy the files that a model needs beside its weights; dtype and architecture are updated in the configuration.

    With `is_text_alone` it says that the folder has none of the tensors that see images.
    """
    patterns = (pattern for pattern in _COPIED if pattern not in without)
    sources = {path.name: path for pattern in patterns for path in source_folder.glob(pattern) if path.is_file()}
    for name, source in sources.items():
        shutil.copyfile(source, folder / name)
    if dtype is not None or is_critic or is_text_alone:
        _change_config(folder / "config.json", dtype=dtype, is_critic=is_critic, is_text_alone=is_text_alone)
    return {name: _finish(folder / name) for name in sources}


def _serves_text_alone(folder: Path) -> bool:
    family = BY_NAME.get(json.loads((folder / "config.json").read_text()).get("model_type"))
    return family is not None and family.engine.is_text_alone


def _copy_kept(source_folder: Path, folder: Path, prefixes: tuple[str, ...]) -> dict[str, FileDigest]:
    """Copy tensors that no rank has into a file of their own, one after the other, and add them to the index."""
    placed = {name: each for name, each in read_tensor_folder(source_folder).items() if name.startswith(prefixes)}
    if not placed:
        return {}
    specs = {name: (each.entry.dtype, each.entry.shape) for name, each in placed.items()}

    def content(entry: TensorEntry) -> Iterator[memoryview]:
        source = placed[entry.name]
        with source.path.open("rb", buffering=0) as file:
            file.seek(source.entry.start)
            yield from read_chunks(file, source.entry.num_bytes)

    path = folder / KEPT_FILE
    written = write_tensor_file(path, specs, content)
    sync(path)
    index = json.loads((folder / INDEX_FILE).read_text())
    weight_map = {**index["weight_map"], **dict.fromkeys(placed, KEPT_FILE)}
    num_bytes = index["metadata"]["total_size"] + sum(each.entry.num_bytes for each in placed.values())
    return {path.name: written, INDEX_FILE: write_index(folder, weight_map, num_bytes=num_bytes)}


def _change_config(path: Path, *, dtype: str | None, is_critic: bool, is_text_alone: bool) -> None:
    config = json.loads(path.read_text())
    if dtype is not None:
        # transformers 5 writes `dtype`; earlier versions read `torch_dtype`.
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if is_critic:
        config["architectures"] = [critic_architecture(config["architectures"][0])]
        # transformers takes the number of outputs from the labels.
        config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    if is_text_alone:
        config["language_model_only"] = True
    path.write_text(json.dumps(config, indent=2) + "\n")


def _finish(path: Path) -> FileDigest:
    sync(path)
    return digest_file(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """The boxes that ranks copy for a save of one layout; computed once."""

    layout: Layout
    """Layout of the snapshots of all ranks: each box is a tensor of its own."""
    boxes: Mapping[str, tuple[str, Index]]
    """This rank's boxes, by their names in `layout`: the tensor that has the box, and its offsets there."""


def contribution(layout: Layout, rank: int) -> Contribution:
    """Return the contribution to a save of `layout`, the layout of the trainer's own tensors.

    Saving it writes the same files from the same ranks: each keeps a part of every tensor that it is assigned, and no
    rank holds a part of a tensor that it did not hold before.
    """
    target = assign_tensors(layout)
    moves = plan(layout, target, locations=same_processes(layout, target))
    holdings = [_boxes_of(holding, moves.moves_from(holding.rank)) for holding in layout.holdings]
    return Contribution(
        layout=Layout(canonical=layout.canonical, holdings=tuple(holdings)),
        boxes={_name(move): (move.source_name, move.source_offsets) for move in moves.moves_from(rank)},
    )


def copy_to_host(contributed: Contribution, rank: int, view: BoxView) -> dict[str, torch.Tensor]:
    """Return copies of this rank's boxes in host memory."""
    specs = contributed.layout.by_rank[rank].tensors
    copies: dict[str, torch.Tensor] = {}
    device = torch.device("cpu")
    for name, (source_name, offsets) in contributed.boxes.items():
        source = view(source_name, offsets, specs[name].shape)
        device = source.device
        # Pinned memory lets the copies of all boxes run at the same time.
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=device.type == "cuda")
        copies[name] = copy.copy_(source, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return copies


def _boxes_of(holding: Holding, moves: Iterable[Move]) -> Holding:
    tensors: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    for move in moves:
        box, name = move.slice, _name(move)
        tensors[name] = TensorSpec(shape=box.shape, dtype=holding.tensors[move.source_name].dtype)
        pieces.append(Piece(slice=box, local_name=name, local_offsets=(0,) * len(box.shape)))
    return Holding(rank=holding.rank, tensors=tensors, pieces=tuple(pieces))


def _name(move: Move) -> str:
    return str(move.slice)


class UnfiniteError(Exception):
    """A tensor to be saved has NaN or infinite values."""


def receive_into(
    path: Path | None,
    moves: Plan,
    tensors: Mapping[str, torch.Tensor],
    group: TransferGroup,
) -> FileDigest | None:
    """Receive this peer's targets of a plan and write them to a new file, which is not synced; every peer calls this.

    A peer without targets has no path, and returns None. The file is whole only when this has returned: digests of
    what was received are compared last.
    """
    if path is None:
        exchange(moves, tensors, {}, group)
        return None
    specs = moves.target.by_rank[group.peer].tensors
    parts = _room_for_parts(moves, tensors, group.peer)
    headers = {name: (header_dtype(spec.dtype), file_shape(name, spec.shape)) for name, spec in specs.items()}
    with closing(TensorFile(path, headers)) as file, ThreadPoolExecutor(1) as writer:
        entries, written = {entry.name: entry for entry in file.entries}, dict[str, Future[None]]()

        def write(name: str) -> None:
            refuse_unfinite({name: parts[name]})
            file.write(entries[name], [bytes_of(as_in_file(name, parts[name]))])

        def begin(name: str) -> None:
            written[name] = writer.submit(write, name)

        try:
            exchange(moves, tensors, parts, group, filled=begin)
            reach("tensors_received", step=step_in(path), rank=group.peer)
            for name in parts.keys() - written.keys():  # nothing is sent of an empty tensor
                begin(name)
            for future in written.values():
                future.result()
        finally:
            writer.shutdown(cancel_futures=True)
        return file.digest()


def _room_for_parts(moves: Plan, tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Return this rank's whole tensors in host memory, to be filled; those that it has already are not copied."""
    local = {
        move.target_name: box
        for move in moves.moves_to(rank)
        if move.source_rank == rank
        and (box := box_of(tensors[move.source_name], move.source_offsets, move.slice.shape)).device.type == "cpu"
        and box.is_contiguous()
    }
    return {
        name: local[name]
        if name in local and (local[name].shape, local[name].dtype) == (spec.shape, torch_dtype(spec.dtype))
        else torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        for name, spec in moves.target.by_rank[rank].tensors.items()
    }


def refuse_unfinite(parts: Mapping[str, torch.Tensor]) -> None:
    """Raise on NaN or infinite values: a checkpoint of broken weights would replace a good one."""
    # Sums need no second tensor of the same size; because they may overflow, what has a bad one is checked again.
    sums = [tensor.sum(dtype=torch.float32) for tensor in parts.values()]
    if not sums or torch.isfinite(torch.stack(sums)).all():
        return
    for name, tensor in parts.items():
        if not torch.isfinite(tensor).all():
            num_broken = int((~torch.isfinite(tensor)).sum())
            raise UnfiniteError(f"{num_broken} of {tensor.numel()} values of {name} are NaN or infinite")
