"""The set-up as far as it goes without installing: what is chosen and asked for, and what is said on failure."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import setup
from scripts.setup import Build, SetupError, Uv
from tests.repository import ROOT

GLIBC = ("glibc", "2.36")


class Recorder(Uv):
    """Installs nothing; finds the CPU build of torch with the options that the test names."""

    def __init__(self, *, finds_with: tuple[str, ...] | None = None) -> None:
        super().__init__({})
        self._finds_with = finds_with
        self.installs: list[tuple[tuple[str, ...], list[str]]] = []
        self.removed: list[str] = []

    def install(self, *words: str, requirements: str = "") -> None:
        self.installs.append((words, re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==", requirements, re.MULTILINE)))

    def finds(self, *words: str) -> bool:
        assert words[-1].endswith("+cpu")
        return words[:-1] == self._finds_with

    def remove(self, package: str) -> None:
        self.removed.append(package)


@pytest.mark.parametrize(
    ("system", "architecture", "libc", "sentence"),
    [
        ("darwin", "arm64", ("", ""), "runs on Linux"),
        ("win32", "AMD64", ("", ""), "WSL 2"),
        ("linux", "riscv64", GLIBC, "this machine is riscv64"),
        ("linux", "x86_64", ("glibc", "2.31"), "this machine has glibc 2.31: use Debian 12"),
        ("linux", "x86_64", ("", ""), "this machine has another C library"),
    ],
)
def test_a_machine_that_cannot_run_megarl_gets_one_sentence(
    system: str, architecture: str, libc: tuple[str, str], sentence: str
) -> None:
    with pytest.raises(SetupError, match=sentence) as raised:
        setup.check_machine(system, architecture, libc)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_linux_on_x86_and_arm_is_taken(architecture: str) -> None:
    setup.check_machine("linux", architecture, GLIBC)


@pytest.mark.parametrize("version", [(3, 6, 15), (3, 11, 4), (3, 13, 0)])
def test_another_python_is_told_which_to_use(version: tuple[int, ...]) -> None:
    program = (
        f"import runpy, sys; sys.version_info = {version}; runpy.run_path('scripts/setup.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert re.fullmatch(
        r"make setup: megarl needs Python 3\.11 .*: (run|install) .*`make setup PYTHON=.*\n", done.stderr
    )


@pytest.mark.parametrize(
    ("has_gpu", "finds_with", "build"),
    [
        (True, (), Build.GPU),
        (False, (), Build.CPU),
        (False, ("--torch-backend", "cpu"), Build.CPU),
        (False, None, Build.CUDA),
    ],
)
def test_the_cpu_build_is_taken_where_one_can_be_had_and_no_gpu_is_there(
    has_gpu: bool, finds_with: tuple[str, ...] | None, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "has_gpu", lambda: has_gpu)
    chosen, options = setup.choose_build(Recorder(finds_with=finds_with))
    assert chosen is build
    assert options == (finds_with if build is Build.CPU else ())


def test_a_cpu_build_comes_without_torchvision() -> None:
    uv = Recorder()
    setup.install(uv, Build.CPU, ("--torch-backend", "cpu"))
    (words, packages), (torch_words, _), (own_words, _) = uv.installs
    assert uv.removed == ["torchvision"]
    assert {"--no-deps", "--require-hashes"} <= set(words)
    assert not {"torch", "torchvision"} & set(packages)
    assert {"sglang", "megatron-core", "transformers", "ray", "triton"} <= set(packages)
    assert re.fullmatch(r"--no-deps --torch-backend cpu torch==[\d.]+\+cpu", " ".join(torch_words))
    assert own_words[-2:] == ("--editable", str(ROOT))


@pytest.mark.parametrize("build", [Build.CUDA, Build.GPU])
def test_a_cuda_build_comes_with_its_libraries_and_its_torchvision(build: Build) -> None:
    uv = Recorder()
    setup.install(uv, build, ())
    (_, packages), (torch_words, torch), _ = uv.installs
    assert "torchvision" in packages
    assert len(packages) == len(set(packages)), "two versions of a package"
    assert ("sglang-kernel" in packages) is (build is Build.GPU)
    assert torch == ["torch"]
    assert "--no-deps" not in torch_words
    assert torch_words[torch_words.index("--constraint") + 1] == str(ROOT / "requirements-cuda-hashes.txt")


@pytest.mark.patient
def test_uv_looks_where_pip_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = http://a/simple\nextra-index-url =\n  file:///b\n  file:///c\nfind-links = /d /e\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_FIND_LINKS", "/f /g")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(setup, "BIN", Path(sys.executable).parent)
    found = setup.uv_variables(setup.pip_settings())
    assert found["UV_DEFAULT_INDEX"] == "http://a/simple"
    assert found["UV_INDEX"] == "file:///b file:///c"
    assert found["UV_FIND_LINKS"] == "/f,/g"
    assert found["UV_INDEX_STRATEGY"] == "unsafe-best-match"


@pytest.mark.patient
def test_an_index_that_does_not_answer_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(setup, "PROBE_S", 4)
        monkeypatch.setattr(setup, "BIN", Path(sys.executable).parent)
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        started = time.monotonic()
        assert not Uv({}).finds("--no-cache", setup.cpu_torch())
    assert time.monotonic() - started < 10


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "BIN", Path(sys.executable).parent)
    monkeypatch.setattr(setup, "IMPORTS", ("json", "not_there"))
    with pytest.raises(
        SetupError, match=r"not_there: ModuleNotFoundError: .*: remove \.venv and run `make setup` again"
    ):
        setup.check_imports()
