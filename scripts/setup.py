"""Build .venv for this machine; `make setup` runs it, with the Python that the environment is to have.

Everything is installed by uv from requirements-hashes.txt, except torch, of which there are two builds. Without a GPU
it is the CPU build, if pip's own configuration or PyTorch's index has it; else the CUDA build of PyPI with its
libraries. With a GPU, or with `--gpu` on a machine that builds for others, all wheels of requirements-cuda-hashes.txt
are installed as well; `make kernels` compiles the rest.

Older Pythons can read this file as far as the check of their version: no annotation is evaluated before.
"""

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from enum import Enum
from pathlib import Path

if not (3, 11, 5) <= sys.version_info < (3, 13):
    OTHERS = [name for name in ("python3.12", "python3.11") if shutil.which(name)]
    REMEDY = f"run `make setup PYTHON={OTHERS[0]}`" if OTHERS else "install one, and name it: `make setup PYTHON=...`"
    sys.exit(
        "make setup: megarl needs Python 3.11 (from 3.11.5 on) or 3.12, and this is"
        f" {platform.python_version()}: {REMEDY}"
    )

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
LOCK = ROOT / "requirements-hashes.txt"
CUDA_LOCK = ROOT / "requirements-cuda-hashes.txt"

SOURCES = ("transformer-engine-torch",)
"""Entries of CUDA_LOCK that are compiled for one build of torch, which needs nvcc."""

ARCHITECTURES = ("x86_64", "aarch64")
MIN_GLIBC = (2, 34)
"""SGLang's wheels ask for it: Debian 12, Ubuntu 22.04, RHEL 9."""
PROBE_S = 20
IMPORTS = ("torch", "transformers.models.llama.modeling_llama", "megatron.core", "sglang", "ray", "megarl")
IMPORT_ALL = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        sys.exit(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}")
"""


class SetupError(Exception):
    """One line: what is wrong, and what to do."""


def main() -> None:
    started = time.monotonic()
    try:
        check_machine(sys.platform, platform.machine(), platform.libc_ver())
        make_venv()
        uv = Uv(pip_settings())
        build, torch_options = choose_build(uv)
        announce(build)
        install(uv, build, torch_options)
        check_imports()
    except SetupError as error:
        sys.exit(f"make setup: {error}")
    except KeyboardInterrupt:
        sys.exit("make setup: interrupted; run it again, it continues with what it has")
    say(f"{VENV.name} is ready after {time.monotonic() - started:.0f} s")


def say(line: str) -> None:
    print(line, flush=True)


def run(
    words: list[str],
    *,
    text: str = "",
    environment: dict[str, str] | None = None,
    timeout_s: float | None = None,
    is_shown: bool = False,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - our own words, no shell
        words,
        input=text,
        env=environment,
        timeout=timeout_s,
        capture_output=not is_shown,
        text=True,
        check=False,
    )


def check_machine(system: str, architecture: str, libc: tuple[str, str]) -> None:
    if system != "linux":
        raise SetupError("megarl runs on Linux, and this is not: use a Linux machine, a container, or WSL 2 on Windows")
    if architecture not in ARCHITECTURES:
        raise SetupError(f"megarl runs on {' and '.join(ARCHITECTURES)}, and this machine is {architecture}")
    name, version = libc
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < MIN_GLIBC:
        found = f"{name} {version}".strip() or "another C library"
        raise SetupError(
            f"SGLang's wheels need glibc {'.'.join(map(str, MIN_GLIBC))} or newer, and this machine has {found}: use"
            " Debian 12, Ubuntu 22.04, RHEL 9 or newer, or the image of the Dockerfile"
        )


def make_venv() -> None:
    """Make .venv where there is none of this Python, and install uv into it."""
    configuration = VENV / "pyvenv.cfg"
    has_pip = configuration.exists() and (BIN / "pip").exists()
    if not has_pip or f"version = {platform.python_version()}\n" not in configuration.read_text():
        say(f"building {VENV.name} with Python {platform.python_version()}")
        made = run([sys.executable, "-m", "venv", "--clear", str(VENV)])
        if made.returncode:
            raise SetupError(
                f"python -m venv failed ({last_line(made.stdout + made.stderr)}): on Debian and Ubuntu install"
                f" python{sys.version_info.major}.{sys.version_info.minor}-venv"
            )
    words = [str(BIN / "pip"), "install", "--quiet", "--disable-pip-version-check", "--retries=1", "--no-deps"]
    done = run([*words, "--require-hashes", "--requirement", "/dev/stdin"], text=entries(LOCK, only=("uv",)))
    if done.returncode:
        raise SetupError(
            f"pip cannot install uv ({last_line(done.stderr)}): check the network, or name an index that is"
            " reachable in PIP_INDEX_URL"
        )


def last_line(text: str) -> str:
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["no message"])[-1]


def entries(lock: Path, *, only: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> str:
    """Return the pins of a file of hashes, those of some packages or those of all others."""
    found = re.findall(r"^(([\w.-]+)(?:\[[^\]]*\])?==\S+(?: \\\n    --hash=\S+)+\n)", lock.read_text(), re.MULTILINE)
    return "".join(text for text, name in found if (name in only if only else name not in without))


def pip_settings() -> dict[str, str]:
    """Return pip's options by name, from its files and from the environment; of two the one that pip would use."""
    listed = run([str(BIN / "pip"), "config", "list"]).stdout
    found = re.findall(r"^(global|install|:env:)\.([\w-]+)=(.*)$", listed, re.MULTILINE)
    found.sort(key=lambda setting: ("global", "install", ":env:").index(setting[0]))
    return {name: str(ast.literal_eval(value)) for _, name, value in found}


