"""The environment of a run: driver, libraries, modules, variables, commit. It tells how two runs or nodes differ.

Nothing is imported and no device is opened: a node where CUDA is broken is described as well.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

from megarl.env import COMMIT, LOADED_MODULES, SLURM_JOB_ID, program_environment
from megarl.errors import writing

ENVIRONMENT_FILE = "environment.jsonl"
_PACKAGES = (
    "megarl",
    "torch",
    "megatron-core",
    "transformer-engine",
    "apex",
    "sglang",
    "sglang-kernel",
    "flashinfer-python",
    "flash-attn-4",
    "triton",
    "ray",
    "transformers",
)
_LIBRARIES = ("nvidia-nccl", "nvidia-cudnn", "nvidia-cublas", "nvidia-cuda-runtime", "nvidia-nvshmem")
"""Beginnings of names: the rest is the version of CUDA."""
_DRIVER = Path("/proc/driver/nvidia")
_GIT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """The environment of one process."""

    time: str
    host: str
    system: str
    python: str
    driver: str
    """Version of the NVIDIA driver's module; empty without one."""
    gpus: tuple[str, ...]
    """Models, in the order of the driver."""
    versions: dict[str, str]
    """Versions of the packages that compute and communicate, NCCL among them."""
    commit: str
    """megarl's, with `+` where files differ from it; empty where neither git nor the image says it, and in ranks."""
    modules: tuple[str, ...]
    """Environment modules that were loaded."""
    job: str
    """Number of the Slurm job; empty outside of one."""
    variables: dict[str, str]
    """Variables that change what CUDA, NCCL, torch and SGLang do."""

    def line(self) -> str:
        return json.dumps(asdict(self))


def capture_environment(*, asks_git: bool) -> RunEnvironment:
    """Return the environment of this process. Git reads every file of a checkout: one process of a run asks it."""
    return RunEnvironment(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        host=platform.node(),
        system=platform.platform(),
        python=platform.python_version(),
        driver=_first_line(_DRIVER / "version"),
        gpus=tuple(_gpus()),
        versions=dict(sorted(_versions())),
        commit=_commit(Path(__file__).parent.parent) if asks_git else "",
        modules=tuple(filter(None, LOADED_MODULES.read().split(":"))),
        job=SLURM_JOB_ID.read(),
        variables=dict(sorted(program_environment().items())),
    )


def append_environment(folder: Path) -> None:
    """Add a line for this start of the run to its file."""
    path = folder / ENVIRONMENT_FILE
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(f"{capture_environment(asks_git=True).line()}\n")


def _versions() -> Iterator[tuple[str, str]]:
    for package in distributions():
        name = (package.name or "").lower().replace("_", "-")
        if name in _PACKAGES or name.startswith(_LIBRARIES):
            yield name, package.version


def _gpus() -> Iterator[str]:
    for path in sorted(_DRIVER.glob("gpus/*/information")):
        model, _, name = _first_line(path).partition(":")
        yield name.strip() or model


def _first_line(path: Path) -> str:
    try:
        return next(iter(path.read_text().splitlines()), "")
    except OSError:
        return ""


def _commit(folder: Path) -> str:
    """Return the commit of the checkout that the package is in, else the one that the image was built from."""
    if not any((above / ".git").exists() for above in folder.parents):
        return COMMIT.read()
    try:
        # In a container the checkout may belong to another user, whom git would not trust.
        git = ("git", "-c", "safe.directory=*", "-C", str(folder))
        # An environment may be inside the checkout of another project.
        _output(*git, "ls-files", "--error-unmatch", "__init__.py")
        commit = _output(*git, "rev-parse", "HEAD")
        return f"{commit}+" if _output(*git, "status", "--porcelain", "--", ".") else commit
    except (OSError, subprocess.SubprocessError):
        return COMMIT.read()


def _output(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)  # noqa: S603 - git
    return done.stdout.strip()
