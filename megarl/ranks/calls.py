"""The methods of ranks that a driver calls: `group.call(ActorCalls.send, version)` runs `PublishingActor.send`.

A driver names methods by these Protocols, and so does not import Megatron. Every method is collective: all ranks are
called, each with the batch of its data-parallel rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from megarl.checkpoint.manifest import Contents, FileDigest
from megarl.checkpoint.resume import TrainerState
from megarl.engine.commands import Rendezvous
from megarl.results import CriticResult, UpdateResult
from megarl.tokens import SampleColumn
from megarl.train.rank_spec import TrainerRecord
from megarl.types import TrainBatch
from megarl.weights.layouts.transfer_spec import TransferSpec


class ModelCalls(Protocol):
    """Calls to any model (`train.rank.ModelRank`)."""

    def load(self, folder: Path) -> None: ...

    def trim(self) -> None: ...

    def release(self) -> None: ...

    def reload(self) -> None: ...

    def measure(self) -> float: ...


class PolicyCalls(ModelCalls, Protocol):
    """Calls to a language model: the actor, a reference in its own pool or a teacher (`train.frozen`)."""

    def logprobs(self, batch: TrainBatch) -> SampleColumn | None: ...


class TrainedCalls(ModelCalls, Protocol):
    """Calls to a model with an optimizer (`train.trained.TrainedRank`)."""

    @property
    def state(self) -> TrainerState: ...

    def verify(self, checkpoint: Path, inner: str) -> None: ...

    def resume(self, folder: Path, state: TrainerState) -> None: ...

    def snapshot(self, contents: Contents) -> TrainerState: ...

    def write(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]: ...

    def export(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]: ...


class ActorCalls(TrainedCalls, PolicyCalls, Protocol):
    """Calls to the policy that is trained and published (`ranks.publishing.PublishingActor`)."""

    def update(self, batch: TrainBatch) -> UpdateResult: ...

    def reference_logprobs(self, batch: TrainBatch) -> SampleColumn | None: ...

    def load_reference(self, folder: Path) -> None: ...

    def refresh_reference(self) -> None: ...

    def record(self, batch: TrainBatch, folder: Path) -> TrainerRecord: ...

    def join(self, transfer: TransferSpec, rendezvous: Rendezvous) -> None: ...

    def version(self) -> int: ...

    def send(self, version: int) -> dict[tuple[int, str], int]: ...


class CriticCalls(TrainedCalls, Protocol):
    """Calls to the critic (`train.critic.CriticRank`, for `prime` `ImplicitRewardRank`)."""

    def update(self, batch: TrainBatch) -> CriticResult: ...

    def values(self, batch: TrainBatch) -> SampleColumn | None: ...
