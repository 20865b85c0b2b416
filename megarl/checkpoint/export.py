"""Export of a checkpoint's model to a folder of its own, a few megabytes in memory at a time.

`model/` of a checkpoint is a Hugging Face model already: an export changes dtype and number of files and omits the
state of the run. The folder gets its name after everything in it has been read back and compared.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from megarl.checkpoint.folder import CONFIG_FILE, ModelSource
from megarl.checkpoint.manifest import FileDigest, OnBytes, TensorEntry, digest_file, read_chunks, sync
from megarl.checkpoint.save import copy_companions, write_index
from megarl.checkpoint.tensor_files import PlacedTensor, read_tensor_folder, write_tensor_file
from megarl.config.lora import read_adapter_config
from megarl.errors import CheckpointError
from megarl.weights.algebra.slices import HEADER_DTYPES, header_dtype
from megarl.weights.executors.tensors import bytes_of, torch_dtype
from megarl.weights.layouts.lora import canonical_a, canonical_b

MAX_SHARD_BYTES = 5_000_000_000

_CHUNK_BYTES = 8 << 20
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The matrices that are added to those of a base."""

    tensors: Mapping[str, PlacedTensor]
    scale: float

    def change_of(self, name: str) -> torch.Tensor | None:
        """Return what is added to the tensor `name` of the base, in float32; None if that one stays as it is."""
        first, second = (self.tensors.get(canonical(name)) for canonical in (canonical_a, canonical_b))
        if first is None or second is None:
            return None
        return self.scale * (_read_whole(second) @ _read_whole(first))


def open_adapter(source: ModelSource, base: Path | None) -> tuple[Adapter, ModelSource]:
    """Return the adapter of a folder of PEFT and its base, which is where the folder says or at the path `base`."""
    try:
        lora, named = read_adapter_config(source.folder)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    base = base or named
    if not (base / CONFIG_FILE).exists():
        raise CheckpointError(f"{source.folder}: its base {base} is not a Hugging Face folder; name it with --base")
    tensors = read_tensor_folder(source.tensor_folder)
    own = read_tensor_folder(base)
    for module in tensors:
        name = module.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        name = name.replace(".lora_B.weight", ".weight")
        if name not in own:
            raise CheckpointError(f"{source.folder}: {name} is not in its base {base}; a critic cannot be merged")
    return Adapter(tensors=tensors, scale=lora.scale), ModelSource(folder=base, tensor_folder=base, digests={})


def _read_whole(tensor: PlacedTensor) -> torch.Tensor:
    entry = tensor.entry
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(entry.start)
        content = bytearray(file.read(entry.num_bytes))
    values = torch.frombuffer(content, dtype=torch_dtype(HEADER_DTYPES[entry.dtype]))
    return values.view(entry.shape).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    num_tensors: int
    num_bytes: int
    """Size of all tensors."""
    num_files: int
    """Number of tensor files."""
    num_cast: int
    """Number of tensors whose dtype changed."""


def export_model(
    source: ModelSource,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_bytes: OnBytes | None = None,
    check: Callable[[Path], object] | None = None,
    adapter: Adapter | None = None,
) -> Exported:
    """Write the model to `out`, which must not exist or be empty; floating-point tensors become `dtype`.

    An `adapter` is added to the matrices, one at a time.
    `check` is called with the finished folder before it gets its name; if it raises, the export fails.
    """
    tensors = read_tensor_folder(source.tensor_folder)
    wanted = {name: _as_dtype(tensor.entry, dtype) for name, tensor in tensors.items()}
    shards = split_shards(wanted, max_shard_bytes=max_shard_bytes)
    num_bytes = sum(entry.num_bytes for entry in wanted.values())
    with _new_folder(out, num_bytes=num_bytes + _SPARE_BYTES) as partial:
        written = _write_shards(partial, shards, tensors, source.digests, on_bytes, adapter)
        written |= _copy_companions(source.folder, partial, dtype=dtype)
        _check_written(partial, wanted, written)
        if check is not None:
            check(partial)
    return Exported(
        num_tensors=len(tensors),
        num_bytes=num_bytes,
        num_files=len(shards),
        num_cast=sum(wanted[name].dtype != tensor.entry.dtype for name, tensor in tensors.items()),
    )


