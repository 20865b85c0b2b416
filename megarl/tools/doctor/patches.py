"""Patches of released packages: which there are, which are applied, and applying them.

`python -m megarl.tools.doctor.patches` applies every one that is for an installed version; `make patches` runs it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from megarl.tools.doctor.checks import Check, CheckStatus

PATCHES = Path(__file__).parent / "patches"
_TIMEOUT_S = 60.0


class PatchState(StrEnum):
    APPLIED = "applied"
    NOT_APPLIED = "not applied"
    OTHER_VERSION = "for another version"
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "not known: the program `patch` is not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    package: str
    version: str
    path: Path

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"


def find_patches(folder: Path = PATCHES) -> list[Patch]:
    """Of folders named <package>-<version>."""
    found = []
    for path in sorted(folder.glob("*/*.patch")):
        package, _, version = path.parent.name.rpartition("-")
        found.append(Patch(package=package, version=version, path=path))
    return found


def site_of(package: str) -> tuple[str, Path] | None:
    """The installed version, and the folder that its files are in."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    return distribution.version, Path(str(distribution.locate_file("")))


def state_of(patch: Patch, *, version: str, site: Path) -> PatchState:
    if version.partition("+")[0] != patch.version:
        return PatchState.OTHER_VERSION
    if shutil.which("patch") is None:
        return PatchState.UNKNOWN
    if _try(patch, site, "--dry-run", "--reverse"):
        return PatchState.APPLIED
    return PatchState.NOT_APPLIED if _try(patch, site, "--dry-run", "--forward") else PatchState.DOES_NOT_FIT


def apply(patch: Patch, *, site: Path) -> bool:
    return _try(patch, site, "--forward")


def check_patches(folder: Path = PATCHES) -> Iterator[Check]:
    """A patch that is missing is a note: megarl works without."""
    for patch in find_patches(folder):
        found = site_of(patch.package)
        if found is None:
            continue
        state = state_of(patch, version=found[0], site=found[1])
        verdict = {PatchState.APPLIED: CheckStatus.OK, PatchState.DOES_NOT_FIT: CheckStatus.WARNING}.get(
            state, CheckStatus.NOTE
        )
        remedy = {
            PatchState.NOT_APPLIED: "optional; `make patches` applies it, and its first lines say what it is for",
            PatchState.OTHER_VERSION: f"{patch.package} {found[0]} is installed",
            PatchState.DOES_NOT_FIT: f"{patch.package} {found[0]} was changed here: install it again",
        }.get(state, "")
        yield Check(area="patches", name=patch.name, found=state.value, verdict=verdict, remedy=remedy)


def _try(patch: Patch, site: Path, *options: str) -> bool:
    program = shutil.which("patch")
    assert program is not None, "`patch` was looked for before"
    words = [program, "--strip=1", "--force", "--silent", "--reject-file=-", f"--directory={site}", *options]
    with patch.path.open("rb") as text:
        done = subprocess.run(  # noqa: S603 - our own files, no shell
            words, stdin=text, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    return done.returncode == 0


def main(folder: Path = PATCHES) -> int:
    """Applies what can be; 5 where one does not fit."""
    code = 0
    for patch in find_patches(folder):
        found = site_of(patch.package)
        if found is None:
            sys.stdout.write(f"{patch.name}: {patch.package} is not installed\n")
            continue
        state = state_of(patch, version=found[0], site=found[1])
        if state is PatchState.NOT_APPLIED:
            state = PatchState.APPLIED if apply(patch, site=found[1]) else PatchState.DOES_NOT_FIT
        if state in (PatchState.DOES_NOT_FIT, PatchState.UNKNOWN):
            code = 5
        sys.stdout.write(f"{patch.name}: {state.value}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
