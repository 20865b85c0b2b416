from __future__ import annotations

import pytest

from megarl.tools.doctor.checks import CheckStatus
from megarl.tools.doctor.versions import FOR_CUDA, REQUIRED, check_versions, local_versions, pinned_versions
from tests.repository import ROOT


def test_the_pinned_versions_are_those_of_the_requirements() -> None:
    tested = pinned_versions()
    assert f"torch=={tested['torch'][0]}" in (ROOT / "requirements.txt").read_text().splitlines()
    assert set(REQUIRED) <= set(tested)
    # apex has no releases: the image builds one commit of it.
    assert set(FOR_CUDA) - set(tested) == {"apex"}


def test_this_environment_is_the_tested_one() -> None:
    wrong = [
        check for check in check_versions(has_gpu=False) if check.verdict not in (CheckStatus.OK, CheckStatus.NOTE)
    ]
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
    assert (found.verdict, found.remedy) == (verdict, remedy)


@pytest.mark.parametrize(("has_gpu", "verdict"), [(True, CheckStatus.WARNING), (False, CheckStatus.NOTE)])
def test_what_only_a_gpu_needs_is_missed_only_there(has_gpu: bool, verdict: CheckStatus) -> None:
    checks = check_versions(has_gpu=has_gpu, installed=lambda package: None)
    (found,) = [check for check in checks if check.name == "transformer-engine"]
    assert found.verdict is verdict


def test_a_node_names_every_version_that_has_to_agree() -> None:
    assert {"python", "megarl", "torch", "ray", "sglang"} <= set(local_versions())
