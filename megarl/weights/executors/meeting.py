"""How the peers of a group meet: the key-value store of one of them, and waits in it that a deadline or a peer ends."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from megarl.errors import WeightSyncError, first_line
from megarl.system.network import LOOPBACK

Backend: TypeAlias = Literal["gloo", "nccl"]

_POLL_S = 0.0005
"""First pause of a wait; each further one is twice as long, up to a limit."""
ABANDONED = "abandoned"
"""The key under which a peer leaves its reason to end the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    host: str
    port: int


class StoreServer:
    """A key-value store that this process serves while this object lives."""

    def __init__(self, host: str = LOOPBACK) -> None:
        # The store would listen on every interface; it takes over a listener that is bound to one.
        listener = socket.create_server((host, 0), backlog=1024)
        self.address = StoreAddress(host=host, port=listener.getsockname()[1])
        self._store = TCPStore(
            host,
            self.address.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def meet(
    store: Store,
    prefix: str,
    peer: int,
    num_peers: int,
    timeout_s: float,
    what: str,
    check: Callable[[], None],
    is_moving: Callable[[], bool] | None = None,
) -> None:
    """Return once all peers have called this. The last one notifies the others, which poll one key each.

    `check` raises where a peer has given up; there is as much time again while `is_moving` says so.
    """
    store.set(f"{prefix} {peer}", "")
    if store.add(f"{prefix}s", 1) == num_peers:
        store.set(f"all {prefix}s", "")
    try:
        await_keys(store, [f"all {prefix}s"], timeout_s, what, check, is_moving)
    except MissingError:
        missing = [f"{prefix} {i}" for i in range(num_peers) if not store.check([f"{prefix} {i}"])]
        raise MissingError(f"{what}: after {timeout_s:g} s still no {', '.join(missing)}") from None


def forget_meeting(store: Store, prefix: str, peer: int) -> None:
    """Delete this peer's part of the keys of `meet`."""
    for key in (f"{prefix} {peer}", *((f"{prefix}s", f"all {prefix}s") if peer == 0 else ())):
        store.delete_key(key)


class MissingError(WeightSyncError):
    """Keys did not appear in time."""


def await_keys(
    store: Store,
    keys: Sequence[str],
    timeout_s: float,
    what: str,
    check: Callable[[], None],
    is_moving: Callable[[], bool] | None = None,
) -> None:
    # Polling, not store.wait: a blocked client would block the other threads of its process.
    deadline = time.monotonic() + timeout_s
    pause_s = _POLL_S
    while not store.check(list(keys)):
        check()
        if time.monotonic() > deadline:
            if is_moving is not None and is_moving():
                deadline = time.monotonic() + timeout_s
                continue
            missing = [key for key in keys if not store.check([key])]
            raise MissingError(f"{what}: after {timeout_s:g} s still no {', '.join(missing)}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)


def abandon_group(address: StoreAddress, *, name: str, reason: str, timeout_s: float = 10) -> None:
    """End a group from outside when one of its peers is dead: all waits in it end."""
    try:
        client = TCPStore(address.host, address.port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
        PrefixStore(name, client).set(ABANDONED, reason)
    except RuntimeError as error:
        raise WeightSyncError(f"ending {name} failed: {first_sentence(error)}") from error


def first_sentence(error: RuntimeError) -> str:
    """Return the first sentence of an error, without the place in torch's source before it."""
    return re.sub(r"^\[[^\]]*\] ", "", first_line(error)).split(". ")[0]
