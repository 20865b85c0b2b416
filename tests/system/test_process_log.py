"""The log of a process: complete when the process aborts, and bounded when it does not stop."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ABORTS = """
import ctypes, faulthandler, logging, os, sys
from pathlib import Path
from megarl.system.process_log import log_process
faulthandler.enable()
log_process(Path(sys.argv[1]))
print("from Python", flush=True)
logging.getLogger("megarl.train").info("from a logger")
logging.getLogger("megarl.train").debug("not this")
ctypes.CDLL(None).puts(b"NCCL WARN from a library")
ctypes.CDLL(None).fflush(None)
os.abort()
"""

TALKS = """
import sys, time
from pathlib import Path
from megarl.system.process_log import log_process
path = Path(sys.argv[1])
log_process(path, max_bytes=1000, poll_s=0.02)
for number in range(40):
    print(f"{number:099d}", flush=True)
    time.sleep(0.02)
"""


def run(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", program, str(path)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_the_last_words_of_a_process_that_aborts_are_in_its_log(tmp_path: Path) -> None:
    path = tmp_path / "ranks" / "rank_0.log"
    path.parent.mkdir()
    path.write_text("of an earlier process\n")
    done = run(ABORTS, path)
    assert done.returncode == -signal.SIGABRT
    assert done.stdout == done.stderr == ""
    text = path.read_text()
    earlier, about, said, _ = text.split("\n", 3)
    assert (earlier, said) == ("of an earlier process", "from Python")
    assert " INFO megarl pid=" in about
    assert "Z INFO megarl.train from a logger" in text
    assert "not this" not in text
    assert "NCCL WARN from a library" in text
    assert "Fatal Python error: Aborted" in text


@pytest.mark.patient
def test_a_log_is_bounded_and_keeps_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.log"
    done = run(TALKS, path)
    assert done.returncode == 0, done.stderr
    aside = tmp_path / "rank_0.log.1"
    assert sorted(tmp_path.iterdir()) == [path, aside]
    lines = (aside.read_text() + path.read_text()).splitlines()
    numbers = [int(line) for line in lines if " INFO megarl pid=" not in line]
    assert numbers == list(range(numbers[0], 40)), "the newest lines, none of them lost"
    assert numbers[0] > 0
