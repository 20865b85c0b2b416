"""What the driver can ask of an engine's TP ranks, and what they answer: JSON in a tensor, JSON in a store.

SGLang hands weights to a loader function inside each TP process and tells nothing back, so an order travels as the only
"weight" of an update and the answer through a key-value store. All of it is small: no weights, no plan, no secrets.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field, TypeAdapter

from megarl.config.model import ModelShape
from megarl.weights.algebra.locality import Gpu, Locations, on_gpus
from megarl.weights.algebra.plan import Plan, plan
from megarl.weights.algebra.slices import Layout, TensorSpec
from megarl.weights.executors.group import Backend, StoreAddress
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout

_TENSOR_NAME = "megarl.order"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpec:
    """From which trainer layout to which engines: enough for every process to compute the same plan by itself."""

    shape: ModelShape
    parallel: MegatronParallel
    trainer_dtype: str
    num_engines: int
    tensor: int
    """TP ranks of each engine."""
    engine_dtype: str
    is_cpu_engine: bool
    expert: int = 1
    """Sets that an engine's experts are divided into."""
    shares_devices: bool = False
    """Whether both roles are in one pool: engine ranks then read what a trainer rank on their GPU holds."""
    trainer_gpus: tuple[Gpu, ...] = ()
    """Of each rank; empty is a node for each, unless `shares_devices`."""
    engine_gpus: tuple[Gpu, ...] = ()
    """Of each target rank; empty is a node for each, or with `shares_devices` the GPU of the same trainer rank."""
    relays: bool = False
    """Whether nodes of engines pass weights on to each other."""
    keeps_open: bool = True
    """Whether the trainer's memory stays open in the engines between publishes: it cannot be given back meanwhile."""

    @property
    def num_peers(self) -> int:
        return self.parallel.world_size + self.num_engines * self.tensor

    def target_rank(self, *, engine: int, tp_rank: int) -> int:
        """Of a TP rank, in the plan; `engine` counts within the engines of this route."""
        return engine * self.tensor + tp_rank

    def peer(self, target_rank: int) -> int:
        """In the transfer group: trainer ranks come first."""
        return self.parallel.world_size + target_rank

    def engine_layout(self) -> Layout:
        return sglang_layout(
            self.shape,
            tensor=self.tensor,
            expert=self.expert,
            num_engines=self.num_engines,
            dtype=self.engine_dtype,
            is_cpu_engine=self.is_cpu_engine,
        )

    def trainer_layout(self) -> Layout:
        return megatron_layout(self.shape, self.parallel, dtype=self.trainer_dtype)

    def with_engines(self, positions: Sequence[int]) -> TransferSpec:
        """To some of the engines only, in this order. Each stays where it is."""
        if [*positions] == [*range(self.num_engines)]:
            return self
        gpus = self._gpus_of_engines()
        chosen = [gpus[position * self.tensor : (position + 1) * self.tensor] for position in positions]
        return replace(self, num_engines=len(positions), engine_gpus=tuple(gpu for few in chosen for gpu in few))

    def plan(self) -> Plan:
        """Kept for the last few routes: engines come and go, and often come back."""
        return _planned(self)

    def seating(self) -> Locations:
        num_trainers, num_targets = self.parallel.world_size, self.num_engines * self.tensor
        trainers = self.trainer_gpus or tuple((rank, 0) for rank in range(num_trainers))
        engines = self._gpus_of_engines()
        assert (len(trainers), len(engines)) == (num_trainers, num_targets), f"{len(trainers)} and {len(engines)} GPUs"
        return on_gpus(trainers, engines)

    def _gpus_of_engines(self) -> tuple[Gpu, ...]:
        first = 0 if self.shares_devices else self.parallel.world_size
        return self.engine_gpus or tuple((first + rank, 0) for rank in range(self.num_engines * self.tensor))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where trainer and engine ranks form a transfer group, and under which name."""

    address: StoreAddress
    name: str
    timeout_s: float
    """Deadline of the meeting itself and of each transfer after it."""
    backend: Backend
    bucket_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Say which parameters you have."""

    op: Literal["inspect"] = "inspect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Compute the plan, compare its hash, and meet the others."""

    route: TransferSpec
    plan_hash: str
    meeting: Rendezvous
    op: Literal["join"] = "join"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Receive a version beside the parameters; answer with a digest per parameter."""

    version: int
    op: Literal["stage"] = "stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Make the staged version the one that is served."""

    version: int
    op: Literal["commit"] = "commit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Forget what is staged."""

    op: Literal["abort"] = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Hash the bytes of every parameter as it is served."""

    op: Literal["fingerprint"] = "fingerprint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Write every parameter as it is served into a file of `folder`; see `dump_file`."""

    folder: str
    op: Literal["dump"] = "dump"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """From now on, keep what passes through your modules."""

    route: TransferSpec
    op: Literal["listen"] = "listen"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordModules:
    """Write what was heard since `listen` into a file, listen no more; answer with a digest per canonical box."""

    folder: str
    op: Literal["record"] = "record"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Close the transfer group."""

    op: Literal["leave"] = "leave"


Command: TypeAlias = Annotated[
    Inspect | Join | Stage | Commit | Abort | Fingerprint | Dump | Listen | RecordModules | Leave,
    Field(discriminator="op"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """An order, whom it is for, and where the answer goes."""

    order: Command
    engine: int
    """Position among the engines that are asked together."""
    tp_rank: int
    host: str
    """At which the engine is reached by the other members of a transfer group."""
    mailbox: StoreAddress
    reply_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """`error` is None when the order was carried out; the rest is filled where the order asks for it."""

    error: str | None = None
    parameters: Mapping[str, TensorSpec] = field(default_factory=dict)
    digests: Mapping[str, int] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)


@lru_cache(maxsize=8)
def _planned(route: TransferSpec) -> Plan:
    return plan(route.trainer_layout(), route.engine_layout(), seating=route.seating(), relays=route.relays)


def dump_file(*, engine: int, tp_rank: int) -> str:
    """What a TP rank calls the file it dumps its parameters into."""
    return f"engine_{engine}_rank_{tp_rank}.safetensors"


_ENVELOPE: TypeAdapter[Envelope] = TypeAdapter(Envelope)
_REPLY: TypeAdapter[Reply] = TypeAdapter(Reply)


def to_payload(envelope: Envelope) -> str:
    """As SGLang's endpoint takes it. A plain pickle of a CPU tensor needs nothing shared between the processes."""
    tensor = torch.frombuffer(bytearray(_ENVELOPE.dump_json(envelope)), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([(_TENSOR_NAME, tensor)])).decode("ascii")


def read_envelope(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> Envelope:
    """Inverse of `to_payload`, after SGLang has unpickled it. A ValueError says what is wrong with it."""
    tensors = dict(named_tensors)
    if set(tensors) != {_TENSOR_NAME}:
        raise ValueError(f"expected one tensor named {_TENSOR_NAME}, got {sorted(tensors)[:5]}")
    return _ENVELOPE.validate_json(tensors[_TENSOR_NAME].cpu().numpy().tobytes())


def to_bytes(reply: Reply) -> bytes:
    return _REPLY.dump_json(reply)


def read_reply(payload: bytes) -> Reply:
    return _REPLY.validate_json(payload)
