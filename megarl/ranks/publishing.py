"""An actor rank that sends its part to the engines: of the weights, of the adapter, or of both merged."""

from __future__ import annotations

import torch
from torch.nn.utils import get_total_norm

from megarl.checkpoint.save import UnfiniteError, refuse_unfinite
from megarl.cluster.cluster import own_address
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.roles import OptimizerConfig
from megarl.engine.commands import Rendezvous
from megarl.errors import NumericsError, WeightSyncError
from megarl.train.actor import ActorRank
from megarl.train.lora import MergedTensors
from megarl.train.rank_spec import RankSpec
from megarl.weights.executors.derived import DerivedTensors
from megarl.weights.executors.digest import fastest_digest
from megarl.weights.executors.fp8 import Fp8Tensors
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.transfer import Sender
from megarl.weights.layouts.transfer_spec import TransferSpec


class PublishingActor(ActorRank):
    """An actor rank in a transfer group with engine ranks; `ActorRank` knows neither engines nor Ray."""

    def __init__(
        self,
        spec: RankSpec,
        *,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
        epochs: int,
        bind: str | None,
        beside: PublishingActor | None = None,
    ) -> None:
        """`bind` is `network.bind` of the recipe: the address at which engines reach this rank."""
        super().__init__(
            spec,
            algorithm=algorithm,
            optimizer=optimizer,
            total_steps=total_steps,
            epochs=epochs,
            beside=beside,
        )
        self._bind = bind
        self._group: TransferGroup | None = None
        self._sender: Sender | None = None
        self._derived: DerivedTensors | None = None

    def join(self, transfer: TransferSpec, rendezvous: Rendezvous) -> None:
        """Form a transfer group with the engine ranks, which join at the same time."""
        earlier = self._group
        self._group = None
        self._sender = None
        self._derived = None
        if earlier is not None:
            earlier.close()
        plan = transfer.plan()
        lora = self._spec.lora
        if transfer.fp8_keep is not None:
            self._derived = Fp8Tensors(plan, self._spec.rank, self._holding, self.tensors())
        elif lora is not None and lora.is_merged:
            self._derived = MergedTensors(self._models, self.tensors())
        tensors = self.trained_tensors() if self._derived is None else self._derived.tensors
        self._group = TransferGroup.join(
            rendezvous.address,
            name=rendezvous.name,
            peer=self._spec.rank,
            num_peers=transfer.num_peers,
            timeout_s=rendezvous.timeout_s,
            join_timeout_s=rendezvous.join_timeout_s,
            backend=rendezvous.backend,
            host=own_address(self._bind),
        )
        self._sender = Sender(
            plan,
            self._spec.rank,
            tensors,
            self._group,
            bucket_bytes=rendezvous.bucket_bytes,
            digest=fastest_digest(is_on_host=transfer.is_cpu_engine),
            direct=transfer.direct,
            keeps_open=transfer.keeps_open,
        )

    def send(self, version: int) -> dict[tuple[int, str], int]:
        """Send this rank's part; return a digest of it per (engine rank, tensor)."""
        if not self.has_weights:
            raise WeightSyncError(
                f"the weights are in host memory until the next step (roles.{self.ROLE}.offload: everything)"
            )
        self._refuse_other(version)
        if self._spec.lora is not None:
            self._refuse_unfinite(version)
        assert self._sender is not None, "join comes first"
        if self._derived is not None:
            self._derived.fill()
        return self._sender.send(version)

    def release(self) -> None:
        if self._derived is not None:
            self._derived.free()
        super().release()

    def _refuse_other(self, version: int) -> None:
        own = self.version()
        if own != version:
            raise WeightSyncError(
                f"{self.ROLE} rank {self._spec.rank} holds version {own}: it cannot send version {version}"
            )

    def _refuse_unfinite(self, version: int) -> None:
        """Raise before an adapter leaves whose every answer would be NaN: the canary sees one publish in ten."""
        tensors = self.trained_tensors()
        if torch.isfinite(get_total_norm(tensors.values())):
            return
        try:
            refuse_unfinite(tensors)
        except UnfiniteError as error:
            raise NumericsError(
                f"actor rank {self._spec.rank}: version {version} was not published: {error}; engines keep the one "
                "before; lower train.optimizer.learning_rate and resume from the newest checkpoint"
            ) from None

    def version(self) -> int:
        """Return the version of the weights that this rank holds."""
        return self.state.num_updates


class Drafter(PublishingActor):
    """A rank of the model that drafts: it imitates the policy's responses, and is sent to the drafts of the engines."""

    ROLE = "drafter"
