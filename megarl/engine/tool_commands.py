"""Both ends of the commands that only tools and tests send to the TP ranks of an engine; no publish loads this file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import assert_never

import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.engine.adapter_slots import AdapterSlots
from megarl.engine.commands import Dump, Fingerprint, StartRecording, ToolCommand, WriteRecording
from megarl.engine.control import EngineControl
from megarl.errors import WeightSyncError
from megarl.weights.algebra.slices import Layout
from megarl.weights.executors.tensors import bytes_of
from megarl.weights.layouts.transfer_spec import TransferSpec
from megarl.weights.recordings import (
    LM_HEAD,
    ActivationPatch,
    PatchPlace,
    Recorder,
    WeightDigests,
    module_hooks,
    weight_digests,
    write_patches,
)

FILE_PREFIX = "engine_"
"""Names of the files that hold recordings begin with it."""
_LOGITS = "logits_processor"


class ToolControl(EngineControl):
    """An EngineControl with the commands that only tools and tests send."""

    async def fingerprints(self) -> list[Mapping[str, int]]:
        """Return a hash of the bytes of every parameter, per target rank."""
        return [reply.digests for reply in await self.ask(Fingerprint())]

    async def dump(self, folder: Path, *, adapter: str | None = None) -> None:
        """Let every target rank write its parameters, or a loaded adapter, into a file of `folder`."""
        await self.ask(Dump(folder=str(folder), adapter=adapter))

    async def start_recording(self, transfer: TransferSpec) -> None:
        """Let every target rank record the outputs of its modules."""
        await self.ask(StartRecording(transfer=transfer))

    async def write_recording(self, folder: Path) -> list[WeightDigests]:
        """Let every target rank write its recording into a file of `folder`; return the digests of its weights."""
        return [reply.digests for reply in await self.ask(WriteRecording(folder=str(folder)))]


def dump_file(*, engine: int, tp_rank: int) -> str:
    """Return the name of the file into which a TP rank dumps its parameters."""
    return f"engine_{engine}_rank_{tp_rank}.safetensors"


class ToolCommandHandler:
    """Handles tool commands inside one TP process. It holds the recording that is under way."""

    def __init__(self) -> None:
        self._recorder: EngineRecorder | None = None

    def handle(self, command: ToolCommand, model: torch.nn.Module, *, engine: int, tp_rank: int) -> Mapping[str, int]:
        """Return the digests that the command asks for."""
        match command:
            case Fingerprint():
                return {name: _fingerprint(tensor) for name, tensor in model.named_parameters()}
            case Dump(folder=folder, adapter=adapter):
                tensors: dict[str, Tensor] = dict(model.named_parameters())
                if adapter is not None:
                    slots = AdapterSlots.of_caller()
                    tensors = slots.tensors(slots.take(adapter))
                _dump(tensors, Path(folder) / dump_file(engine=engine, tp_rank=tp_rank))
            case StartRecording(transfer=transfer):
                if self._recorder is not None:
                    self._recorder.close()
                rank = transfer.target_rank(engine=engine, tp_rank=tp_rank)
                self._recorder = EngineRecorder(model, transfer.engine_layout(), rank)
            case WriteRecording(folder=folder):
                return self._write_recording(Path(folder))
            case _:
                assert_never(command)
        return {}

    def _write_recording(self, folder: Path) -> WeightDigests:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise WeightSyncError("nothing was recorded; start_recording comes first")
        recorder.close()
        return recorder.write(folder)


HANDLER = ToolCommandHandler()
"""That of this process."""


class EngineRecorder:
    """Records the modules of an SGLang model with torch hooks.

    For one request at a time: the first pass is that of the prompt, and one pass per token follows.
    """

    def __init__(self, model: torch.nn.Module, layout: Layout, rank: int) -> None:
        self._model = model
        self._layout = layout
        self._rank = rank
        modules = dict(model.named_modules())
        self._recorder = Recorder(modules, module_hooks(layout.by_rank[rank]))
        self._logits: list[tuple[int, Tensor]] = []
        self._num_tokens = 0
        self._handle = modules[_LOGITS].register_forward_hook(self._record_logits, with_kwargs=True)

    def close(self) -> None:
        self._recorder.close()
        self._handle.remove()

    def write(self, folder: Path) -> WeightDigests:
        """Write the recording into a file of `folder`; return the digests of the weights."""
        write_patches(folder / f"{FILE_PREFIX}{self._rank}.safetensors", self._patches())
        tensors = dict(self._model.named_parameters())
        return weight_digests(self._layout.by_rank[self._rank], self._layout.canonical, tensors)

    def _patches(self) -> Iterator[ActivationPatch]:
        yield from self._recorder.patches()
        for token, values in self._logits:
            yield ActivationPatch(place=PatchPlace(hook_point=LM_HEAD, token=token, column=0), values=values)

    def _record_logits(
        self, _: torch.nn.Module, arguments: tuple[object, ...], named: dict[str, object], output: object
    ) -> None:
        """Record the logits, which exist for the last position of a pass; every rank has all their columns."""
        logits = getattr(output, "next_token_logits", None)
        input_ids = arguments[0] if arguments else named["input_ids"]
        assert isinstance(input_ids, Tensor), f"input_ids is a {type(input_ids).__name__}"
        self._num_tokens += len(input_ids)
        if isinstance(logits, Tensor):
            # A copy: sampling divides the logits by the temperature in place.
            self._logits.append((self._num_tokens - 1, logits.detach().to("cpu", torch.float32, copy=True)))


def _fingerprint(tensor: Tensor) -> int:
    raw = bytes_of(tensor.detach().cpu().contiguous())
    return int.from_bytes(hashlib.blake2b(raw, digest_size=16).digest(), "big")


def _dump(tensors: Mapping[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
