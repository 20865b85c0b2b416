"""What the driver can ask of an engine's TP ranks, and what they answer: JSON in a tensor, JSON in a store.

SGLang hands weights to a loader function inside each TP process and tells nothing back, so an order travels as the only
"weight" of an update and the answer through a key-value store. All of it is small: no weights, no plan, no secrets.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field, TypeAdapter

from megarl.weights.algebra.slices import TensorSpec
from megarl.weights.executors.group import Backend, StoreAddress
from megarl.weights.layouts.transfer_spec import TransferSpec

_TENSOR_NAME = "megarl.order"


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

    transfer: TransferSpec
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

    transfer: TransferSpec
    op: Literal["listen"] = "listen"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordModules:
    """Write what was heard since `listen` into a file, listen no more; answer with a digest per canonical box."""

    folder: str
    op: Literal["record"] = "record"


Command: TypeAlias = Annotated[
    Inspect | Join | Stage | Commit | Abort | Fingerprint | Dump | Listen | RecordModules,
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