def refuse_occupied(out: Path) -> None:
    """Raise a CheckpointError if `out` or its temporary folder exists: an export overwrites nothing."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: exists and is not an empty folder; name another")
    partial = _partial(out)
    if partial.exists():
        raise CheckpointError(f"{partial}: exists; unless another export is running, one was killed: remove it")


def split_shards(wanted: Mapping[str, TensorEntry], *, max_shard_bytes: int) -> list[dict[str, TensorEntry]]:
    """Return the tensors of each file, in the order of the layers; a tensor above the limit gets a file of its own."""
    shards: list[dict[str, TensorEntry]] = [{}]
    num_bytes = 0
    for name in sorted(wanted, key=_natural):
        size = wanted[name].num_bytes
        if shards[-1] and num_bytes + size > max_shard_bytes:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = wanted[name]
        num_bytes += size
    return shards


def _as_dtype(entry: TensorEntry, dtype: str | None) -> TensorEntry:
    """Return the entry with another dtype; integers and quantised tensors keep theirs."""
    if dtype is None or entry.dtype not in HEADER_DTYPES:
        return entry
    return replace(entry, dtype=header_dtype(dtype))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _partial(out: Path) -> Path:
    return out.with_name(f"{out.name}.tmp")


@contextmanager
def _new_folder(out: Path, *, num_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `out` at the end, and removed if the body raises."""
    refuse_occupied(out)
    partial = _partial(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(out.parent).free
        if free_bytes < num_bytes:
            raise CheckpointError(
                f"{out}: needs {num_bytes / 1e9:.1f} GB and {free_bytes / 1e9:.1f} GB are free; make room"
            )
        partial.mkdir()
        try:
            yield partial
            sync(partial)
            partial.rename(out)
            sync(out.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(f"{out} was not written: {error}") from error


def _write_shards(
    folder: Path,
    shards: list[dict[str, TensorEntry]],
    tensors: Mapping[str, PlacedTensor],
    digests: Mapping[str, FileDigest],
    on_bytes: OnBytes | None,
    adapter: Adapter | None,
) -> dict[str, FileDigest]:
    expected = {tensor.name: tensor.xxh3_128 for file in digests.values() for tensor in file.tensors}
    files: dict[str, FileDigest] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        specs = {tensor: (entry.dtype, entry.shape) for tensor, entry in shard.items()}
        files[name] = write_tensor_file(
            folder / name,
            specs,
            lambda entry: _read_changed(tensors[entry.name], entry.dtype, expected.get(entry.name), on_bytes, adapter),
        )
        sync(folder / name)
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, file in files.items() for tensor in file.tensors}
        num_bytes = sum(tensor.num_bytes for file in files.values() for tensor in file.tensors)
        write_index(folder, weight_map, num_bytes=num_bytes)
    return files


def _read_changed(
    tensor: PlacedTensor, dtype: str, expected: str | None, on_bytes: OnBytes | None, adapter: Adapter | None
) -> Iterator[memoryview]:
    change = None if adapter is None else adapter.change_of(tensor.entry.name)
    if change is None:
        yield from _read_as(tensor, dtype, expected, on_bytes)
        return
    yield bytes_of((_read_whole(tensor) + change).to(torch_dtype(HEADER_DTYPES[dtype])).contiguous())
    if on_bytes is not None:
        on_bytes(tensor.entry.num_bytes)


def _read_as(tensor: PlacedTensor, dtype: str, expected: str | None, on_bytes: OnBytes | None) -> Iterator[memoryview]:
    """Yield a tensor's bytes in `dtype`, a chunk at a time, and compare the bytes read with their digest."""
    digest = xxhash.xxh3_128()
    entry = tensor.entry
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(entry.start)
        for chunk in read_chunks(file, entry.num_bytes, chunk_bytes=_CHUNK_BYTES):
            digest.update(chunk)
            yield chunk if dtype == entry.dtype else _cast(chunk, entry.dtype, dtype)
            if on_bytes is not None:
                on_bytes(len(chunk))
    if expected is not None and digest.hexdigest() != expected:
        raise CheckpointError(f"{tensor.path}: damaged: tensor {entry.name} does not have the digest of the manifest")


def _cast(chunk: memoryview, dtype: str, wanted: str) -> memoryview:
    values = torch.frombuffer(chunk, dtype=torch_dtype(HEADER_DTYPES[dtype]))
    return bytes_of(values.to(torch_dtype(HEADER_DTYPES[wanted])))


def _copy_companions(source_folder: Path, folder: Path, *, dtype: str | None) -> dict[str, FileDigest]:
    files = copy_companions(source_folder, folder, dtype=dtype)
    changed = {CONFIG_FILE} if dtype is not None else set()
    return {name: file if name in changed else digest_file(source_folder / name) for name, file in files.items()}


def _check_written(folder: Path, wanted: Mapping[str, TensorEntry], written: Mapping[str, FileDigest]) -> None:
    """Read everything back and compare names, shapes and dtypes of the headers, and digests of the bytes."""
    specs = {name: (tensor.entry.dtype, tensor.entry.shape) for name, tensor in read_tensor_folder(folder).items()}
    if specs != {name: (entry.dtype, entry.shape) for name, entry in wanted.items()}:
        raise CheckpointError(f"{folder}: names, shapes or dtypes read back differ from those written")
    for name, expected in written.items():
        if digest_file(folder / name) != expected:
            raise CheckpointError(f"{folder / name}: the bytes read back differ from those written; check the disk")
