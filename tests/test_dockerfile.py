"""The image cannot be built here; what can be held without building it is held: versions, stages, rights, checks."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megarl import __version__
from megarl.tools.doctor.packages import find_patches, normalized, pinned_versions
from tests.repository import ROOT

TEXT = (ROOT / "Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """Word and rest of each, with continued lines joined and comments left out."""
    lines = "\n".join(line for line in TEXT.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", lines)
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in found]


def of(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def test_every_version_is_that_of_the_requirements() -> None:
    assert not re.findall(r"[A-Za-z][\w.-]*(?:\[[^\]]*\])?==\d", TEXT), "versions are in the lists alone"
    for file in ("requirements-hashes.txt", "wheels.txt"):
        assert f"--only-binary :all: --require-hashes -r {file}" in TEXT
    # Nothing is resolved anew, and what is compiled is compared with its hash as well.
    installs = [word for run in of("RUN") for word in run.split("&&") if "pip install" in word]
    assert len(installs) == 5
    for install in installs:
        assert "--no-deps" in install, install
        is_local = install.strip().rstrip("; fi").endswith(("./megarl", "./apex"))
        assert is_local or "--require-hashes" in install, install


def test_transformer_engine_is_compiled_from_the_source_whose_hash_is_listed(tmp_path: Path) -> None:
    (splitting,) = [run for run in of("RUN") if "sources.txt" in run and "wheels.txt" in run]
    (tmp_path / "requirements-cuda-hashes.txt").write_text((ROOT / "requirements-cuda-hashes.txt").read_text())
    subprocess.run(["sh", "-c", splitting.partition("&& pip")[0]], cwd=tmp_path, check=True)
    entry = r"transformer-engine-torch==\S+ \\\n    --hash=sha256:[0-9a-f]{64}\n"
    assert re.fullmatch(entry, (tmp_path / "sources.txt").read_text())
    wheels = (tmp_path / "wheels.txt").read_text()
    assert "transformer-engine-torch" not in wheels
    assert re.search(r"^transformer-engine-cu13==", wheels, re.MULTILINE)
    whole = (ROOT / "requirements-cuda-hashes.txt").read_text()
    assert len(wheels) + len((tmp_path / "sources.txt").read_text()) == len(whole)


NEEDED_PACKAGES = {
    "libibverbs1": "NCCL loads libibverbs.so.1",
    "ibverbs-providers": "libibverbs loads the driver of the adapter, such as libmlx5",
    "librdmacm1": "the connection manager of RoCE",
    "libnl-3-200": "libibverbs",
    "libnl-route-3-200": "libibverbs",
    "ibverbs-utils": "ibv_devinfo shows the adapters",
    "wget": "probes of KubeRay",
    "iproute2": "addresses and routes, for start_node.sh and rehearsals",
    "libnuma1": "SGLang's kernels",
    "bubblewrap": "the sandbox of rewards",
    "build-essential": "kernels that are compiled when they are first used",
    "tini": "signals reach megarl",
}


@pytest.mark.parametrize("package", NEEDED_PACKAGES)
def test_the_image_has_the_libraries_that_are_loaded_when_it_runs(package: str) -> None:
    run = next(rest for word, rest in last_stage() if word == "RUN" and "apt-get install" in rest)
    words = run.partition("apt-get install")[2].partition("&&")[0].split()
    assert package in words, NEEDED_PACKAGES[package]


def test_the_image_has_what_rays_servers_need() -> None:
    """Without one of them Ray starts no HTTP server: probes of Kubernetes fail, and no job can be submitted."""
    pinned = pinned_versions()
    needed = [Requirement(text) for text in requires("ray") or ()]
    for each in needed:
        if each.marker is not None and not each.marker.evaluate({"extra": "default"}):
            continue
        versions = pinned.get(normalized(each.name), ())
        assert versions, f"{each.name} is in none of the lists"
        assert each.specifier.contains(versions[-1], prereleases=True), f"{each.name} {versions[-1]}: {each.specifier}"


@pytest.mark.parametrize("argument", ["APEX", "EFA"])
def test_what_is_optional_is_left_out_by_default_and_compared_with_a_digest(argument: str) -> None:
    assert f'{argument}=""' in of("ARG")
    (run,) = [rest for rest in of("RUN") if f'"${argument}" ]' in rest]
    assert run.index(f'if [ -n "${argument}" ]') < run.index("sha256sum --check --strict") < run.index("tar --extract")


@pytest.mark.parametrize(
    ("pins", "hashes"),
    [
        ("requirements.txt", "requirements-hashes.txt"),
        ("requirements-cuda.txt", "requirements-cuda-hashes.txt"),
    ],
)
def test_every_pinned_version_has_hashes(pins: str, hashes: str) -> None:
    """`make hashes` writes them from what PyPI has."""
    pinned = re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==(\S+)$", (ROOT / pins).read_text(), re.MULTILINE)
    expected = {(normalized(name), version) for name, version in pinned}
    text = (ROOT / hashes).read_text()
    entry = r"([\w.-]+)(?:\[[^\]]*\])?==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n"
    found = re.findall(entry, text)
    assert {(normalized(name), version) for name, version, _ in found} == expected, "run `make hashes`"
    assert len(found) == len(expected)
    # Nothing else: no address of an index, no option.
    assert re.sub(entry, "", text) == ""


def test_the_lists_of_versions_do_not_fight() -> None:
    """Both are installed without their own dependencies, the second over the first: it changes what it says."""
    names = [
        {
            normalized(name)
            for name in re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==", (ROOT / file).read_text(), re.MULTILINE)
        }
        for file in ("requirements.txt", "requirements-cuda.txt")
    ]
    assert names[0] & names[1] == {"apache-tvm-ffi", "numpy", "protobuf"}


def test_stages_start_from_cuda_13_or_from_each_other() -> None:
    stages = [rest.partition(" AS ") for rest in of("FROM")]
    assert [name for _, _, name in stages] == ["packages", "kernels", "built", "megarl"]
    (cuda,) = [rest for rest in of("ARG") if rest.startswith("CUDA=")]
    assert cuda.startswith("CUDA=13.")
    for base, _, _ in stages:
        assert base in ("packages", "kernels") or re.fullmatch(
            r"nvidia/cuda:\$\{CUDA\}-[\w.-]+@\$\{CUDA_DIGEST\}", base
        )
        # A name that begins with a host is somebody's registry.
        assert "." not in base.partition("/")[0]
    # Without the argument the reference is refused, and its text says what to give.
    (digest,) = [rest for rest in of("ARG") if rest.startswith("CUDA_DIGEST=")]
    assert digest == "CUDA_DIGEST=give--build-arg-CUDA_DIGEST=sha256:HEX"
    copied = [rest for rest in of("COPY") if "--from=" in rest]
    assert copied == ["--from=built /opt/megarl /opt/megarl"]


def test_nothing_is_fetched_unchecked() -> None:
    assert of("ADD") == []
    assert "curl" not in TEXT
    assert "http" not in TEXT.partition("\n")[2]
    assert not re.search(r"&& wget|wget -", TEXT)
    assert ":latest" not in TEXT
    assert "git clone" not in TEXT
    for run in of("RUN"):
        if "apt-get install" in run:
            assert "--no-install-recommends" in run
            assert "rm -rf /var/lib/apt/lists/*" in run


def last_stage() -> list[tuple[str, str]]:
    return instructions()[max(index for index, (word, _) in enumerate(instructions()) if word == "FROM") :]


def test_it_runs_as_a_user_without_rights() -> None:
    words = [word for word, _ in last_stage()]
    assert [rest for word, rest in last_stage() if word == "USER"] == ["megarl"]
    assert words.index("USER") > max(index for index, word in enumerate(words) if word in ("RUN", "COPY"))
    assert "--uid 1000" in TEXT


def test_its_health_is_what_the_doctor_says_and_signals_arrive() -> None:
    (health,) = of("HEALTHCHECK")
    assert health.endswith('CMD ["megarl", "doctor", "--json"]')
    assert "--timeout=60s" in health
    assert of("ENTRYPOINT") == ['["tini", "--"]']


def test_patches_are_applied_in_it() -> None:
    assert find_patches()
    assert "python -m megarl.tools.doctor.packages" in TEXT
    assert re.search(r"apt-get install [^&]*\bpatch\b", " ".join(of("RUN")))


@pytest.mark.parametrize("name", ["docs/operations.md", "launch/kubernetes/README.md"])
def test_the_image_has_one_name_everywhere(name: str) -> None:
    tags = set(re.findall(r"megarl:(\d[\w.]*)", (ROOT / name).read_text()))
    assert tags == {__version__}


def test_what_is_built_or_secret_stays_out_of_the_context() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().split())
    assert {".git", ".venv", "runs", "data"} <= ignored
