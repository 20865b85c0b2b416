"""What is installed, against the versions that megarl is tested with: those of requirements.txt."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from megarl.tools.doctor.checks import Check, CheckStatus

_HERE = Path(__file__).parent
TESTED_FILES = (_HERE / "requirements.txt", _HERE / "requirements-cuda.txt")
"""Of a complete environment, and what a CUDA machine has besides."""

REQUIRED = ("torch", "megatron-core", "sglang", "ray", "transformers", "numpy")
FOR_CUDA = ("transformer-engine", "apex", "sglang-kernel", "flashinfer-python", "triton")
"""Faster or needed with a GPU, and of no use without one."""
MIN_PYTHON = (3, 11)

Installed = Callable[[str], str | None]


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def pinned_versions() -> dict[str, tuple[str, ...]]:
    """By package, as `pip install` would be told; the second, where there is one, is that of CUDA machines."""
    pins: dict[str, tuple[str, ...]] = {}
    for path in TESTED_FILES:
        for line in path.read_text().splitlines():
            found = re.match(r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==([^\s;#]+)", line)
            if found:
                name = normalized(found[1])
                pins[name] = (*pins.get(name, ()), found[2])
    return pins


def normalized(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def local_versions() -> dict[str, str]:
    """What has to be the same on every node of a cluster."""
    found = {name: installed(name) or "none" for name in ("megarl", *REQUIRED, *FOR_CUDA)}
    return {"python": _python_version(), **found}


def check_versions(*, has_gpu: bool, installed: Installed = installed) -> Iterator[Check]:
    is_new_enough = sys.version_info[:2] >= MIN_PYTHON
    yield Check(
        area="versions",
        name="python",
        found=_python_version(),
        verdict=CheckStatus.OK if is_new_enough else CheckStatus.ERROR,
        remedy="" if is_new_enough else "use Python 3.11 or newer",
    )
    tested = pinned_versions()
    for package in REQUIRED:
        yield _of_package(package, installed(package), tested.get(package, ()), missing=CheckStatus.ERROR)
    missing = CheckStatus.WARNING if has_gpu else CheckStatus.NOTE
    for package in FOR_CUDA:
        yield _of_package(package, installed(package), tested.get(package, ()), missing=missing)


def _of_package(package: str, version: str | None, tested: Sequence[str], *, missing: CheckStatus) -> Check:
    wanted = tested[0] if tested else None
    pin = package if wanted is None else f"{package}=={wanted}"
    if version is None:
        remedy = "" if missing is CheckStatus.NOTE else f"pip install {pin}"
        return Check(area="versions", name=package, found="not installed", verdict=missing, remedy=remedy)
    # A local version, as in 2.13.0+cpu, names a build of the same release.
    is_tested = wanted is None or version.partition("+")[0] in tested
    return Check(
        area="versions",
        name=package,
        found=version,
        verdict=CheckStatus.OK if is_tested else CheckStatus.WARNING,
        remedy="" if is_tested else f"megarl is tested with {wanted}: pip install {pin}",
    )


def _python_version() -> str:
    return ".".join(str(part) for part in sys.version_info[:3])
