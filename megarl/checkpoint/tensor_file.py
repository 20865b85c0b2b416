"""Writing safetensors files a piece at a time, digests on the way. Bytes: no torch, no layouts.

The library would copy every tensor before it writes one, and the digests would cost a second pass over the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import xxhash

from megarl.checkpoint.manifest import FileDigest, TensorDigest
from megarl.checkpoint.tensor_header import TensorEntry, make_header

Buffer: TypeAlias = bytes | memoryview

_WRITE_BYTES = 1 << 20
"""Small enough to be written from a core's cache, where hashing it has left it."""


def write_tensor_file(
    path: Path,
    specs: Mapping[str, tuple[str, tuple[int, ...]]],
    contents: Callable[[TensorEntry], Iterable[Buffer]],
) -> FileDigest:
    """Write a new file with tensors of these dtypes and shapes; `contents` gives the bytes of each in turn.

    The caller syncs it.
    """
    header, text = make_header(specs)
    tensors = []
    with path.open("xb", buffering=0) as file:
        own = _write(file.fileno(), [text])
        for entry in header.entries:
            written = _write(file.fileno(), contents(entry))
            assert written.num_bytes == entry.num_bytes, f"{entry}: {written.num_bytes} bytes"
            tensors.append(TensorDigest(name=entry.name, num_bytes=entry.num_bytes, xxh3_128=written.xxh3_128))
    return FileDigest(num_bytes=header.num_file_bytes, xxh3_128=own.xxh3_128, tensors=tuple(tensors))


def _write(descriptor: int, pieces: Iterable[Buffer]) -> FileDigest:
    digest = xxhash.xxh3_128()
    num_bytes = 0
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), _WRITE_BYTES):
            part = view[start : start + _WRITE_BYTES]
            digest.update(part)
            while part:
                # A write may take less than it is given, as just before a disk is full.
                part = part[os.write(descriptor, part) :]
        num_bytes += len(view)
    return FileDigest(num_bytes=num_bytes, xxh3_128=digest.hexdigest())
