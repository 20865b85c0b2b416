"""The commands of a publish, from the driver to the TP ranks of an engine, and the replies.

SGLang hands weights to a loader function inside each TP process and returns nothing from it. A command therefore
travels as JSON in the only tensor of a weight update, and its reply as JSON in a key-value store. Commands are small:
no weights, no plan, no secrets.
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
from megarl.weights.executors.meeting import Backend, StoreAddress
from megarl.weights.layouts.transfer_spec import TransferSpec

_TENSOR_NAME = "megarl.command"
_MAX_JOIN_S = 120.0
"""A peer that takes longer to join is stuck in a failure before, and is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where trainer and engine ranks form a transfer group, and under which name."""

    address: StoreAddress
    name: str
    timeout_s: float
    """Deadline of each transfer."""
    backend: Backend | None
    """None where no bytes are sent: engine ranks read them all from the memory of trainer ranks."""
    bucket_bytes: int

    @property
    def join_timeout_s(self) -> float:
        """Deadline of the rendezvous itself, which moves no weights."""
        return min(self.timeout_s, _MAX_JOIN_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Reply with the name, shape and dtype of every parameter."""

    op: Literal["inspect"] = "inspect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Compute the plan, compare its hash, and join the transfer group; an earlier one of this name is left first."""

    transfer: TransferSpec
    plan_hash: str
    rendezvous: Rendezvous
    op: Literal["join"] = "join"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Receive a version in place; reply with a digest per tensor."""

    version: int
    group: str
    """Name of the transfer group."""
    adapter: str | None = None
    """Name of the loaded adapter that has no values yet and gets them; None: the parameters get them."""
    op: Literal["receive"] = "receive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Reply with a hash of the bytes of every parameter."""

    op: Literal["fingerprint"] = "fingerprint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Write every parameter, or those of a loaded adapter, into a file of `folder`; see `dump_file`."""

    folder: str
    adapter: str | None = None
    op: Literal["dump"] = "dump"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecording:
    """Record the outputs of the modules from now on."""

    transfer: TransferSpec
    op: Literal["start_recording"] = "start_recording"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRecording:
    """Stop recording, write the recording into a file of `folder`, and reply with a digest per canonical box."""

    folder: str
    op: Literal["write_recording"] = "write_recording"


ToolCommand: TypeAlias = Fingerprint | Dump | StartRecording | WriteRecording
"""Only tools and tests send these; `tool_commands` handles them."""
PublishCommand: TypeAlias = Inspect | Join | Receive
Command: TypeAlias = Annotated[PublishCommand | ToolCommand, Field(discriminator="op")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandMessage:
    """A command with its addressee and the place for the reply."""

    command: Command
    engine: int
    """Position among the engines that get the command."""
    tp_rank: int
    host: str
    """The engine's address for the other members of a transfer group."""
    mailbox: StoreAddress
    reply_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """`error` is None after a success; the other fields are filled by the commands that ask for them."""

    error: str | None = None
    parameters: Mapping[str, TensorSpec] = field(default_factory=dict)
    digests: Mapping[str, int] = field(default_factory=dict)


_MESSAGE: TypeAdapter[CommandMessage] = TypeAdapter(CommandMessage)
_REPLY: TypeAdapter[Reply] = TypeAdapter(Reply)


def to_payload(message: CommandMessage) -> str:
    """Encode a message for SGLang's endpoint. A plain pickle of a CPU tensor needs no memory that processes share."""
    tensor = torch.frombuffer(bytearray(_MESSAGE.dump_json(message)), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([(_TENSOR_NAME, tensor)])).decode("ascii")


def read_message(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> CommandMessage:
    """Decode what SGLang has unpickled from `to_payload`; ValueError where it is something else."""
    tensors = dict(named_tensors)
    if set(tensors) != {_TENSOR_NAME}:
        raise ValueError(f"expected one tensor named {_TENSOR_NAME}, got {sorted(tensors)[:5]}")
    return _MESSAGE.validate_json(tensors[_TENSOR_NAME].cpu().numpy().tobytes())


def to_bytes(reply: Reply) -> bytes:
    return _REPLY.dump_json(reply)


def read_reply(payload: bytes) -> Reply:
    return _REPLY.validate_json(payload)
