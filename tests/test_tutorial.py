"""A stranger's path: a fresh clone, an environment of its own, and the tutorial's commands as they are printed.

The clone is build/stranger and is kept, at the present commit: `-k Use_the_result` repeats one section. Remove it for a
fresh one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.repository import ROOT

CLONE = ROOT / "build" / "stranger"
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
SECTIONS = re.split(r"^## \d+\. ", TUTORIAL, flags=re.MULTILINE)[1:]
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.slow


def in_clone(words: list[str], *, timeout: float = 3000) -> str:
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG") or name.startswith("PIP_")}
    path = f"{CLONE / '.venv' / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        words, cwd=CLONE, env={**kept, "PATH": path}, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def clone() -> None:
    if not (CLONE / ".git").is_dir():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(CLONE)], check=True, timeout=600)
    # What an earlier walk left, except the ignored: environment, data and runs.
    clean = ["clean", "--quiet", "--force", "-d"]
    for words in (["fetch", "--quiet", str(ROOT), "HEAD"], ["checkout", "--quiet", "--detach", "FETCH_HEAD"], clean):
        subprocess.run(["git", "-C", str(CLONE), *words], check=True, timeout=600)
    in_clone(["make", "setup"])


def test_the_environment_is_its_own() -> None:
    words = ["python", "-c", "import megarl, torch; print(megarl.__file__); print(torch.__file__)"]
    ours, theirs = in_clone(words).split()
    assert Path(ours).is_relative_to(CLONE / "megarl")
    assert Path(theirs).is_relative_to(CLONE / ".venv")


@pytest.mark.parametrize("section", SECTIONS, ids=[part.splitlines()[0].replace(" ", "_") for part in SECTIONS])
def test_a_section_runs_as_it_is_printed(section: str) -> None:
    if section is SECTIONS[0]:
        for folder in ("data", "runs"):
            shutil.rmtree(CLONE / folder, ignore_errors=True)
    for number, (language, text) in enumerate(_BLOCK.findall(section)):
        if language == "python":
            named = re.match(r"# (\w+\.py)\n", text)
            script = CLONE / (named[1] if named else f"block_{number}.py")
            script.write_text(text)
            if named is None:
                shutil.rmtree(CLONE / "runs" / "mine", ignore_errors=True)
                in_clone(["python", script.name])
            continue
        for line in text.splitlines():
            if line.startswith("megarl view"):
                look_at(line.split())
            elif line.startswith(("megarl", "python")):
                in_clone(["bash", "-c", line])


def look_at(words: list[str]) -> None:
    """Open the page that a command serves until Ctrl-C."""
    program = CLONE / ".venv" / "bin" / words[0]
    # In the background of a script SIGINT is ignored, and a child inherits that; a handler becomes the default in it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    viewing = subprocess.Popen([program, *words[1:]], cwd=CLONE, stdout=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    try:
        assert viewing.stdout is not None
        address = next(found[0] for line in viewing.stdout if (found := re.search(r"http://\S+", line)))
        for path, expected in (("", b"<title>megarl"), ("api/run", b'"name": "quickstart"')):
            with urllib.request.urlopen(f"{address}{path}", timeout=60) as answer:
                assert expected in answer.read()
    finally:
        viewing.send_signal(signal.SIGINT)
        viewing.wait(timeout=60)
