"""The python tool: state within an episode, and code that misbehaves."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.config.environment import ClassEnvironmentConfig
from megarl.episodes.build import open_environments
from megarl.episodes.built_in.python import Python
from megarl.episodes.protocol import Call
from megarl.errors import EnvironmentLostError
from megarl.reward.sandbox import SandboxError, stop_tree, tree_resident_bytes
from megarl.system.proc import descendants, limited_time, read_stat

pytestmark = pytest.mark.needs("bubblewrap")


@pytest.fixture
def tool() -> Iterator[Python]:
    tool = Python(sandbox="bubblewrap", memory_gib=0.5, disk_mib=16, max_processes=16, python=None, deadline_s=10)
    yield tool
    tool.close()


def test_variables_are_kept_and_the_last_value_is_shown(tool: Python) -> None:
    assert tool.python("x = 6\nprint('set')") == "set\n"
    assert tool.python("x * 7") == "42\n"
    assert tool.python("def double(y):\n    return 2 * y") == ""
    assert tool.python("double(x)") == "12\n"


def test_an_error_is_told_with_its_line_and_ends_nothing(tool: Python) -> None:
    tool.python("x = 1")
    told = tool.python("y = 2\nx / 0")
    assert "ZeroDivisionError: division by zero" in told
    assert "x / 0" in told
    assert "/program.py" not in told
    assert "SyntaxError" in tool.python("1 +")
    assert tool.python("import sys; sys.exit(3)") == "SystemExit: 3\n"
    assert tool.python("x + y") == "3\n"


@pytest.mark.patient
def test_code_that_hangs_exits_or_allocates_loses_its_variables_only(tool: Python) -> None:
    tool._deadline_s = 2
    tool.python("x = 1")
    assert "ran longer than 2 s" in tool.python("while True: pass")
    tool._deadline_s = 20
    assert "NameError" in tool.python("x")
    assert "it ended" in tool.python("import os; os._exit(0)")
    assert "MemoryError" in tool.python("a = bytearray(20 << 30)")
    assert "too much memory" in tool.python(
        "import os\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0: break\n"
        "held = b'x' * (300 << 20)\n"
        "import time; time.sleep(30)"
    )
    assert tool.python("1 + 1") == "2\n"


def test_a_flood_is_cut(tool: Python) -> None:
    text = tool.python("print('x' * 100_000_000)")
    assert len(text) < 300_000
    assert text.endswith("characters more]")


def test_neither_files_nor_the_network_can_be_reached(tool: Python) -> None:
    assert "FileNotFoundError" in tool.python(f"open({__file__!r})")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert "Error" in tool.python(f"import socket; socket.create_connection({address!r}, timeout=2)")


def test_replies_cannot_be_forged_beyond_the_own_call(tool: Python) -> None:
    forged = tool.python(
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'\\xff' * 64)\n    except OSError: pass"
    )
    assert "stopped" in forged or forged == ""
    assert "2" in tool.python("1 + 1")


def test_half_a_character_of_the_output_is_replaced(tool: Python) -> None:
    assert tool.python("print(chr(0xd800) + 'x')") == "\ufffdx\n"


@pytest.mark.patient
@pytest.mark.fault("the python tool is ended by the call's deadline", "no later call gets the result of an earlier one")
def test_a_call_that_is_cut_off_leaves_no_result_for_the_next(tool: Python) -> None:
    tool.prepare()
    with pytest.raises(TimeoutError), limited_time(0.5):
        tool.python("import time; time.sleep(1.5); print('A')")
    time.sleep(1.5)
    assert [tool.python(f"print({name!r})") for name in "BCD"] == ["B\n", "C\n", "D\n"]


def _call(code: str) -> Call:
    return Call(name="python", arguments={"code": code}, id="call_0")


def _slow_start(tmp_path: Path, script: str) -> ClassEnvironmentConfig:
    """Return an environment whose interpreter is a script that starts the real one."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    tools = {"python": {"sandbox": "none", "python": path}}
    return ClassEnvironmentConfig.model_validate(
        {"kind": "class", "tools": tools, "call_deadline_s": 2.5, "workers": 1}
    )


