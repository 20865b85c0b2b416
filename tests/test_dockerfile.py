"""The image cannot be built here; what can be held without building it is held: versions, stages, rights, checks."""

from __future__ import annotations

import re

import pytest

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
    tested = pinned_versions()
    pins = re.findall(r"([A-Za-z][\w.-]*)(?:\[[^\]]*\])?==([\w.]+)", TEXT)
    assert {normalized(name) for name, _ in pins} >= {"transformer-engine"}
    for name, version in pins:
        assert version in tested[normalized(name)], name
    for file in ("requirements-hashes.txt", "requirements-cuda-hashes.txt"):
        assert f"--only-binary :all: --require-hashes -r {file}" in TEXT
    # Nothing is resolved anew; what Transformer Engine brings along changes nothing that is there.
    installs = [word for run in of("RUN") for word in run.split("&&") if "pip install" in word]
    assert len(installs) == 4
    for install in installs:
        assert "--no-deps" in install or "-c installed.txt" in install, install


@pytest.mark.parametrize(
    ("pins", "hashes", "compiled"),
    [
        ("requirements.txt", "requirements-hashes.txt", set()),
        ("requirements-cuda.txt", "requirements-cuda-hashes.txt", {"transformer-engine"}),
    ],
)
def test_every_pinned_version_has_hashes(pins: str, hashes: str, compiled: set[str]) -> None:
    """`make hashes` writes them from what PyPI has."""
    pinned = re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==(\S+)$", (ROOT / pins).read_text(), re.MULTILINE)
    expected = {(normalized(name), version) for name, version in pinned if name not in compiled}
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
    assert "wget" not in TEXT
    assert ":latest" not in TEXT
    assert "git clone" not in TEXT
    for run in of("RUN"):
        if "apt-get install" in run:
            assert "--no-install-recommends" in run
            assert "rm -rf /var/lib/apt/lists/*" in run


def test_it_runs_as_a_user_without_rights() -> None:
    last_stage = instructions()[max(index for index, (word, _) in enumerate(instructions()) if word == "FROM") :]
    words = [word for word, _ in last_stage]
    assert [rest for word, rest in last_stage if word == "USER"] == ["megarl"]
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
