"""An adapter of trainer ranks is put into Ray's object store, from where engines get it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from uuid import uuid4

import numpy as np
import ray
import torch

from megarl.cluster.stored_adapter import DIGESTING_THREADS, Content, StoredAdapter, digest_of, header_of
from megarl.weights.executors.tensors import bytes_of, specs_of


def store_adapter(
    tensors: Mapping[str, torch.Tensor],
    fields: Mapping[str, object],
    *,
    version: int,
    put: Callable[[Content], ray.ObjectRef] = ray.put,
) -> StoredAdapter:
    """Put the tensors of an adapter into the object store; `fields` are its configuration."""
    specs = specs_of(tensors.items())
    header, _ = header_of(specs)
    flat = _flat([tensors[entry.name] for entry in header.entries])
    with ThreadPoolExecutor(DIGESTING_THREADS) as threads:
        digests = threads.map(partial(digest_of, header, flat), header.entries)
        content = put(flat)
        by_name = {entry.name: digest for entry, digest in zip(header.entries, digests, strict=True)}
    return StoredAdapter(
        token=uuid4().hex,
        version=version,
        content=content,
        config=json.dumps(fields),
        tensors=specs,
        digests=by_name,
    )


def _flat(tensors: Sequence[torch.Tensor]) -> Content:
    """Return the bytes of tensors, as a copy unless they lie one after the other in one buffer."""
    ends = list(accumulate(tensor.nbytes for tensor in tensors))
    starts = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(storages) == 1 and starts == [0, *ends[:-1]]:
        return tensors[0].detach().reshape(-1).view(torch.uint8).as_strided((ends[-1],), (1,)).numpy()
    return np.concatenate([np.frombuffer(bytes_of(tensor), np.uint8) for tensor in tensors])
