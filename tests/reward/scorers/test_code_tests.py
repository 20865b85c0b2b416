"""Programs in the sandbox, those of the model's bad days among them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from megarl.reward.sandbox import Limits, Sandbox, SandboxError, ended_with_caller
from megarl.reward.scorers.code_tests import compute_score, last_block
from tests.processes import command_of
from tests.waiting import wait_until

DEADLINE_S = 30.0
"""Long enough for an interpreter to start on a machine that is busy with other tests."""
LIMITS = Limits(memory_bytes=1 << 29, disk_bytes=16 << 20, max_processes=16, max_output_bytes=100_000)
ADDS = "a, b = map(int, input().split())\nprint(a + b)"
SUMS = json.dumps({"inputs": ["1 2\n", "-5 5\n"], "outputs": ["3\n", "0"]})
SECRET = "the-secret-of-the-test"

pytestmark = pytest.mark.needs("bubblewrap")


def block(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def score(
    program: str,
    tests: str = SUMS,
    *,
    partial: bool = False,
    sandbox: str = "bubblewrap",
    deadline_s: float = DEADLINE_S,
) -> float:
    result = compute_score(
        "",
        block(program),
        tests,
        sandbox=sandbox,  # type: ignore[arg-type]
        deadline_s=deadline_s,
        gives_partial_credit=partial,
        **asdict(LIMITS),
    )
    return result["score"]


@pytest.mark.parametrize("sandbox", ["bubblewrap", "none"])
def test_a_program_is_right_when_it_passes_every_test(sandbox: str) -> None:
    assert score(ADDS, sandbox=sandbox) == 1
    assert score("print(3)", sandbox=sandbox) == 0
    assert score("print(3)", partial=True, sandbox=sandbox) == 0.5
    assert score("this is no Python", sandbox=sandbox) == 0


@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        ("def add(a, b): return a + b", {"inputs": [[1, 2], ["x", "y"]], "outputs": [3, "xy"], "fn_name": "add"}, 1),
        (
            "class Solution:\n  def add(self, a, b): return (a, b)",
            {"inputs": [[1, 2]], "outputs": [[1, 2]], "fn_name": "add"},
            1,
        ),
        ("def add(a, b): return a", {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, 0),
        (
            "def add(a, b):\n  print('noise'); return a + b # no newline",
            {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"},
            1,
        ),
        ("def add(a, b): return a + b", ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], 1),
        ("def add(a, b): return a + b", {"asserts": ["assert add(1, 2) == 4"]}, 0),
        ("import sys\ndef add(a, b): sys.exit(0)", ["assert add(1, 2) == 3"], 0),
        ("import os\nos._exit(0)", ["assert add(1, 2) == 3"], 0),
        ("import builtins\nbuiltins.print = lambda *a: None", ["assert True"], 0),
    ],
)
def test_functions_and_asserts(program: str, tests: object, expected: float) -> None:
    assert score(program, json.dumps(tests)) == expected


def test_tests_may_be_in_extra_info() -> None:
    options = {"sandbox": "bubblewrap", "deadline_s": DEADLINE_S, **asdict(LIMITS)}
    result = compute_score("", block(ADDS), "", {"tests": json.loads(SUMS)}, **options)  # type: ignore[arg-type]
    assert result == {"score": 1, "passed": 1}


@pytest.mark.parametrize("tests", ["{}", "[]", "3", '{"inputs": ["1"], "outputs": []}', "not JSON"])
def test_tests_that_are_none_are_an_error(tests: str) -> None:
    with pytest.raises(ValueError):
        score(ADDS, tests)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\nor\n```python\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\nprints\n```\n3\n```", "a\n"),
        ("```bash\nls\n```", None),
        ("```python\nunfinished", None),
        ("print(1)", None),
        ("", None),
        ("```" * 100_000, None),
    ],
)
def test_the_last_python_block_is_the_program(text: str, program: str | None) -> None:
    assert last_block(text) == program


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def neighbour() -> Iterator[int]:
    """A process with a secret in its environment, beside the sandbox."""
    process = subprocess.Popen(["/bin/sleep", "600"], env={"SECRET": SECRET})
    yield process.pid
    assert process.poll() is None, "the neighbour was killed from within the sandbox"
    process.kill()
    process.wait(60)


# Each prints what the test expects only where it got out.
ESCAPES = {
    "etc_shadow": "print(open('/etc/shadow').read() and 'out')",
    "environments": """
import glob
found = []
for path in glob.glob('/proc/[0-9]*/environ'):
    try: found.append(open(path, 'rb').read())
    except OSError: pass
print('out' if any(b'SECRET_MARK' in text for text in found) else 'in')
""".replace("SECRET_MARK", SECRET),
    "secrets": """