def uv_variables(pip: dict[str, str]) -> dict[str, str]:
    """Return the variables with which uv finds packages where pip does: uv does not read pip's configuration."""
    variables = {
        "index-url": ("UV_DEFAULT_INDEX", " "),
        "extra-index-url": ("UV_INDEX", " "),
        "find-links": ("UV_FIND_LINKS", ","),
        "trusted-host": ("UV_INSECURE_HOST", " "),
        "cert": ("SSL_CERT_FILE", " "),
        "proxy": ("ALL_PROXY", " "),
    }
    found = {
        variable: separator.join(pip[name].split())
        for name, (variable, separator) in variables.items()
        if pip.get(name)
    }
    # As pip does: the best version of all indexes. The hashes say which files are right.
    return {**found, "UV_INDEX_STRATEGY": "unsafe-best-match"}


class Uv:
    """uv with what this machine's pip is told about indexes; what the user has set for uv itself wins."""

    def __init__(self, pip: dict[str, str]) -> None:
        self._environment = {**uv_variables(pip), **os.environ}  # noqa: TID251 - for uv, not for megarl
        is_without_index = pip.get("no-index", "").lower() in ("1", "true", "yes", "on")
        # uv has no variable for it.
        self._options = ["--no-index"] if is_without_index else []

    def install(self, *words: str, requirements: str = "") -> None:
        """Install, with uv's own output on the terminal."""
        done = run(self._command(*words), text=requirements, environment=self._environment, is_shown=True)
        if done.returncode:
            raise SetupError(
                f"uv could not install the packages, for the reason above ({free_gb():.1f} GB of disk are free): check"
                " the network and the disk, then run `make setup` again; it continues with what it has"
            )

    def finds(self, *words: str) -> bool:
        """Whether these can be installed; an index that does not answer costs at most PROBE_S."""
        quick = {"UV_HTTP_RETRIES": "0", "UV_HTTP_TIMEOUT": str(PROBE_S // 2)}
        try:
            done = run(
                self._command("--dry-run", "--reinstall", "--no-deps", *words),
                environment={**self._environment, **quick},
                timeout_s=PROBE_S,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def remove(self, package: str) -> None:
        """Remove a package, if it is installed."""
        run([str(BIN / "uv"), "pip", "uninstall", "--quiet", "--python", str(VENV), package])

    def _command(self, *words: str) -> list[str]:
        return [str(BIN / "uv"), "pip", "install", "--python", str(VENV), *self._options, *words]


class Build(Enum):
    """A set of packages, with the gigabytes that it takes on disk."""

    CPU = 3
    CUDA = 6
    GPU = 8


def choose_build(uv: Uv) -> tuple[Build, tuple[str, ...]]:
    """Return what suits this machine, and the options with which uv finds its build of torch."""
    if has_gpu() or "--gpu" in sys.argv[1:]:
        return Build.GPU, ()
    # First what pip's configuration names, then PyTorch's index, whose address uv knows.
    for options in ((), ("--torch-backend", "cpu")):
        if uv.finds(*options, cpu_torch()):
            return Build.CPU, options
    return Build.CUDA, ()


def has_gpu() -> bool:
    program = shutil.which("nvidia-smi")
    return program is not None and run([program, "-L"]).stdout.startswith("GPU")


def cpu_torch() -> str:
    return entries(LOCK, only=("torch",)).split()[0] + "+cpu"


def announce(build: Build) -> None:
    reasons = {
        Build.CPU: "the CPU build of torch",
        Build.CUDA: "the CUDA build of torch with its libraries, because no index within reach has a CPU build",
        Build.GPU: "the CUDA build of torch and the kernels for GPUs",
    }
    say(f"installing megarl's packages with {reasons[build]}: {build.value} GB on disk")
    is_begun = any(VENV.glob("lib/python*/site-packages/torch"))
    if free_gb() < build.value and not is_begun:
        raise SetupError(
            f"{free_gb():.1f} GB of disk are free, {build.value} GB are needed: make room, then run it again"
        )


def free_gb() -> float:
    return shutil.disk_usage(VENV).free / 1e9


def install(uv: Uv, build: Build, torch_options: tuple[str, ...]) -> None:
    from_list = ("--no-deps", "--require-hashes", "--only-binary", ":all:", "--requirement", "-")
    if build is Build.CPU:
        # PyPI's torchvision fits the CUDA build alone: beside another one it breaks the import of transformers.
        uv.remove("torchvision")
        uv.install(*from_list, requirements=entries(LOCK, without=("torch", "torchvision")))
        # Its hash is its index's own.
        uv.install("--no-deps", *torch_options, cpu_torch())
    else:
        added = entries(CUDA_LOCK, without=SOURCES) if build is Build.GPU else ""
        own = entries(LOCK, without=("torch", *re.findall(r"^([\w.-]+)", added, re.MULTILINE)))
        uv.install(*from_list, requirements=own + added)
        # With its own dependencies: the libraries of CUDA. A CPU build that is there has the same version.
        uv.install(
            *("--reinstall-package", "torch", "--constraint", str(CUDA_LOCK), "--requirement", "-"),
            requirements=entries(LOCK, only=("torch",)),
        )
    uv.install("--quiet", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def check_imports() -> None:
    """Import what a run and a user's own script import, in a process without megarl's stand-ins."""
    say(f"importing {', '.join(IMPORTS)}")
    done = run([str(BIN / "python"), "-c", IMPORT_ALL, *IMPORTS])
    if done.returncode:
        raise SetupError(
            f"the packages are installed, but {last_line(done.stderr)}: remove {VENV.name} and run `make setup` again"
        )


if __name__ == "__main__":
    main()
