"""The observer of what several policies share: engines, nodes, the start. Each policy's own run shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megarl.observe.events import Event, Noted, Warned
from megarl.observe.observer import Observer
from megarl.system.gpu_health import GpuHealth


class SharedObserver(Observer):
    def __init__(self, observers: Sequence[Observer]) -> None:
        super().__init__(())
        self._observers = tuple(observers)

    def emit(self, event: Event) -> None:
        """Record an event in every run; a text for people in the first alone."""
        for observer in self._observers[: 1 if isinstance(event, Noted | Warned) else None]:
            observer.emit(event)

    def nodes_excluded(self, number: int) -> None:
        for observer in self._observers:
            observer.nodes_excluded(number)

    def gpus_checked(self, gpus: Sequence[GpuHealth], *, num_xids: int) -> None:
        for observer in self._observers:
            observer.gpus_checked(gpus, num_xids=num_xids)

    def request_retried(self, cause: str) -> None:
        for observer in self._observers:
            observer.request_retried(cause)

    def prompt_read(self, num_tokens: int, *, num_cached: int) -> None:
        for observer in self._observers:
            observer.prompt_read(num_tokens, num_cached=num_cached)

    def measured(self, role: str, seconds: Mapping[int, float]) -> None:
        for observer in self._observers:
            observer.measured(role, seconds)

    def watch_requests(self, index: int, num_outstanding: Callable[[], int]) -> None:
        for observer in self._observers:
            observer.watch_requests(index, num_outstanding)
