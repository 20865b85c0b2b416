"""One rank of a model that Megatron splits: its share in this process, and what every model needs.

Every method is collective: all ranks call it, each with the batch of its data-parallel rank. Numbers per token are
returned by one rank of each data-parallel replica of the model and are None elsewhere; other results are the same on
all ranks. Only `write` may run concurrently with the others, in its own thread. Knows no Ray: `runtime` starts the
processes and sets deadlines.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megarl.data.shares import unpack
from megarl.system.faults import Spoil, StepPoint, reach
from megarl.tokens import SampleNumbers
from megarl.train import cpu
from megarl.train.interface import RankSpec
from megarl.train.layer_spec import forget_buffers, forget_scales
from megarl.train.likeliest import top_scores
from megarl.train.logprob import TokenScores
from megarl.train.memory import free_cache
from megarl.train.model import (
    DeviceMicroBatch,
    Model,
    PolicyModel,
    build_chunks,
    named_weights,
    to_device,
    whole_column,
)
from megarl.train.passes import forward
from megarl.train.topology import initialize, shut_down
from megarl.types import MiniBatch, TrainBatch
from megarl.weights.executors.hf import load_hf
from megarl.weights.executors.tensors import check_holding, specs_of
from megarl.weights.layouts.canonical import VALUE_HEAD
from megarl.weights.layouts.lora import LOCAL_A, LOCAL_B
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout

_PRODUCT_CPU, _PRODUCT_GPU = 256, 2048
"""Sizes of the matrices of `measure`: a few milliseconds, and on a GPU 48 MiB."""
_NUM_PRODUCTS = 32


class ModelRank:
    """Owns the model's chunks in this process; they have no weights until `load`."""

    ROLE = "reference"

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        if spec.device == "cpu":
            cpu.install()
            # One thread: sums must not depend on the number of cores.
            torch.set_num_threads(1)
        with self._on_device():
            self._topology = initialize(
                spec.split,
                rank=spec.rank,
                world=spec.world,
                master_address=spec.master_address,
                master_port=spec.master_port,
                device=spec.device,
                seed=spec.seed,
                timeout_s=spec.timeout_s,
            )
            self._models: list[Model] = build_chunks(
                spec.shape,
                self._topology,
                spec.split,
                device=spec.device,
                is_adapted=spec.lora is not None,
                has_float32_head=spec.has_float32_head,
            )
        parallel = MegatronParallel.of(spec.split, data=self._topology.data)
        self._layout = megatron_layout(spec.shape, parallel, dtype=spec.split.dtype_on(spec.device))
        self._holding = self._layout.by_rank[spec.rank]
        check_holding(self._holding, specs_of(self.tensors().items()), holder=f"trainer rank {spec.rank}")

    def load(self, folder: Path) -> None:
        """Load the weights of a Hugging Face folder; each rank reads only its share.

        A critic may start from a language model; its value head is then zero.
        """
        self._read(folder, self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters, not copies, by their names in the weights' layout; adapters are not among them."""
        return {
            name: parameter.data
            for name, parameter in named_weights(self._models).items()
            if not name.endswith((LOCAL_A, LOCAL_B))
        }

    def trim(self) -> None:
        """Free the device's memory that only a pass needs, for engines of the same pool; the weights stay."""
        free_cache(self._topology.device)

    def release(self) -> None:
        """Free all memory that the recipe's `offload` says; here that is what `trim` frees."""
        free_cache(self._topology.device)

    def reload(self) -> None:
        """Take back what `release` freed; here that is nothing."""

    def measure(self) -> float:
        """Return the seconds of a fixed product of matrices on this rank's device; no other rank takes part."""
        device = self._topology.device
        with self._on_device(), torch.no_grad():
            size = _PRODUCT_CPU if device.type == "cpu" else _PRODUCT_GPU
            factor = torch.full((size, size), 1 / size, device=device)
            result = factor @ factor  # not measured: it loads the kernel
            float(result[0, 0])  # waits for the device
            began = time.monotonic()
            for _ in range(_NUM_PRODUCTS):
                result = factor @ result
            float(result[0, 0])
            return time.monotonic() - began

    def close(self) -> None:
        """Leave the groups of ranks; no method may be called afterwards."""
        if self._spec.split.precision == "fp8":
            forget_scales()
        if self._spec.split.dispatcher == "deepep":
            forget_buffers()
        shut_down()

    def _read(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        may_lack = (VALUE_HEAD,) if self._spec.shape.has_value_head else ()
        with self._on_device():
            load_hf(folder, self._holding, self._layout.canonical, tensors, may_lack=may_lack)

    def _reach(self, point: StepPoint, *, step: int | None = None) -> Spoil | None:
        return reach(point, step=step, rank=self._spec.rank, of=self.ROLE)

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        return cpu.literal_devices() if self._spec.device == "cpu" else contextlib.nullcontext()

    def _share(self, batch: TrainBatch, mini_batch: MiniBatch) -> list[DeviceMicroBatch]:
        return [
            to_device(micro_batch, self._topology, temperature=batch.temperature)
            for micro_batch in mini_batch.micro_batches
        ]

    def _unpack(self, batch: TrainBatch, columns: Sequence[Sequence[Tensor]]) -> SampleNumbers | None:
        """Return the numbers of the share's response tokens on the rank that answers, None on the others."""
        topology = self._topology
        if not (topology.is_last_stage and topology.tensor_rank == 0):
            return None
        whole = [
            [
                whole_column(column, micro_batch, topology)
                for column, micro_batch in zip(of_share, mini_batch.micro_batches, strict=True)
            ]
            for of_share, mini_batch in zip(columns, batch.mini_batches, strict=True)
        ]
        return unpack(batch, whole) if topology.context_rank == 0 else None


class ReferenceRank(ModelRank):
    """A rank of a reference policy in its own pool: weights without an optimizer."""

    def logprobs(self, batch: TrainBatch) -> SampleNumbers | None:
        """Return the log-probabilities of the response tokens."""
        with self._on_device():
            scores: list[list[TokenScores]] = [self._score(batch, item) for item in batch.mini_batches]
            return self._unpack(batch, [[item.logprobs for item in of_share] for of_share in scores])

    def _score(self, batch: TrainBatch, mini_batch: MiniBatch) -> list[TokenScores]:
        self._reach("asked")
        return forward(self._models, self._share(batch, mini_batch))


class TeacherRank(ModelRank):
    """A rank of a teacher: weights without an optimizer, of any shape with the policy's vocabulary."""

    ROLE = "teacher"

    def __init__(self, spec: RankSpec, *, num_top: int, vocab: int) -> None:
        """`vocab` is the size of the policy's vocabulary, from which the likeliest tokens are."""
        super().__init__(spec)
        for model in self._models:
            assert isinstance(model, PolicyModel), "a teacher without a language head"
            model.teaching = partial(top_scores, num_top=num_top, vocab=vocab)

    def scores(self, batch: TrainBatch) -> SampleNumbers | None:
        """Return `top_scores` of the response tokens."""
        self._reach("asked")
        with self._on_device():
            scores: list[list[Tensor]] = [
                forward(self._models, self._share(batch, item)) for item in batch.mini_batches
            ]
            return self._unpack(batch, scores)
