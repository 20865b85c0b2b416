"""Versions against the tested ones; patches, tried on copies of the released packages."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megarl.tools.doctor import CheckStatus, packages
from megarl.tools.doctor.packages import (
    FOR_CUDA,
    REQUIRED,
    Patch,
    PatchState,
    apply,
    check_patches,
    check_versions,
    find_patches,
    local_versions,
    normalized,
    pinned_versions,
    site_of,
    state_of,
)
from tests.repository import ROOT

pytestmark = pytest.mark.needs("patch")


def released(patch: Patch, folder: Path) -> Path:
    """A copy of the files that a patch changes, as they were released."""
    found = site_of(patch.package)
    assert found is not None
    for name in re.findall(r"^--- a/(\S+)", patch.path.read_text(), flags=re.MULTILINE):
        target = folder / name
        target.parent.mkdir(parents=True)
        shutil.copyfile(found[1] / name, target)
    if state_of(patch, version=found[0], site=folder) is PatchState.APPLIED:
        with patch.path.open() as text:
            subprocess.run(["patch", "-p1", "--reverse", "-d", str(folder)], stdin=text, check=True)
    return folder


@pytest.mark.parametrize("patch", find_patches(), ids=lambda patch: patch.name)
def test_a_patch_fits_the_released_package_and_says_what_it_is_for(patch: Patch, tmp_path: Path) -> None:
    assert patch.version in pinned_versions()[normalized(patch.package)]
    text = patch.path.read_text()
    for heading in ("Needed for:", "Upstream:", "Remove with:"):
        assert f"\n{heading} " in text
    assert f"{patch.name}" in (ROOT / "patches" / "README.md").read_text()

    site = released(patch, tmp_path)
    assert state_of(patch, version=patch.version, site=site) is PatchState.NOT_APPLIED
    assert apply(patch, site=site)
    assert state_of(patch, version=patch.version, site=site) is PatchState.APPLIED
    assert not apply(patch, site=site)


def test_a_patch_is_for_one_version_and_for_what_was_released(tmp_path: Path) -> None:
    patch = find_patches()[0]
    site = released(patch, tmp_path)
    assert state_of(patch, version="0.0.1", site=site) is PatchState.OTHER_VERSION
    for path in site.rglob("*.py"):
        path.write_text("# something else\n")
    assert state_of(patch, version=patch.version, site=site) is PatchState.DOES_NOT_FIT


def test_the_doctor_reports_every_patch() -> None:
    found = {check.name: check for check in check_patches()}
    assert set(found) == {patch.name for patch in find_patches()}
    assert {check.status for check in found.values()} <= {CheckStatus.OK, CheckStatus.NOTE}


def test_the_router_of_a_mixture_needs_its_patch_without_transformer_engine(tmp_path: Path) -> None:
    import torch

    (patch,) = [patch for patch in find_patches() if patch.path.stem == "define-te-general-gemm"]
    site = released(patch, tmp_path)
    name = "megatron/core/transformer/moe/moe_utils.py"
    tokens, weight = torch.randn(3, 4), torch.randn(2, 4)
    with pytest.raises(NameError, match="te_general_gemm"):
        _load(site / name).RouterGatingLinearFunction.apply(tokens, weight, None, torch.float32)
    assert apply(patch, site=site)
    routed = _load(site / name).RouterGatingLinearFunction.apply(tokens, weight, None, torch.float32)
    torch.testing.assert_close(routed, tokens @ weight.t())


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"patched_{path.stem}_{len(sys.modules)}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pinned_versions_are_those_of_the_requirements() -> None:
    tested = pinned_versions()
    assert f"torch=={tested['torch'][0]}" in (ROOT / "requirements.txt").read_text().splitlines()
    assert set(REQUIRED) <= set(tested)
    assert set(FOR_CUDA) <= set(tested)


def test_this_environment_is_the_tested_one() -> None:
    wrong = [check for check in check_versions(has_gpu=False) if check.status not in (CheckStatus.OK, CheckStatus.NOTE)]
    assert wrong == []


@pytest.mark.parametrize(
    ("version", "verdict", "remedy"),
    [
        ("2.60.0", CheckStatus.OK, ""),
        ("2.60.0+local", CheckStatus.OK, ""),
        ("2.59.1", CheckStatus.WARNING, "megarl is tested with 2.60.0: pip install ray==2.60.0"),
        (None, CheckStatus.ERROR, "pip install ray==2.60.0"),
    ],
)
def test_another_version_is_a_warning_and_none_an_error(version: str | None, verdict: CheckStatus, remedy: str) -> None:
    checks = check_versions(has_gpu=False, installed=lambda package: version if package == "ray" else "1")
    (found,) = [check for check in checks if check.name == "ray"]
    assert (found.status, found.remedy) == (verdict, remedy)


@pytest.mark.parametrize(("has_gpu", "verdict"), [(True, CheckStatus.WARNING), (False, CheckStatus.NOTE)])
def test_what_only_a_gpu_needs_is_missed_only_there(has_gpu: bool, verdict: CheckStatus) -> None:
    checks = check_versions(has_gpu=has_gpu, installed=lambda package: None)
    (found,) = [check for check in checks if check.name == "transformer-engine"]
    assert found.status is verdict


def test_a_node_names_every_version_that_has_to_agree() -> None:
    assert {"python", "megarl", "torch", "ray", "sglang"} <= set(local_versions())


@pytest.mark.parametrize(
    ("installed_modules", "adam", "status"),
    [
        ({"transformer_engine", "amp_C"}, "Transformer Engine's Adam", CheckStatus.OK),
        ({"amp_C"}, "Apex's Adam", CheckStatus.OK),
        (set(), "torch's Adam", CheckStatus.WARNING),
    ],
)
def test_the_adam_that_megatron_takes_is_named(
    installed_modules: set[str], adam: str, status: CheckStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core looks for Transformer Engine, then for Apex."""
    monkeypatch.setattr(packages, "is_te_installed", lambda: "transformer_engine" in installed_modules)
    monkeypatch.setattr(packages, "find_spec", lambda name: name if name in installed_modules else None)
    monkeypatch.setattr(packages, "adds_gradients_in_products", lambda: "amp_C" in installed_modules)
    fused, gradients = packages.check_fused(has_gpu=True)
    assert (fused.found, fused.status) == (adam, status)
    assert ("inside the product (Apex)" in gradients.found) is ("amp_C" in installed_modules)
