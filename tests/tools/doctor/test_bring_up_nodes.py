"""A bring-up of two nodes with namespaces of their own: several interfaces, no default route, a slow and lossy link."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT

SCENARIO = """
import subprocess, sys
from pathlib import Path

from megarl.cluster.local_ray import LocalRay, NodeNetwork, local_ray, private_ray
from megarl.config.load import read_recipe

BRIDGE = ("link add docker0 type bridge", "address add 172.17.0.1/16 dev docker0", "link set docker0 up")
folder = Path(sys.argv[1])
network = NodeNetwork()
print("network made")
with private_ray():
    from megarl.tools.doctor.bring_up import bring_up

    nodes = LocalRay(device="cpu", log_folder=folder, has_several_nodes=True, network=network)
    with local_ray(nodes, num_slots=0):
        for number in (1, 2):
            # Containers' bridges are on many nodes, with one address on all of them.
            for command in BRIDGE:
                subprocess.run([*network.entering(number), "ip", *command.split()], check=True)
        words = "tc qdisc add dev eth0 root netem delay 2ms loss 0.5%"
        slow = subprocess.run([*network.entering(2), *words.split()], capture_output=True, check=False)
        print("netem", "on" if slow.returncode == 0 else "off")
        for _ in range(2):
            nodes.start_node(num_slots=1)
        nodes.wait_started()
        recipe = read_recipe(folder / "recipe.yaml").recipe
        for check in bring_up(recipe, address=nodes.address, chosen=(), say=lambda text: print("said", text)):
            print(f"{check.status} | {check.name} | {check.found} | {check.remedy}")
print("done")
"""

RECIPE = """\
run: {name: sample, steps: 2, device: cpu, folder: FOLDER/runs}
model: {path: FOLDER/model}
data: {train: [train.parquet]}
pools: {shared: {nodes: 2, gpus_per_node: 1}}
roles: {actor: {pool: shared, tensor: 1}, rollout: {pool: shared}}
algorithm: {kind: grpo}
train: {prompts_per_step: 8}
network: {bind: private}
"""


@pytest.mark.slow
@pytest.mark.needs("root")
@pytest.mark.usefixtures("real_ray")
def test_nodes_with_several_interfaces_and_no_default_route_are_tried_over_the_one_they_share(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(tmp_path)))
    words = [sys.executable, "-c", SCENARIO, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    if "network made" not in done.stdout and "MachineError" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
    rows = {row[1]: row for row in (line.split(" | ") for line in done.stdout.splitlines()) if len(row) == 4}
    assert [row for row in rows.values() if row[0] == "error"] == []
    assert rows["addresses"][2] == "10.0.0.2, 10.0.0.3"
    assert rows["all-reduce, pairs of nodes"][2].endswith("(10.0.0.2 - 10.0.0.3); not judged on CPUs")
    assert rows["all-reduce, inside a node"][2] == "not tried: every node has one GPU in the pools"
    assert rows["file system, read"][2].startswith("lowest ")
