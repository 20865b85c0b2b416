"""The owner of a mirror: which driver may write there, where no lock reaches.

The mirror is for runs on local disks: a driver on another machine has another disk with another lock. A driver that
starts claims the mirror by creating the next `owner_N.json`; stores create an object only if there is none of its name.
The highest number owns the mirror. A driver that finds a higher one than its own has been followed, and stops.

The object has the steps that this run copied, under this owner and the ones before it: those of others are never
removed because this run has not come that far.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from megarl.errors import MachineError

_NAME = re.compile(r"owner_(\d{6,})\.json")


class OwnedStore(Protocol):
    """A folder with small files in a store."""

    def names(self) -> list[str]: ...

    def read_named(self, name: str) -> bytes | None: ...

    def write_named(self, name: str, contents: bytes) -> None: ...

    def create_named(self, name: str, contents: bytes) -> bool:
        """Write a file unless there is one of its name; return whether it was written."""
        ...

    def remove_named(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    number: int
    run_id: str
    """The one of the run's lock: equal for all drivers that share a disk."""
    token: int
    """The driver's token of this lock."""
    nonce: str
    """Random: a store that ignores conditions lets two drivers write one name."""
    steps: tuple[int, ...] = ()
    """The steps that this run copied to the store."""

    @property
    def claim(self) -> str:
        """Proof of a process that it acts for this owner."""
        return f"{self.number}-{self.nonce}"


def claim(store: OwnedStore, *, run_id: str, token: int, is_late: bool = False) -> Owner:
    """Make this driver the owner; raise MachineError if a later one is.

    With `is_late` the run has begun without the store: a driver of another disk may have gone on meanwhile.
    """
    while True:
        before = current_owner(store)
        is_own = before is not None and before.run_id == run_id
        if before is not None and ((is_own and before.token > token) or (is_late and not is_own)):
            raise _taken(before)
        owner = Owner(
            number=1 if before is None else before.number + 1,
            run_id=run_id,
            token=token,
            nonce=secrets.token_hex(8),
            steps=before.steps if before is not None and is_own else (),
        )
        if store.create_named(_name(owner.number), _dumped(owner)):
            break
    check_owner(store, owner.claim)
    for number in _numbers(store):
        if number < owner.number:
            store.remove_named(_name(number))
    return owner


def check_owner(store: OwnedStore, claimed: str | None) -> Owner | None:
    """Return the owner that claimed a mirror; raise MachineError if another one has it, or without a claim any has."""
    now = current_owner(store)
    if now is not None and now.claim != claimed:
        raise _taken(now)
    return now


def note_steps(store: OwnedStore, owner: Owner, steps: Iterable[int]) -> Owner:
    """Note that the owner copied these steps."""
    noted = replace(owner, steps=tuple(sorted({*owner.steps, *steps})))
    if noted != owner:
        store.write_named(_name(owner.number), _dumped(noted))
    return noted


def current_owner(store: OwnedStore) -> Owner | None:
    """Return the owner with the highest number. One whose object is damaged is an owner without a name."""
    number = max(_numbers(store), default=None)
    if number is None:
        return None
    try:
        fields = json.loads(store.read_named(_name(number)) or b"")
        return Owner(**fields | {"number": number, "steps": tuple(fields["steps"])})
    except (ValueError, TypeError, KeyError):
        return Owner(number=number, run_id="", token=0, nonce="")


def _taken(owner: Owner) -> MachineError:
    return MachineError(
        f"another driver of this run has taken its mirror (owner {owner.number}, run {owner.run_id or 'unknown'}): it "
        "goes on from the checkpoints there; this driver ends and copies nothing more"
    )


def _numbers(store: OwnedStore) -> list[int]:
    return [int(match.group(1)) for name in store.names() if (match := _NAME.fullmatch(name))]


def _name(number: int) -> str:
    return f"owner_{number:06d}.json"


def _dumped(owner: Owner) -> bytes:
    return json.dumps(asdict(owner)).encode()
