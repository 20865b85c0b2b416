"""The methods of ranks that a driver calls. It names them here, and so does not import Megatron.

Every method is collective: all ranks are called, each with the batch of its data-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megarl.checkpoint.manifest import Contents, FileDigest
from megarl.checkpoint.resume import TrainerState
from megarl.config.lora import LoraConfig
from megarl.config.model import ModelShape
from megarl.config.roles import ModelParallelConfig
from megarl.config.section import Device
from megarl.results import CriticResult, UpdateResult
from megarl.tokens import SampleNumbers
from megarl.types import FloatArray, TrainBatch

if TYPE_CHECKING:
    from megarl.weights.recordings import WeightDigests

RECORD_PREFIX = "trainer_"
"""Begins the names of the files that `ActorCalls.record` writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """The arguments that every rank starts with."""

    rank: int
    world: int
    master_address: str
    master_port: int
    """Port of rank 0, where all ranks rendezvous."""
    device: Device
    split: ModelParallelConfig
    shape: ModelShape
    seed: int
    timeout_s: float
    """Deadline of every wait for another rank."""
    lora: LoraConfig | None = None
    """The adapter that is trained in place of the model's own weights."""
    has_float32_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRecord:
    """The result of `ActorCalls.record`, which writes the recording itself to a file."""

    logprobs: FloatArray | None  # [T], of the response tokens; None on ranks that do not answer
    weight_digests: WeightDigests


class ModelCalls(Protocol):
    """Calls to any model (`rank.ModelRank`)."""

    def load(self, folder: Path) -> None: ...

    def trim(self) -> None: ...

    def release(self) -> None: ...

    def reload(self) -> None: ...

    def measure(self) -> float: ...


class TrainedCalls(ModelCalls, Protocol):
    """Calls to a model with an optimizer (`trained.TrainedRank`)."""

    @property
    def state(self) -> TrainerState: ...

    def verify(self, checkpoint: Path, inner: str) -> None: ...

    def resume(self, folder: Path, state: TrainerState) -> None: ...

    def snapshot(self, contents: Contents) -> TrainerState: ...

    def write(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]: ...

    def export(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]: ...


class ActorCalls(TrainedCalls, Protocol):
    """Calls to the policy (`actor.ActorRank`)."""

    def update(self, batch: TrainBatch) -> UpdateResult: ...

    def logprobs(self, batch: TrainBatch) -> SampleNumbers | None: ...

    def reference_logprobs(self, batch: TrainBatch) -> SampleNumbers | None: ...

    def keep_reference(self, folder: Path) -> None: ...

    def refresh_reference(self) -> None: ...

    def record(self, batch: TrainBatch, folder: Path) -> TrainerRecord: ...


class CriticCalls(TrainedCalls, Protocol):
    """Calls to the critic (`critic.CriticRank`)."""

    def update(self, batch: TrainBatch) -> CriticResult: ...

    def values(self, batch: TrainBatch) -> SampleNumbers | None: ...


class ImplicitRewardCalls(TrainedCalls, Protocol):
    """Calls to the reward model of `prime` (`critic.ImplicitRewardRank`)."""

    def learn(self, batch: TrainBatch) -> CriticResult: ...

    def rewards(self, batch: TrainBatch) -> SampleNumbers | None: ...


class ReferenceCalls(ModelCalls, Protocol):
    """Calls to a reference in its own pool (`rank.ReferenceRank`)."""

    def logprobs(self, batch: TrainBatch) -> SampleNumbers | None: ...


class TeacherCalls(ModelCalls, Protocol):
    """Calls to a teacher (`rank.TeacherRank`)."""

    def scores(self, batch: TrainBatch) -> SampleNumbers | None: ...