import os
places = ['/root/.ssh', '/root/.bashrc', '/home', '/etc/passwd', '/var/run/secrets', '/srv', 'FILE']
print('out' if any(os.path.exists(place) for place in places) or 'SECRET' in os.environ else 'in')
""",
    "loopback": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)\nprint('out')",
    "fork_bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "memory": "x = bytearray(10_000_000_000)\nprint('out')",
    "file": "with open('/tmp/big', 'wb') as f:\n  for _ in range(10_000): f.write(bytes(1_000_000))\nprint('out')",
    "endless": "while True: pass",
    "sigterm": """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "write_outside": "open('FILE', 'w').write('x')\nprint('out')",
    "symlinks": """
import os, threading
def swap():
    while True:
        for target in ('FILE', '/tmp/here'):
            try:
                os.symlink(target, '/tmp/link.new'); os.replace('/tmp/link.new', '/tmp/link')
            except OSError: pass
threading.Thread(target=swap, daemon=True).start()
for _ in range(2_000):
    try: open('/tmp/link', 'a').write('x')
    except OSError: pass
while True: pass
""",
    "output": "import sys\nfor _ in range(100): sys.stdout.write('x' * 1_000_000)\nprint('out')",
    "kill_parent": """
import os, signal
for pid in (os.getppid(), 1, NEIGHBOUR, -1):
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
print('in')
""",
}
ENDLESS_S = dict.fromkeys(("fork_bomb", "endless", "sigterm", "symlinks"), 1.0)
"""Deadlines of those that do not end by themselves."""


def attempt(escape: str, *, target: Path, port: int, neighbour: int, sandbox: str) -> float:
    places = {"FILE": str(target), "PORT": str(port), "NEIGHBOUR": str(neighbour)}
    program = ESCAPES[escape]
    for name, place in places.items():
        program = program.replace(name, place)
    tests = json.dumps({"inputs": [""], "outputs": ["out"]})
    return score(program, tests, sandbox=sandbox, deadline_s=ENDLESS_S.get(escape, DEADLINE_S))


@pytest.mark.parametrize("escape", ["environments", "loopback", "write_outside"])
def test_without_a_sandbox_the_escapes_are_real(escape: str, port: int, neighbour: int, tmp_path: Path) -> None:
    assert attempt(escape, target=tmp_path / "target", port=port, neighbour=neighbour, sandbox="none") == 1


@pytest.mark.patient
@pytest.mark.fault(
    "escapes of a program from the sandbox",
    "end within deadline + 1 s, scored as failed, the next sample is scored rightly",
)
@pytest.mark.parametrize("escape", ESCAPES)
def test_an_escape_ends_in_time_and_fails(escape: str, port: int, neighbour: int, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    began = time.monotonic()
    value = attempt(escape, target=target, port=port, neighbour=neighbour, sandbox="bubblewrap")
    assert time.monotonic() - began < ENDLESS_S.get(escape, DEADLINE_S) + 1
    assert value == 0
    assert target.read_text() == "untouched"
    assert score(ADDS) == 1


def test_many_processes_share_one_memory_limit() -> None:
    hold = "os.fork() or (bytearray(b'x') * (200 << 20), time.sleep(60))"
    program = f"import os, time\nfor _ in range(6): {hold}\ntime.sleep(60)"
    ran = Sandbox("bubblewrap", LIMITS).run(program, b"", deadline=time.monotonic() + 30)
    assert ran.stopped == "its processes used too much memory"


@pytest.mark.parametrize("moment", ["while it runs", "before bubblewrap has begun"])
def test_nothing_is_left_of_a_program_whose_caller_was_killed(moment: str, tmp_path: Path) -> None:
    slow = tmp_path / "bwrap"
    slow.write_text("#!/bin/sh\nexec python3 -c 'import time; time.sleep(987654)'\n")
    slow.chmod(0o755)
    early = f"import os; os.environ['PATH'] = '{tmp_path}:' + os.environ['PATH']\n" if "before" in moment else ""
    script = (
        "import time\nfrom megarl.reward.sandbox import Limits, Sandbox\n"
        f"sandbox = Sandbox('bubblewrap', Limits(**{asdict(LIMITS)}))\nprint('ready', flush=True)\n{early}"
        "sandbox.run('import time\\nwhile True: time.sleep(987654)', b'', deadline=time.monotonic() + 600)\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert caller.stdout is not None
    assert caller.stdout.readline() == b"ready\n"
    wait_until(lambda: program_in(caller.pid))
    inside = program_in(caller.pid)
    caller.kill()
    caller.wait(60)
    caller.stdout.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in inside))


def test_a_program_whose_caller_is_gone_already_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch = ["touch", str(tmp_path / "begun")]
    subprocess.run([*ended_with_caller(None), *touch], check=True)
    (tmp_path / "begun").unlink()
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert subprocess.run([*ended_with_caller(None), *touch], check=False).returncode != 0
    assert not (tmp_path / "begun").exists()


def program_in(caller: int) -> list[int]:
    """The processes of a program and of its sandbox, once the program runs."""
    processes = psutil.Process(caller).children(recursive=True)
    has_begun = any("python" in Path(command_of(process).partition(" ")[0]).name for process in processes)
    return [process.pid for process in processes] if has_begun else []


def test_a_sandbox_that_cannot_be_had_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match="no_python is not a file"):
        Sandbox("bubblewrap", LIMITS, python=str(tmp_path / "no_python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"bwrap.* not found; install the packages bubblewrap"):
        Sandbox("bubblewrap", LIMITS)
