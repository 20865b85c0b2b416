"""What passes through the modules of a rank, kept in a file; and the files of all ranks, put together again.

Knows torch modules and where their columns belong (`sites`), neither Megatron nor SGLang.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.compare.hook_points import Columns, Watch
from megarl.errors import WeightSyncError

_PLACES = "places"
_SAME = 1e-2
"""Copies of a sum differ by rounding only; the parts of one by far more than this, relative to their size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchPlace:
    """The corner of a patch in the output of its site."""

    site: str
    token: int
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPatch:
    place: PatchPlace
    values: Tensor  # [tokens, columns], float32, on the host


class Recorder:
    """Listens to modules from the moment it is made until it is closed."""

    def __init__(
        self, modules: Mapping[str, torch.nn.Module], watches: Iterable[Watch], *, max_calls: int | None = None
    ) -> None:
        """Calls of a module follow each other in the order of the tokens; `max_calls` of them count."""
        self._max_calls = max_calls
        self._heard: defaultdict[Columns, list[Tensor]] = defaultdict(list)
        found = [(modules.get(watch.module), watch) for watch in watches]
        missing = [watch.module for module, watch in found if module is None]
        if missing:
            raise WeightSyncError(f"there is no module {missing[0]} to listen to ({len(missing)} are missing)")
        self._handles = [
            handle for module, watch in found if module is not None for handle in self._listen(module, watch)
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def patches(self, *, part: int = 0) -> Iterator[ActivationPatch]:
        """What was heard. Where the tokens of whole-width outputs are split over ranks, `part` is this rank's."""
        for columns, calls in self._heard.items():
            values = torch.cat(calls)
            token = part * len(values) if columns.size is None else 0
            yield ActivationPatch(place=PatchPlace(site=columns.site, token=token, column=columns.first), values=values)

    def _listen(self, module: torch.nn.Module, watch: Watch) -> list[torch.utils.hooks.RemovableHandle]:
        def before(_: torch.nn.Module, arguments: tuple[object, ...], named: Mapping[str, object]) -> None:
            self._keep(watch.takes, next(item for item in (*arguments, *named.values()) if isinstance(item, Tensor)))

        def after(_: torch.nn.Module, __: object, output: object) -> None:
            self._keep(watch.makes, output[0] if isinstance(output, tuple) else output)

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    def _keep(self, wanted: Sequence[Columns], tensor: object) -> None:
        assert isinstance(tensor, Tensor), f"a module made a {type(tensor).__name__}"
        rows = tensor.detach().reshape(-1, tensor.shape[-1])
        for columns in wanted:
            calls = self._heard[columns]
            if self._max_calls is None or len(calls) < self._max_calls:
                cut = rows if columns.size is None else rows.narrow(1, columns.local_first, columns.size)
                # A copy: what comes next may work in place.
                calls.append(cut.to(device="cpu", dtype=torch.float32, copy=True))


def write_patches(path: Path, patches: Iterable[ActivationPatch]) -> None:
    tensors, places = {}, {}
    for index, patch in enumerate(patches):
        tensors[str(index)] = patch.values.contiguous()
        places[str(index)] = asdict(patch.place)
    save_file(tensors, path, metadata={_PLACES: json.dumps(places)})


class Recording:
    """The files that all ranks of one side wrote about the same tokens."""

    def __init__(self, files: Iterable[Path], *, num_tokens: int) -> None:
        """Of each site the first `num_tokens` rows count: what follows is padding, or was run ahead of time."""
        self._num_tokens = num_tokens
        self._by_site: defaultdict[str, list[tuple[PatchPlace, Path, str]]] = defaultdict(list)
        for path in files:
            with safe_open(path, framework="pt") as file:
                for key, place in json.loads(file.metadata()[_PLACES]).items():
                    self._by_site[place["site"]].append((PatchPlace(**place), path, key))

    def __contains__(self, site: str) -> bool:
        return site in self._by_site

    def patches(self, site: str) -> list[ActivationPatch]:
        return [ActivationPatch(place=place, values=_read(path, key)) for place, path, key in self._by_site[site]]

    def whole(self, site: str) -> Tensor:
        """[tokens, columns] of a site, from the parts of all ranks."""
        by_place: defaultdict[PatchPlace, list[Tensor]] = defaultdict(list)
        for patch in self.patches(site):
            by_place[patch.place].append(patch.values)
        assert by_place, f"nobody recorded {site}"
        width = max(place.column + values[0].shape[1] for place, values in by_place.items())
        whole = torch.full((self._num_tokens, width), torch.nan)
        for place, copies in by_place.items():
            values = _merged(copies)
            into = whole[place.token : place.token + len(values), place.column : place.column + values.shape[1]]
            into.copy_(values[: len(into)])
        return whole


def _merged(copies: Sequence[Tensor]) -> Tensor:
    """One of equal copies; else their sum: an engine may leave the reduction of a layer's output to a later kernel."""
    first = copies[0]
    scale = first.norm()
    if all((copy - first).norm() <= _SAME * scale for copy in copies[1:]):
        return first
    return torch.stack(list(copies)).sum(dim=0)


def _read(path: Path, key: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(key)
    return tensor
