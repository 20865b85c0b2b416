"""An object store behind fsspec, as `sim://`: late listings, uploads that are torn, and times without an answer."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from fsspec.spec import AbstractFileSystem

from tests.simulation.world import World, calling_process

_LATENCY_S = 0.05


class Store:
    """The objects of a history."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.objects: dict[str, bytes] = {}
        self.versions: dict[str, int] = {}
        self.fails_until = 0.0
        self.listing_lag_s = 0.0
        """A listing shows what was there so long ago; reading an object is never late."""
        self.keeps_torn = False
        """Whether the part that was sent before a sender died stays as an object, as on a file system."""
        self.is_sound = True
        """Nothing has happened to it so far."""
        self.removed: Callable[[str], None] = lambda _path: None
        """Is told what was removed."""
        self._past: list[tuple[float, dict[str, int]]] = [(0.0, {})]

    def reach(self) -> None:
        calling_process()
        self.world.pause(_LATENCY_S * self.world.random.random())
        if self.world.now < self.fails_until:
            raise ConnectionError("the store does not answer")

    def put(self, path: str, content: bytes) -> None:
        self.objects[path] = content
        self.versions[path] = self.world.count()
        self._remember()

    def remove(self, path: str) -> None:
        if self.objects.pop(path, None) is None:
            raise FileNotFoundError(path)
        self._remember()
        self.removed(path)

    def listed(self) -> dict[str, int]:
        """Return the size of every object that a listing shows now."""
        since = self.world.now - self.listing_lag_s
        shown = self._past[0][1]
        for when, sizes in self._past:
            if when > since:
                break
            shown = sizes
        return shown

    def _remember(self) -> None:
        self._past.append((self.world.now, {path: len(content) for path, content in self.objects.items()}))


class _Upload(io.BytesIO):
    """An object that is being written: it appears when it is closed."""

    def __init__(self, store: Store, path: str) -> None:
        super().__init__()
        self._store, self._path = store, path

    def write(self, content: Any) -> int:
        try:
            self._store.reach()
        except BaseException:
            if self._store.keeps_torn:
                self._store.put(self._path, self.getvalue() + bytes(content)[: len(content) // 2])
            raise
        return super().write(content)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        # As fsspec does: leaving the block by an error closes the file too.
        self.close()

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            self._store.reach()
            self._store.put(self._path, content)


class StoreFiles(AbstractFileSystem):  # type: ignore[misc]
    """The store of the process that calls."""

    protocol = "sim"
    cachable = False

    @property
    def _store(self) -> Store:
        found: Store = calling_process().values["store"]
        return found

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("sim://").rstrip("/")

    def ls(self, path: str, detail: bool = True, **_: object) -> list[Any]:
        self._store.reach()
        below = f"{self._strip_protocol(path)}/"
        names = {}
        for name, size in self._store.listed().items():
            if name.startswith(below):
                first, _slash, rest = name[len(below) :].partition("/")
                names[below + first] = ("directory", 0) if rest else ("file", size)
        if not names:
            raise FileNotFoundError(path)
        entries = [{"name": name, "size": size, "type": kind} for name, (kind, size) in sorted(names.items())]
        return entries if detail else [entry["name"] for entry in entries]

    def find(self, path: str, detail: bool = False, **_: object) -> Any:
        self._store.reach()
        below = f"{self._strip_protocol(path)}/"
        found = {name: {"size": size} for name, size in self._store.listed().items() if name.startswith(below)}
        return found if detail else sorted(found)

    def exists(self, path: str, **_: object) -> bool:
        self._store.reach()
        return self._strip_protocol(path) in self._store.objects

    def cat_file(self, path: str, start: object = None, end: object = None, **_: object) -> bytes:
        self._store.reach()
        try:
            return self._store.objects[self._strip_protocol(path)]
        except KeyError:
            raise FileNotFoundError(path) from None

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        self._store.reach()
        name = self._strip_protocol(path)
        if mode == "create" and name in self._store.objects:
            raise FileExistsError(path)
        self._store.put(name, value)

    def rm_file(self, path: str) -> None:
        self._store.reach()
        self._store.remove(self._strip_protocol(path))

    def rm(self, path: str, recursive: bool = False, maxdepth: object = None) -> None:
        below = f"{self._strip_protocol(path)}/"
        for name in sorted(name for name in self._store.listed() if name.startswith(below)):
            self._store.reach()
            if name in self._store.objects:
                self._store.remove(name)

    def open(self, path: str, mode: str = "rb", **_: object) -> Any:
        name = self._strip_protocol(path)
        if mode == "rb":
            return io.BytesIO(self.cat_file(name))
        self._store.reach()
        if mode == "xb" and name in self._store.objects:
            raise FileExistsError(path)
        return _Upload(self._store, name)
