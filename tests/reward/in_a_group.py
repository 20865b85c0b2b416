"""Programs run in a sandbox below a delegated control group, and their ends are printed.

This is a process of its own, since it leaves its group.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from megarl.reward import sandbox as sandboxes
from megarl.reward.sandbox import ControlGroups, Limits, Ran, Sandbox

MEBIBYTE = 1 << 20
LIMITS = Limits(memory_bytes=128 * MEBIBYTE, disk_bytes=16 * MEBIBYTE, max_processes=16, max_output_bytes=4096)
TOGETHER = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        held = bytearray(80 << 20)
        for place in range(0, len(held), 4096):
            held[place] = 1
        time.sleep(60)
time.sleep(60)
"""
"""Each process is below the limit, all of them are not."""
OUTLIVING = """
import os, time
if os.fork() == 0:
    os.setsid()
    os.close(1)
    time.sleep(600)
print("begun")
"""


def main(folder: Path) -> None:
    """Print what happened, as JSON. `folder` is delegated, and has no processes."""
    own = folder / "worker"
    own.mkdir()
    (own / "cgroup.procs").write_text(str(os.getpid()))
    # Nobody but the kernel counts.
    sandboxes.tree_resident_bytes = lambda root: 0
    sandbox = Sandbox("bubblewrap", LIMITS)
    found = ControlGroups.find()

    def run(program: str) -> Ran:
        return sandbox.run(program, b"", deadline=time.monotonic() + 300)

    told: dict[str, object] = {"found": str(found.folder) if found else None}
    for name, program in (("plain", "print(6 * 7)"), ("together", TOGETHER), ("outliving", OUTLIVING)):
        ran = run(program)
        told[name] = {**asdict(ran), "output": ran.output.decode()}
    time.sleep(1)
    run("print(6 * 7)")
    told["left"] = sorted(path.name for path in folder.glob("megarl-*"))
    print(json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
