"""The python tool: state within an episode, and code that misbehaves."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from megarl.episodes.built_in.python import Python

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
