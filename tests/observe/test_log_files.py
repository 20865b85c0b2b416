from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megarl.observe.log_files import LogFiles

WRITER = """
import sys
with open(sys.argv[1], "ab", buffering=0) as log:
    for number in range(20_000):
        log.write(b"line %d\\n" % number)
"""


def test_a_log_that_another_process_writes_keeps_its_newest_lines_and_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "engines" / "engine_0.log"
    path.parent.mkdir()
    files = LogFiles(tmp_path, max_bytes=20_000)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) as writer:
        while writer.poll() is None:
            files.cut()
    files.close()
    head, *lines = path.read_text().splitlines()
    assert path.stat().st_size <= 20_000
    assert head == "[older lines were removed: observe.log_megabytes]"
    assert lines[-1] == "line 19999"
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line ")]
    assert numbers == sorted(numbers)
    assert len(numbers) > 100


def test_a_small_log_and_other_files_stay_as_they_are(tmp_path: Path) -> None:
    for name in ("megarl.log", "events.jsonl"):
        (tmp_path / name).write_bytes(b"x" * (10 if name == "megarl.log" else 1000))
    LogFiles(tmp_path, max_bytes=100).cut()
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {"megarl.log": 10, "events.jsonl": 1000}
