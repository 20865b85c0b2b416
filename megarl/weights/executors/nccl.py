"""Rounds over NCCL: one communicator for all peers of a group, created at once and abortable at any time.

NCCL is called directly, through the library that torch has loaded. torch's process groups create a communicator per
pair of ranks at its first message, wait for it without a deadline, and end the process when a message is late; here the
communicator does not block (`blocking = 0`), so every wait is a poll of this module that ends in `ncclCommAbort`.

A posted receive is a kernel on the device. While a round is under way nothing else is launched: loading a kernel would
wait for it, and so would a copy that shares its hardware queue.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock, Thread

import torch
from torch.distributed.distributed_c10d import Store

from megarl.errors import WeightSyncError
from megarl.weights.executors.group import WATCH_S, Message

logger = logging.getLogger(__name__)

_LIBRARY = "libnccl.so.2"
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21400
"""The first release with this struct; NCCL fills in the fields of later ones."""
_ID_KEY = "nccl id"
_SPIN_S = 0.002
"""Time in which a wait polls without a pause: most rounds end within it."""
_PAUSE_S = 0.0005
_ABORT_TIMEOUT_S = 10.0


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise WeightSyncError(f"{_LIBRARY} cannot be loaded ({error}); install the CUDA build of torch") from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclCommInitRankConfig.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        _UniqueId,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    library.ncclCommGetAsyncError.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.ncclCommAbort.argtypes = [ctypes.c_void_p]
    for name in ("ncclSend", "ncclRecv"):
        # buffer, count, type, peer, communicator, stream
        getattr(library, name).argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
    return library


class NcclChannel:
    """From GPU memory to GPU memory. No two peers may be on one GPU."""

    def __init__(self, store: Store, *, peer: int, num_peers: int, deadline: float, check: Callable[[], None]) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._communicator = ctypes.c_void_p()
        self._turn = Lock()
        config = _Config(size=ctypes.sizeof(_Config), magic=_MAGIC, version=_CONFIG_VERSION, blocking=0)
        unique = _shared_id(store, peer, deadline, check)
        with self._aborting():
            created = _library().ncclCommInitRankConfig(
                ctypes.byref(self._communicator), num_peers, unique, peer, ctypes.byref(config)
            )
            self._until_accepted(created, deadline, check)

    def exchange(
        self,
        outgoing: Message | None,
        incoming: Message | None,
        *,
        tag: int,
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        # NCCL has no tags: messages between two peers keep their order, and a group ends with its first failure.
        assert self._communicator, "the channel is closed"
        # What packed the buffer is over before the round begins, and nothing is launched until the round is over.
        torch.cuda.current_stream(self.device).synchronize()
        with self._aborting():
            self._until_accepted(self._enqueue(outgoing, incoming), deadline, check)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
            for _ in _polls(deadline, check):
                if done.query():  # type: ignore[no-untyped-call]
                    return
                _check(self._state())

    def _enqueue(self, outgoing: Message | None, incoming: Message | None) -> int:
        """Begin both messages at once; return NCCL's result.

        A group that was started is ended whatever happens in it: NCCL counts open groups per thread, and would put off
        every later call of this process, those of the next communicator as well.
        """
        library, stream = _library(), ctypes.c_void_p(self._stream.cuda_stream)
        _check(library.ncclGroupStart())
        try:
            for message, call in ((outgoing, library.ncclSend), (incoming, library.ncclRecv)):
                if message is not None:
                    buffer = message.buffer
                    assert buffer.device == self.device, f"a buffer on {buffer.device}"
                    _check(call(buffer.data_ptr(), buffer.nbytes, _UINT8, message.peer, self._communicator, stream))
        finally:
            result: int = library.ncclGroupEnd()
        return result

    def close(self) -> None:
        """Abort the communicator. In a thread: a driver that is out of order must not hold this process up."""
        with self._turn:
            communicator, self._communicator = self._communicator, ctypes.c_void_p()
        if communicator:
            aborting = Thread(target=_library().ncclCommAbort, args=(communicator,), daemon=True)
            aborting.start()
            aborting.join(_ABORT_TIMEOUT_S)
            if aborting.is_alive():
                logger.warning("NCCL has not aborted a communicator within %.0f s", _ABORT_TIMEOUT_S)

    def _until_accepted(self, result: int, deadline: float, check: Callable[[], None]) -> None:
        """Wait until a call that was begun is carried out, or enqueued on the stream."""
        _check(result)
        for _ in _polls(deadline, check):
            state = self._state()
            _check(state)
            if state == _SUCCESS:
                return

    def _state(self) -> int:
        state = ctypes.c_int()
        _check(_library().ncclCommGetAsyncError(self._communicator, ctypes.byref(state)))
        return state.value

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """Abort the communicator after any failure: a round that is left alone would wait on the device for ever."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def _shared_id(store: Store, peer: int, deadline: float, check: Callable[[], None]) -> _UniqueId:
    """Return the communicator's id, which peer 0 makes."""
    unique = _UniqueId()
    if peer == 0:
        _check(_library().ncclGetUniqueId(ctypes.byref(unique)))
        store.set(_ID_KEY, bytes(unique))  # type: ignore[arg-type]  # takes bytes as well
        return unique
    for _ in _polls(deadline, check):
        if store.check([_ID_KEY]):
            break
    ctypes.memmove(ctypes.byref(unique), store.get(_ID_KEY), ctypes.sizeof(unique))
    return unique


def _polls(deadline: float, check: Callable[[], None]) -> Iterator[None]:
    """Yield until the deadline, at once at first and then with pauses."""
    begun = time.monotonic()
    next_check = begun + WATCH_S
    while True:
        yield
        now = time.monotonic()
        if now > deadline:
            raise WeightSyncError("the deadline has passed")
        if now > next_check:
            check()
            next_check = now + WATCH_S
        if now > begun + _SPIN_S:
            time.sleep(_PAUSE_S)


def _check(result: int) -> None:
    if result not in (_SUCCESS, _IN_PROGRESS):
        raise WeightSyncError(f"NCCL: {_library().ncclGetErrorString(result).decode()}")