@pytest.mark.patient
async def test_the_time_of_a_slow_start_is_not_that_of_the_call(tmp_path: Path) -> None:
    # Slow only for the program of the tool, which is spoken to through a pipe, not for the questions before it.
    script = f'test -p /dev/stdin && sleep 4\nexec {sys.executable} "$@"'

    environments = await open_environments(_slow_start(tmp_path, script))
    environment = await environments.open({})
    try:
        assert [(await environment.call(_call(f"print({name!r})"))).text for name in "ABC"] == ["A\n", "B\n", "C\n"]
    finally:
        await environment.close()
        await environments.close()


@pytest.mark.fault("a sandbox that cannot be started", "the episode is lost, never a result of the model's code")
def test_an_interpreter_that_does_not_come_up_is_a_fault_of_the_machine(tmp_path: Path) -> None:
    mark = tmp_path / "broken"
    script = f'test -e {mark} && exit 1\nexec {sys.executable} "$@"'

    async def result() -> str:
        environments = await open_environments(_slow_start(tmp_path, script))
        environment = await environments.open({})
        assert (await environment.call(_call("1 + 1"))).text == "2\n"
        assert "it ended" in (await environment.call(_call("import os; os._exit(1)"))).text
        mark.touch()
        try:
            return (await environment.call(_call("1 + 1"))).text
        finally:
            await environment.close()
            await environments.close()

    with pytest.raises(EnvironmentLostError, match="no interpreter can be started: it ended"):
        asyncio.run(result())


def test_a_start_that_says_nothing_is_given_up(tool: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.episodes.built_in.python.START_TIMEOUT_S", 1.0)
    monkeypatch.setattr("megarl.episodes.built_in.python._PROGRAM", "import time; time.sleep(60)")
    with pytest.raises(SandboxError, match="no interpreter can be started"):
        tool.prepare()


_CHILDREN = """
import os, threading, time
def spin():
    while True: pass
for number in range(4):
    if os.fork() == 0:
        time.sleep(0.5)
        held = [b"x" * (200 << 20)]
        spin()
threading.Thread(target=spin, daemon=True).start()
"""


@pytest.mark.patient
@pytest.mark.fault(
    "code that goes on computing or allocating after its call", "stopped until the next call, with all its processes"
)
def test_nothing_computes_or_allocates_between_calls(tool: Python) -> None:
    tool.python("x = 6")
    assert tool.python(_CHILDREN) == ""
    assert tool._process is not None
    pids = descendants(tool._process.pid)
    assert len(pids) >= 5
    time.sleep(0.3)
    before = {pid: read_stat(pid).cpu_s for pid in pids}
    time.sleep(1.0)
    assert {pid: read_stat(pid).cpu_s for pid in pids} == before
    assert descendants(tool._process.pid) == pids
    assert tree_resident_bytes(tool._process.pid) < 512 << 20
    # They go on with the next call, and their memory is counted then.
    assert "too much memory" in tool.python("time.sleep(20)")
    assert tool.python("1 + 1") == "2\n"


def test_memory_that_was_taken_within_a_call_is_counted_at_its_end(
    tool: Python, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[int] = []

    def stop(pid: int) -> bool:
        stopped.append(pid)
        return stop_tree(pid)

    # Nobody looks before: as if all of it was taken after the last look.
    module = "megarl.episodes.built_in.python"
    monkeypatch.setattr(f"{module}.stop_tree", stop)
    monkeypatch.setattr(f"{module}.tree_resident_bytes", lambda pid: tree_resident_bytes(pid) if stopped else 0)
    code = (
        "import os\nheld = []\nreading, writing = os.pipe()\nfor _ in range(3):\n    if os.fork() == 0:\n"
        "        held.append(b'x' * (250 << 20)); os.write(writing, b'.'); import time; time.sleep(60)\n"
        "for _ in range(3): os.read(reading, 1)"
    )
    assert "too much memory" in tool.python(code)


@pytest.mark.patient
def test_a_request_that_nobody_reads_ends_at_the_deadline(tool: Python) -> None:
    tool.prepare()
    assert tool._process is not None
    pid, has_ended = tool._process.pid, threading.Event()

    def stop() -> None:
        while not has_ended.is_set():
            stop_tree(pid)

    tool._deadline_s = 2
    thread = threading.Thread(target=stop)
    thread.start()
    try:
        assert "ran longer than 2 s" in tool.python("x = '" + "y" * 3_000_000 + "'")
    finally:
        has_ended.set()
        thread.join()
    tool._deadline_s = 60
    assert tool.python("1 + 1") == "2\n"
