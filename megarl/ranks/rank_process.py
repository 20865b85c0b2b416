"""The process of a rank: how it starts, which driver it obeys, and what it says of itself while it computes."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ray

from megarl.cluster.cluster import own_address
from megarl.cluster.remote_process import RemoteProcess, this_process
from megarl.env import (
    FLIGHT_RECORDER,
    GLOO_INTERFACE,
    NCCL_VARIABLES,
    kernel_caches,
    nccl_interface,
    update_environment,
)
from megarl.errors import WorkerError
from megarl.ranks.calls import ModelCalls
from megarl.ranks.column_host import ColumnHost
from megarl.ranks.flight import GroupCalls, capture_collectives
from megarl.ranks.hang import RankStacks, capture
from megarl.system.affinity import bind_to_gpu
from megarl.system.imports import uncollected
from megarl.system.network import interface_of
from megarl.system.process_log import log_process
from megarl.system.start_log import note_piece, noted_piece, process_began
from megarl.train.profiling import RankProfile
from megarl.train.rank_spec import RankSpec
from megarl.types import ONE_POLICY

logger = logging.getLogger(__name__)

ALWAYS = "always"
"""Concurrency group of calls that return even while a rank hangs."""


class RankProcess(ColumnHost):
    """The process of one rank, without the calls of its model.

    Each call that changes something has the token of its driver. One of a driver that another has followed is refused.
    """

    def __init__(self, bind: str | None, log: Path | None = None) -> None:
        """Write all output of the process to `log`."""
        super().__init__()
        for variable in (*NCCL_VARIABLES, FLIGHT_RECORDER):
            if not variable.is_set:
                variable.set(variable.default)
        if log is not None:
            _log_to(log)
        self._ranks: dict[str, ModelCalls] = {}
        """By policy; the first has the name of a run's only one."""
        self._spec: RankSpec | None = None
        self._listener: socket.socket | None = None
        """Rank 0's: another process could take a port that is only known to be free."""
        self._has_failed = False
        self._profile: RankProfile | None = None
        self._is_replaced = threading.Event()
        self._host = own_address(bind)
        note_piece("process", began=process_began())
        self._idle_since = time.time()
        # Gloo would listen on the interface the host's name resolves to.
        if (interface := interface_of(self._host)) is not None:
            update_environment({GLOO_INTERFACE.name: interface, **nccl_interface(interface)})

    def find_address(self) -> tuple[str, int]:
        """Return this node's address and the port of rank 0's rendezvous, where it listens from now on."""
        self._listener = socket.create_server((self._host, 0), backlog=1024)
        self._idle_since = time.time()
        return self._host, self._listener.getsockname()[1]

    def start(self, build: Callable[[RankSpec], ModelCalls], spec: RankSpec) -> None:
        """Build the rank and fill it with weights."""
        note_piece("wait", began=self._idle_since)
        with noted_piece("imports"), uncollected():
            import megarl.train.rank  # noqa: F401, PLC0415 - Megatron, which every rank needs
        if spec.device == "cuda":
            update_environment(kernel_caches())
            bind_to_gpu()
        if self._listener is not None:
            spec = replace(spec, listener=self._listener.detach())
        self._spec, self._ranks = spec, {ONE_POLICY: build(spec)}

    def start_beside(self, token: int, policy: str, build: Callable[[RankSpec, ModelCalls], ModelCalls]) -> None:
        """Build the rank of another policy beside the first, and fill it with weights."""
        self._fence.enter(token)
        assert self._spec is not None, "start comes first"
        self._ranks[policy] = build(self._spec, self._ranks[ONE_POLICY])

    def begin_profile(self) -> None:
        """Record what this rank computes from now on."""
        self._profile = RankProfile()

    def end_profile(self, path: Path) -> list[Path]:
        """Write what was recorded; return the files, none where nothing was."""
        profile, self._profile = self._profile, None
        return [] if profile is None else profile.write(path)

    @ray.method(concurrency_group=ALWAYS)  # type: ignore[untyped-decorator]
    def follow(self, token: int) -> RemoteProcess:
        """Refuse what earlier drivers ask from now on; what they began goes on."""
        self._fence.enter(token)
        return this_process()

    @ray.method(concurrency_group=ALWAYS)  # type: ignore[untyped-decorator]
    def leave(self, token: int) -> None:
        """End this process, unless a later driver has called it."""
        self._fence.enter(token)
        os.kill(os.getpid(), signal.SIGKILL)

    def adopt(self, token: int, fill: Callable[[ModelCalls], bool]) -> bool:
        """Let `fill` bring the rank to this driver's state, after every call that an earlier driver began."""
        self._fence.enter(token)
        if not self._ranks or self._has_failed:
            raise WorkerError("it was left without a model, or inside a call that failed")
        return fill(self._ranks[ONE_POLICY])

    @ray.method(concurrency_group=ALWAYS)  # type: ignore[untyped-decorator]
    def process(self) -> RemoteProcess:
        return this_process()

    @ray.method(concurrency_group=ALWAYS)  # type: ignore[untyped-decorator]
    def watch(self) -> None:
        """Wait until another driver watches: this one learns at once when the process ends."""
        self._is_replaced.set()
        self._is_replaced = replaced = threading.Event()
        replaced.wait()

    @ray.method(concurrency_group=ALWAYS)  # type: ignore[untyped-decorator]
    def stacks(self) -> RankStacks:
        return capture(*(each.__module__ for each in type(self).__mro__))

    @ray.method(concurrency_group=ALWAYS)  # type: ignore[untyped-decorator]
    def collectives(self, path: Path) -> tuple[GroupCalls, ...]:
        """Return the last collective of every group, and write torch's whole record to `path`."""
        return capture_collectives(path)


def _log_to(path: Path) -> None:
    """Write the output of this process to the file."""
    try:
        log_process(path)
    except OSError as error:
        logger.warning("the log of this rank is left to Ray: %s: %s", path, error.strerror)
