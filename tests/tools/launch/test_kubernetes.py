"""The rendered job for Kubernetes: its fields, the recipe in it, and what is refused before it is written."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megarl.cli import main as cli
from megarl.config.load import read_recipe
from megarl.config.recipe import Recipe
from megarl.errors import ConfigError
from megarl.tools.doctor.packages import pinned_versions
from megarl.tools.launch.kubernetes import RECIPE_FOLDER, KubernetesJob, entrypoint, render
from tests.repository import ROOT

LARGE = ROOT / "recipes" / "grpo_70b.yaml"
IMAGE = f"registry.example:5000/team/megarl@sha256:{'0a' * 32}"


def recipe(*overrides: str) -> Recipe:
    return read_recipe(LARGE, overrides).recipe


GPUS = max(pool.gpus_per_node for pool in recipe().pools.values())
NODES = sum(pool.nodes for pool in recipe().pools.values())
JOB = KubernetesJob(
    source="recipe",
    nodes=NODES,
    gpus_per_node=GPUS,
    image=IMAGE,
    claim="shared",
    mount=Path("/shared"),
    cpus_per_node="64",
    memory_per_node="900Gi",
    max_failures=3,
)


def test_the_recipe_in_the_job_is_the_recipe_with_its_overrides(tmp_path: Path) -> None:
    wanted = recipe("run.steps=7", "checkpoint.mirror.url=s3://bucket/runs")
    config, _, job = yaml.safe_load_all(render(JOB, wanted))
    (name,) = config["data"]
    assert f" megarl train {RECIPE_FOLDER}/{name}; " in job["spec"]["entrypoint"]
    path = tmp_path / name
    path.write_text(config["data"][name])
    assert read_recipe(path, []).recipe == wanted


def test_every_pod_runs_the_same_image_without_rights_and_has_time_to_save() -> None:
    config, _, job = yaml.safe_load_all(render(JOB, recipe("checkpoint.grace_s=240")))
    cluster = job["spec"]["rayClusterSpec"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert cluster["rayVersion"] in pinned_versions()["ray"]
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    for pod in (cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]):
        (container,) = pod["containers"]
        assert container["image"] == IMAGE
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert pod["terminationGracePeriodSeconds"] > 240
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert {"name": "recipe", "configMap": {"name": config["metadata"]["name"]}} in pod["volumes"]
        assert "privileged" not in str(pod)
        assert "TOKEN" not in str(container["env"])


def test_the_head_opens_one_port_and_workers_have_the_gpus() -> None:
    *_, job = yaml.safe_load_all(render(JOB, recipe()))
    assert job["metadata"] == {"name": "megarl-grpo-70b"}
    cluster = job["spec"]["rayClusterSpec"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    (workers,) = cluster["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    assert [port["containerPort"] for port in head["ports"]] == [6379]
    assert worker["ports"] == []
    assert cluster["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    assert workers["rayStartParams"]["num-gpus"] == worker["resources"]["limits"]["nvidia.com/gpu"] == str(GPUS)
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == NODES


def test_nobody_evicts_the_head_whose_end_counts_as_a_failure() -> None:
    """A drain and the autoscaler ask the budget; the memory of the head is all reserved, so that it is not the first
    that a node without memory ends.
    """
    _, budget, job = yaml.safe_load_all(render(JOB, recipe()))
    cluster = job["spec"]["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"]
    assert (budget["apiVersion"], budget["kind"]) == ("policy/v1", "PodDisruptionBudget")
    assert budget["spec"] == {"minAvailable": 1, "selector": {"matchLabels": head["metadata"]["labels"]}}
    assert head["metadata"]["labels"] == {"megarl/head-of": job["metadata"]["name"]}
    assert head["metadata"]["annotations"] == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    assert "megarl/head-of" not in str(workers)
    resources = head["spec"]["containers"][0]["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_pods_with_gpus_have_adapters_rights_labels_and_variables() -> None:
    wanted = replace(
        JOB,
        resources=("rdma/hca=8",),
        environment=("NCCL_IB_HCA=mlx5", "NCCL_SOCKET_IFNAME=eth0"),
        tolerations=("team=rl:NoSchedule", "spot"),
        node_selector=("pool=h100",),
        annotations=("k8s.v1.cni.cncf.io/networks=rail0,rail1",),
        pull_secrets=("registry",),
    )
    *_, job = yaml.safe_load_all(render(wanted, recipe()))
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    head, worker = cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]
    (container,) = worker["containers"]
    assert container["resources"]["limits"]["rdma/hca"] == "8"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert {"key": "team", "operator": "Equal", "value": "rl", "effect": "NoSchedule"} in worker["tolerations"]
    assert {"key": "spot", "operator": "Exists"} in worker["tolerations"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in worker["tolerations"]
    assert worker["nodeSelector"] == {"pool": "h100"}
    assert workers["template"]["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "rail0,rail1"}
    for pod in (head, worker):
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert {"name": "NCCL_IB_HCA", "value": "mlx5"} in pod["containers"][0]["env"]
    # The head has no GPU, no adapter and no right.
    assert "tolerations" not in head
    assert "nodeSelector" not in head
    assert "rdma/hca" not in str(head)
    assert "add" not in head["containers"][0]["securityContext"]["capabilities"]


def test_a_sandbox_gets_the_system_calls_that_it_is_made_of() -> None:
    *_, job = yaml.safe_load_all(render(JOB, recipe("reward={kind: code_tests}")))
    pods = [job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"]]
    for pod in pods:
        assert pod["template"]["spec"]["securityContext"]["seccompProfile"] == {"type": "Unconfined"}


@pytest.mark.parametrize(
    ("codes", "is_leaving", "expected", "num_starts"),
    [
        ([0], False, 0, 1),
        ([75, 75, 0], False, 0, 3),
        ([75, 5], False, 5, 2),
        ([75, 0], True, 75, 1),
        ([70, 0], False, 70, 1),
    ],
)
def test_a_preemption_is_no_failure_unless_the_pod_ends(
    tmp_path: Path, codes: list[int], is_leaving: bool, expected: int, num_starts: int
) -> None:
    """KubeRay counts the exits of the entrypoint against `backoffLimit`; a mark of an earlier attempt is none."""
    mark, starts = tmp_path / "leaving", tmp_path / "starts"
    mark.write_text("1")
    program = tmp_path / "train"
    leaves = f"touch {mark}; " if is_leaving else ""
    program.write_text(
        f"echo >> {starts}; {leaves}set -- {' '.join(map(str, codes))}; shift $(($(wc -l < {starts}) - 1)); exit $1"
    )
    done = subprocess.run(["sh", "-c", entrypoint(f"sh {program}", leaving=mark)], check=False, timeout=60)
    assert (done.returncode, len(starts.read_text().splitlines())) == (expected, num_starts)


def test_a_pod_that_is_ended_asks_the_driver_to_save_before_ray_gets_a_signal() -> None:
    *_, job = yaml.safe_load_all(render(JOB, recipe("run.folder=mine")))
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    commands = [
        pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        for pod in (cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"])
    ]
    asking = ["python3", "-m", "megarl.tools.launch.leave", "/shared/mine/grpo_70b"]
    assert commands == [asking, [*asking, "--follows"]]


@pytest.mark.parametrize(
    ("job", "overrides", "expected"),
    [
        (replace(JOB, resources=("rdma",)), (), "--resource: 'rdma' cannot be read; write it like rdma/hca=8"),
        (replace(JOB, tolerations=("a b",)), (), "--toleration: 'a b' cannot be read"),
        (replace(JOB, image="megarl:0.1.0"), (), "--image: megarl:0.1.0 is not named by its digest"),
        (replace(JOB, nodes=1), (), "pools: need "),
        (replace(JOB, claim="Shared_Disk"), (), "--claim: 'Shared_Disk' is not a name for Kubernetes"),
        (replace(JOB, memory_per_node="900 GB"), (), "--memory: '900 GB' is not a quantity"),
        (JOB, ("model.path=/models/x",), "model.path: /models/x is not on the volume, which pods see at /shared"),
        (JOB, (f"run.name={'a' * 60}",), "run.name: "),
        (JOB, ("run.device=cpu",), "run.device: cpu: a job for Kubernetes asks for GPUs"),
    ],
)
def test_what_cannot_run_is_refused(job: KubernetesJob, overrides: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render(job, recipe(*overrides))
    (problem,) = caught.value.problems
    assert str(problem).startswith(expected)


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "job.yaml"
    words = ["launch", "kubernetes", str(LARGE), "--nodes", str(NODES), "--image", IMAGE, "--claim", "shared"]
    assert cli.run([*words, "--override-fit", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}; start it with: kubectl apply -f {out}\n"
    assert [document["kind"] for document in yaml.safe_load_all(out.read_text())] == [
        "ConfigMap",
        "PodDisruptionBudget",
        "RayJob",
    ]
