"""The files of launch/ that are used as they are: they parse, and agree with what they start."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from megarl.env import LOCAL_RAY_ENVIRONMENT
from megarl.tools.launch.slurm import BODY
from tests.packages import program
from tests.repository import ROOT

LAUNCH = ROOT / "launch"
START_NODE = LAUNCH / "ray" / "start_node.sh"


def test_the_job_script_is_shown_where_people_look_for_it() -> None:
    assert (LAUNCH / "slurm" / "job.sh").read_text() == BODY.read_text()


@pytest.mark.needs("shellcheck")
def test_the_script_for_plain_machines_is_clean_for_shellcheck() -> None:
    words = [program("shellcheck"), "--severity=style", str(START_NODE)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "mode", "complaint"),
    [
        ([], 0o600, "needs head or worker, and the head's address; its first lines say how"),
        (["boss", "127.0.0.1"], 0o600, "boss is neither head nor worker"),
        (["head", "127.0.0.1"], 0o644, "can be read by others: chmod 600 it"),
        (["worker", "127.0.0.1"], None, "is missing: copy the head's file there"),
    ],
)
def test_what_is_wrong_is_said_before_ray_starts(
    words: list[str], mode: int | None, complaint: str, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    if mode is not None:
        token.write_text("secret")
        token.chmod(mode)
    environment = {**os.environ, "RAY_AUTH_TOKEN_PATH": str(token)}
    done = subprocess.run(
        [str(START_NODE), *words], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    assert complaint in done.stderr


@pytest.mark.slow
@pytest.mark.needs("iproute2")
def test_two_plain_machines_become_a_cluster(tmp_path: Path) -> None:
    """Both on this one."""
    # Ray's sockets are in there, and their names must not be long.
    ray_folder = tempfile.mkdtemp(prefix="ray-")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {
        **{name: value for name, value in os.environ.items() if name not in LOCAL_RAY_ENVIRONMENT},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
        "RAY_ADDRESS": f"127.0.0.1:{port}",
    }
    processes = []
    try:
        for role in ("head", "worker"):
            words = [str(START_NODE), role, f"127.0.0.1:{port}", "--num-cpus=1", f"--temp-dir={ray_folder}"]
            with (tmp_path / f"{role}.log").open("wb") as output:
                process = subprocess.Popen(
                    words[:4] if role == "worker" else words,
                    env=environment,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            processes.append(process)
            if role == "head":
                while not (tmp_path / "token").exists() or not (tmp_path / "token").stat().st_size:
                    assert process.poll() is None
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
        ready = [sys.executable, "-m", "megarl.tools.launch.ready", "--nodes", "2", "--timeout-s", "600"]
        done = subprocess.run(ready, env=environment, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("2 nodes: ")
    finally:
        for process in processes:
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            process.wait(timeout=60)
            for child in children:
                if child.is_running():
                    child.kill()
        shutil.rmtree(ray_folder, ignore_errors=True)
