"""Keys of a real run: in no file it leaves, on no screen, in no command line."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.faults.leftovers import Footprint, nothing_left
from tests.run.runs import finished, started

CANARY = "canary-5d41402abc4b2a76"


@contextmanager
def judge(asked: list[str]) -> Iterator[str]:
    """Scores everything 1 or 0, and remembers what it was shown as a key."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(self.headers["Authorization"])
            reply = json.dumps(float(len(request["solution_str"]) % 2)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score"
    finally:
        server.shutdown()


def watch(run_folder: Path, footprint: Footprint, secrets: set[str], lines: set[str]) -> None:
    """Take down every command line, and the keys that are in a file for a while."""
    for process in footprint.processes():
        with suppress(psutil.Error, OSError):
            lines.add(" ".join(process.cmdline()))
            if path := process.environ().get("RAY_AUTH_TOKEN_PATH"):
                secrets.add(Path(path).read_text().strip())
    for path in run_folder.glob("engines/*.keys.yaml"):
        with suppress(OSError):
            secrets.update(line.split(": ")[1] for line in path.read_text().splitlines())


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
def test_no_key_of_a_run_is_to_be_found_anywhere(tmp_path: Path) -> None:
    make_arithmetic(tmp_path / "arithmetic", num_train=12, num_sft=16, num_eval=16)
    (tmp_path / "key").write_text(CANARY)
    secrets, lines, asked = {CANARY}, set[str](), list[str]()
    run_folder = tmp_path / "runs" / "secret"
    with judge(asked) as url, nothing_left() as footprint:
        reward = f"reward={{kind: http, url: {url}, api_key_file: {tmp_path}/key}}"
        with started(tmp_path, "secret", reward, "evaluation=null", "data.eval=[]", footprint=footprint) as process:
            deadline = time.monotonic() + 1200
            while process.poll() is None and time.monotonic() < deadline:
                watch(run_folder, footprint, secrets, lines)
                time.sleep(0.1)
            process.wait(timeout=60)
    done = finished(tmp_path, "secret", process)
    assert done.exit_code == 0, done.output
    assert set(asked) == {f"Bearer {CANARY}"}
    assert len(secrets) == 4, "the judge's key, the engine's two, and Ray's token"
    texts = {"the screen": done.output.encode(), "command lines": "\n".join(lines).encode()}
    texts |= {str(path): path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    found = [name for name, text in texts.items() for secret in secrets if secret.encode() in text]
    assert found == []
