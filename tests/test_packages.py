"""Tests that need a package are skipped and listed where it is missing, and fail in CI; a script installs them all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.packages import INSTALL, program
from tests.repository import ROOT

TEST = """
import pytest

@pytest.mark.needs("nothing", "unicorn")
@pytest.mark.parametrize("n", range(3))
def test_rides(n):
    raise AssertionError

def test_walks():
    pass
"""
PLUGIN = """
from tests import packages

packages.NEEDS.update(nothing=lambda: "", unicorn=lambda: "no unicorn here")
pytest_plugins = ["tests.packages"]
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    pytester.makeconftest(PLUGIN)
    pytester.makepyfile(TEST)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # imports take most of the time
    return pytester


@pytest.mark.patient
def test_what_a_machine_lacks_is_skipped_and_listed(inner: pytest.Pytester) -> None:
    done = inner.runpytest_subprocess("-p", "no:cacheprovider")
    done.assert_outcomes(passed=1, skipped=3)
    done.stdout.fnmatch_lines(
        [f"NOT RUN: 3 tests need what this machine lacks: unicorn (3); to run them, run {INSTALL} as root"]
    )


def test_ci_does_not_pass_without_it(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    done = inner.runpytest_subprocess("-p", "no:cacheprovider")
    done.assert_outcomes(passed=1, errors=3)
    done.stdout.fnmatch_lines([f"needs unicorn: no unicorn here; run {INSTALL}"])


@pytest.mark.needs("shellcheck")
def test_the_script_that_installs_is_clean_for_shellcheck() -> None:
    words = [program("shellcheck"), "--severity=style", str(ROOT / INSTALL)]
    assert subprocess.run(words, capture_output=True, text=True, check=False).stdout == ""


@pytest.mark.parametrize(
    ("failing", "complaint"),
    [
        (None, "there is no apt-get"),
        ("echo 'E: Unable to locate package bubblewrap' >&2; exit 100", "E: Unable to locate package bubblewrap"),
        ("exit 0", ""),
    ],
)
def test_the_script_says_what_it_could_not_install(failing: str | None, complaint: str, tmp_path: Path) -> None:
    """On a machine without any of the packages, whose apt-get does what the test wants."""
    for name in ("env", "mktemp", "rm", "grep", "tail", "bash"):
        (tmp_path / name).symlink_to(program(name))
    programs = {"sudo": '[[ $1 == -n ]] && shift\n"$@"'} | ({"apt-get": failing} if failing is not None else {})
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = (ROOT / INSTALL).read_text().replace("PATH=$PATH:/usr/sbin:/sbin\n", "")
    done = subprocess.run(
        ["bash"], input=script, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    names = "bubblewrap prometheus chromium slurmctld slurmd slurm-client munge shellcheck patch fuse3 iproute2"
    assert done.stderr == (f"not installed: {names} ({complaint})\n" if complaint else "")
    assert done.returncode == (1 if complaint else 0)
    assert done.stdout == ("" if failing is None else f"installing Debian packages: {names}\n")
