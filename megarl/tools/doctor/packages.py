"""Installed packages: their versions against the tested ones, the build of torch, and patches of released packages.

`python -m megarl.tools.doctor.packages` applies every patch for an installed version; `make patches` runs it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from megarl.config.kernels import adds_gradients_in_products, is_te_installed
from megarl.tools.doctor import Check, CheckStatus

_HERE = Path(__file__).parent
TESTED_FILES = (_HERE / "requirements.txt", _HERE / "requirements-cuda.txt")
"""The pins of a complete environment, and those that a CUDA machine adds."""
PATCHES = _HERE / "patches"

REQUIRED = ("torch", "megatron-core", "sglang", "ray", "transformers", "numpy")
FOR_CUDA = ("transformer-engine", "sglang-kernel", "flashinfer-python", "triton")
"""Needed or faster with a GPU, unused without one."""
MIN_PYTHON = (3, 11)
_PATCH_TIMEOUT_S = 60.0

Installed = Callable[[str], str | None]


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def pinned_versions() -> dict[str, tuple[str, ...]]:
    """Return the tested versions by package; a second one, where there is one, is that of CUDA machines."""
    pins: dict[str, tuple[str, ...]] = {}
    for path in TESTED_FILES:
        for line in path.read_text().splitlines():
            pin = re.match(r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==([^\s;#]+)", line)
            if pin:
                name = normalized(pin[1])
                pins[name] = (*pins.get(name, ()), pin[2])
    return pins


def normalized(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def local_versions() -> dict[str, str]:
    """Return the versions that must be the same on every node of a cluster."""
    packages = {name: installed(name) or "none" for name in ("megarl", *REQUIRED, *FOR_CUDA)}
    return {"python": _python_version(), **packages}


def check_versions(*, has_gpu: bool, installed: Installed = installed) -> Iterator[Check]:
    is_new_enough = sys.version_info[:2] >= MIN_PYTHON
    yield Check.of("versions", "python", _python_version(), is_ok=is_new_enough, remedy="use Python 3.11 or newer")
    tested = pinned_versions()
    for package in REQUIRED:
        yield _check_package(package, installed(package), tested.get(package, ()), missing=CheckStatus.ERROR)
    missing = CheckStatus.WARNING if has_gpu else CheckStatus.NOTE
    for package in FOR_CUDA:
        yield _check_package(package, installed(package), tested.get(package, ()), missing=missing)


def _check_package(package: str, version: str | None, tested: Sequence[str], *, missing: CheckStatus) -> Check:
    newest = tested[0] if tested else None
    pin = package if newest is None else f"{package}=={newest}"
    if version is None:
        remedy = "" if missing is CheckStatus.NOTE else f"pip install {pin}"
        return Check(area="versions", name=package, found="not installed", status=missing, remedy=remedy)
    # A local version, as in 2.13.0+cpu, names a build of the same release.
    is_tested = newest is None or version.partition("+")[0] in tested
    remedy = f"megarl is tested with {newest}: pip install {pin}"
    return Check.of("versions", package, version, is_ok=is_tested, remedy=remedy, otherwise=CheckStatus.WARNING)


def _python_version() -> str:
    return ".".join(str(part) for part in sys.version_info[:3])


def check_torch(*, has_gpu: bool) -> Iterator[Check]:
    try:
        import torch  # noqa: PLC0415 - a broken torch is what this check reports
    except ImportError as error:
        yield Check.of("versions", "torch", "cannot be imported", is_ok=False, remedy=str(error))
        return
    cuda = torch.version.cuda
    if cuda is None:
        yield Check(
            area="versions",
            name="cuda",
            found="torch is a CPU build",
            status=CheckStatus.ERROR if has_gpu else CheckStatus.NOTE,
            remedy="install the CUDA build of torch" if has_gpu else "",
        )
        return
    works = torch.cuda.is_available()
    status = CheckStatus.OK if works else CheckStatus.ERROR if has_gpu else CheckStatus.NOTE
    remedy = "torch sees no GPU: install a driver for this CUDA version, or unset CUDA_VISIBLE_DEVICES"
    yield Check(
        area="versions", name="cuda", found=cuda, status=status, remedy=remedy if status is CheckStatus.ERROR else ""
    )
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    yield Check(area="versions", name="nccl", found=".".join(map(str, nccl)), status=CheckStatus.OK)


def check_fused(*, has_gpu: bool) -> Iterator[Check]:
    """Say which Adam and which sum of weight gradients training uses: megatron-core takes what is installed."""
    has_te, has_apex = is_te_installed(), find_spec("amp_C") is not None
    adam = "Transformer Engine's" if has_te else "Apex's" if has_apex else "torch's"
    status = CheckStatus.OK if has_te or has_apex else CheckStatus.WARNING if has_gpu else CheckStatus.NOTE
    remedy = "install Transformer Engine: make kernels" if status is CheckStatus.WARNING else ""
    yield Check(area="kernels", name="adam", found=f"{adam} Adam", status=status, remedy=remedy)
    dense = "inside the product (Apex)" if adds_gradients_in_products() else "after the product (torch)"
    others = "inside the product (Transformer Engine)" if has_te else "after the product (torch)"
    found = f"dense layers in bf16: {dense}; experts and FP8: {others}"
    yield Check(area="kernels", name="weight gradients", found=found, status=CheckStatus.NOTE)


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
    """Return the patches in the subfolders named <package>-<version>."""
    patches = []
    for path in sorted(folder.glob("*/*.patch")):
        package, _, version = path.parent.name.rpartition("-")
        patches.append(Patch(package=package, version=version, path=path))
    return patches


def site_of(package: str) -> tuple[str, Path] | None:
    """Return the installed version and the folder of its files; None where the package is not installed."""
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
    """Return a check per patch of an installed package; a missing patch is a note, since megarl works without it."""
    for patch in find_patches(folder):
        installation = site_of(patch.package)
        if installation is None:
            continue
        version, site = installation
        state = state_of(patch, version=version, site=site)
        status = {PatchState.APPLIED: CheckStatus.OK, PatchState.DOES_NOT_FIT: CheckStatus.WARNING}.get(
            state, CheckStatus.NOTE
        )
        remedy = {
            PatchState.NOT_APPLIED: "optional; `make patches` applies it; its first lines say what it is for",
            PatchState.OTHER_VERSION: f"{patch.package} {version} is installed",
            PatchState.DOES_NOT_FIT: f"the files of {patch.package} {version} were changed here: install it again",
        }.get(state, "")
        yield Check(area="patches", name=patch.name, found=state.value, status=status, remedy=remedy)


def _try(patch: Patch, site: Path, *options: str) -> bool:
    program = shutil.which("patch")
    assert program is not None, "state_of looks for `patch` first"
    words = [program, "--strip=1", "--force", "--silent", "--reject-file=-", f"--directory={site}", *options]
    with patch.path.open("rb") as text:
        done = subprocess.run(  # noqa: S603 - our own files, no shell
            words, stdin=text, capture_output=True, timeout=_PATCH_TIMEOUT_S, check=False
        )
    return done.returncode == 0


def main(folder: Path = PATCHES) -> int:
    """Apply every patch that fits; return 5 where one does not fit or `patch` is missing, else 0."""
    code = 0
    for patch in find_patches(folder):
        installation = site_of(patch.package)
        if installation is None:
            sys.stdout.write(f"{patch.name}: {patch.package} is not installed\n")
            continue
        version, site = installation
        state = state_of(patch, version=version, site=site)
        if state is PatchState.NOT_APPLIED:
            state = PatchState.APPLIED if apply(patch, site=site) else PatchState.DOES_NOT_FIT
        if state in (PatchState.DOES_NOT_FIT, PatchState.UNKNOWN):
            code = 5
        sys.stdout.write(f"{patch.name}: {state.value}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
