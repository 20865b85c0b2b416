"""The Ray of the image answers KubeRay: its probes, and that a job is taken and run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.repository import ROOT

HEALTHY = """
ip link set lo up
ray start --head --node-ip-address 127.0.0.1 --dashboard-host 127.0.0.1 --num-cpus 1 --temp-dir RAY
for question in 52365/api/local_raylet_healthz 8265/api/gcs_healthz; do
  python -c 'import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode())' \
    http://127.0.0.1:$question
done
ray job submit --address http://127.0.0.1:8265 -- echo the job ran
"""


def pins() -> dict[str, str]:
    """The version of every package in the image: what is installed last counts."""
    found: dict[str, str] = {}
    for name in ("requirements.txt", "requirements-cuda.txt"):
        for line in (ROOT / name).read_text().splitlines():
            if line and not line.startswith("#"):
                requirement = Requirement(line.partition(" #")[0])
                found[requirement.name.lower().replace("_", "-")] = f"{requirement.name}{requirement.specifier}"
    return found


@pytest.mark.needs("root", "iproute2")
@pytest.mark.slow
def test_the_ray_of_the_image_answers_its_probes_and_runs_a_job(tmp_path: Path) -> None:
    uv, environment = str(Path(sys.executable).with_name("uv")), tmp_path / "venv"
    constraints = tmp_path / "pins.txt"
    constraints.write_text("\n".join(pins().values()))
    subprocess.run([uv, "venv", "--quiet", environment], check=True)
    install = [uv, "pip", "install", "--quiet", "--python", str(environment), "--constraint", str(constraints)]
    subprocess.run([*install, f"ray[default]{Requirement(pins()['ray']).specifier}"], check=True)
    # In namespaces: the ports are free, and nothing outlives the script.
    alone = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    path = {"PATH": f"{environment}/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(tmp_path)}
    with tempfile.TemporaryDirectory() as short:  # a socket's path has 107 bytes
        command = [*alone, "sh", "-ec", HEALTHY.replace("RAY", short)]
        done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [line for line in done.stdout.splitlines() if line == "success"]
    assert len(answers) == 2, done.stdout
    assert "the job ran" in done.stdout
    assert "succeeded" in done.stdout
