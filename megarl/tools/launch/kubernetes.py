"""Render a recipe as a job for Kubernetes: a RayJob of the KubeRay operator, and a ConfigMap with the recipe.

The image is named by its digest, so that every pod and every later attempt runs the same bytes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import yaml
from pydantic import JsonValue

from megarl.config.environment import ClassEnvironmentConfig, HarborEnvironmentConfig
from megarl.config.recipe import DataConfig, ModelConfig, Recipe, RunConfig
from megarl.config.reward import CodeTestsRewardConfig, single_rewards
from megarl.errors import ConfigError, PreemptedError, Problem
from megarl.tools.launch.leave import LEAVING_FILE
from megarl.tools.launch.slurm import check_pools, lead_s

RECIPE_FOLDER = "/etc/megarl"
_HEAD_LABEL = "megarl/head-of"
_SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
"""Keeps the autoscaler from taking a node away."""
_RECIPE_FILE = "recipe.yaml"
_DIGEST = re.compile(r"[a-z0-9][\w./:-]*@sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_MAX_NAME = 47
"""KubeRay adds to the name, and Kubernetes accepts 63 characters."""
_SHARED_MEMORY = "64Gi"
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[KMGT]i?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesJob:
    """The options of `megarl launch kubernetes`."""

    source: str
    """Names the recipe in messages."""
    nodes: int
    gpus_per_node: int
    image: str
    claim: str
    """A volume claim that all pods can write (ReadWriteMany): models, data and runs."""
    mount: Path
    """Its place in the pods, and their working folder: relative paths of the recipe start there."""
    cpus_per_node: str
    memory_per_node: str
    max_failures: int
    resources: tuple[str, ...] = ()
    """NAME=COUNT of each pod with GPUs, such as rdma/hca=8: the adapters, as their device plugin calls them."""
    environment: tuple[str, ...] = ()
    """NAME=VALUE, for every pod."""
    tolerations: tuple[str, ...] = ()
    """KEY, KEY=VALUE or either with :EFFECT, for pods with GPUs."""
    node_selector: tuple[str, ...] = ()
    """KEY=VALUE labels of the nodes for pods with GPUs."""
    annotations: tuple[str, ...] = ()
    """KEY=VALUE of pods with GPUs, such as the networks of their adapters."""
    pull_secrets: tuple[str, ...] = ()


def render(job: KubernetesJob, recipe: Recipe) -> str:
    """Return all documents; raise a ConfigError where the recipe does not fit the job."""
    name = f"megarl-{re.sub(r'[._]', '-', recipe.run.name.lower())}"
    fitting = check_pools(recipe.pools, nodes=job.nodes, gpus_per_node=job.gpus_per_node)
    paths = _check_paths(job, recipe.run, recipe.model, recipe.data)
    problems = [*fitting, *_check_words(job, name), *_check_options(job), *paths]
    if problems:
        raise ConfigError(job.source, tuple(problems))
    text = yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True), sort_keys=False)
    metadata: dict[str, JsonValue] = {"name": name}
    documents: list[dict[str, JsonValue]] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {_RECIPE_FILE: text}},
        # KubeRay counts the end of the head as a failure of the run, whatever ended it: nobody may evict it.
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata,
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {_HEAD_LABEL: name}}},
        },
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": metadata,
            "spec": _spec(
                job,
                name,
                run=recipe.run_folder,
                grace_s=lead_s(recipe.checkpoint.time_to_save_s),
                has_sandbox=_has_sandbox(recipe),
            ),
        },
    ]
    return "---\n".join(yaml.dump(each, Dumper=_Plain, sort_keys=False, width=1000) for each in documents)


class _Plain(yaml.SafeDumper):
    """Writes what occurs twice in full: anchors are allowed, and hard to read."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _check_words(job: KubernetesJob, name: str) -> Iterator[Problem]:
    if not _DIGEST.fullmatch(job.image):
        yield Problem(
            key="--image",
            message=f"{job.image} is not named by its digest, and a tag may change between two attempts; write "
            "REGISTRY/megarl@sha256:..., which docker push prints",
        )
    names = {"run.name": name, "--claim": job.claim}
    for key, word in names.items():
        if not _NAME.fullmatch(word) or len(word) > _MAX_NAME:
            message = f"{word!r} is not a name for Kubernetes: at most {_MAX_NAME} of a-z, 0-9 and -"
            yield Problem(key=key, message=message)
    sizes = {"--cpus": job.cpus_per_node, "--memory": job.memory_per_node}
    for key, word in sizes.items():
        if not _QUANTITY.fullmatch(word):
            yield Problem(key=key, message=f"{word!r} is not a quantity for Kubernetes, such as 64 or 900Gi")


def _check_options(job: KubernetesJob) -> Iterator[Problem]:
    """Yield the words of repeated options that cannot be read."""
    for secret in job.pull_secrets:
        if not _NAME.fullmatch(secret):
            yield Problem(key="--pull-secret", message=f"{secret!r} is not the name of a secret")
    pairs = {
        "--resource": (job.resources, r"[\w.-]+/[\w.-]+=\d+", "rdma/hca=8"),
        "--env": (job.environment, r"[A-Za-z_]\w*=.*", "NCCL_IB_HCA=mlx5"),
        "--toleration": (job.tolerations, r"[\w./-]+(=[\w.-]*)?(:\w+)?", "nvidia.com/gpu=present:NoSchedule"),
        "--node-selector": (job.node_selector, r"[\w./-]+=[\w.-]*", "node.kubernetes.io/instance-type=p5.48xlarge"),
        "--annotation": (job.annotations, r"[\w./-]+=.+", "k8s.v1.cni.cncf.io/networks=rail0"),
    }
    for key, (words, pattern, example) in pairs.items():
        for word in words:
            if not re.fullmatch(pattern, word):
                yield Problem(key=key, message=f"{word!r} cannot be read; write it like {example}")


def _check_paths(job: KubernetesJob, run: RunConfig, model: ModelConfig, data: DataConfig) -> Iterator[Problem]:
    if run.device != "cuda":
        yield Problem(key="run.device", message=f"{run.device}: a job for Kubernetes asks for GPUs; use cuda")
    paths = {
        "run.folder": (run.folder,),
        "model.path": (model.path,),
        "data.train": data.train,
        "data.eval": data.eval,
    }
    for key, path in ((key, path) for key, group in paths.items() for path in group):
        if path.is_absolute() and not path.is_relative_to(job.mount):
            yield Problem(key=key, message=f"{path} is not on the volume, which pods see at {job.mount} (--mount)")


def _spec(job: KubernetesJob, name: str, *, run: Path, grace_s: int, has_sandbox: bool) -> dict[str, JsonValue]:
    small: dict[str, JsonValue] = {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"memory": "64Gi"}}
    gcs: JsonValue = [{"name": "gcs", "containerPort": 6379}]
    head = _pod(job, name, {**_container(job, run, small), "ports": gcs}, grace_s=grace_s, has_sandbox=has_sandbox)
    gpus = _container(job, run, _devices(job), "--follows", has_adapters=bool(job.resources))
    worker = _pod(job, name, gpus, grace_s=grace_s, has_sandbox=has_sandbox)
    # GPU nodes commonly refuse pods without GPUs by this key.
    worker["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists"}, *map(_toleration, job.tolerations)]
    if job.node_selector:
        worker["nodeSelector"] = _pairs(job.node_selector)
    metadata: dict[str, JsonValue] = {"metadata": {"annotations": _pairs(job.annotations)}} if job.annotations else {}
    return {
        # Checkpoints are on the volume: the next attempt goes on from the newest.
        "backoffLimit": job.max_failures,
        "shutdownAfterJobFinishes": True,
        "submissionMode": "SidecarMode",
        "entrypoint": entrypoint(
            f"megarl train {RECIPE_FOLDER}/{_RECIPE_FILE}", leaving=job.mount / run / LEAVING_FILE
        ),
        "rayClusterSpec": {
            "rayVersion": version("ray"),
            "authOptions": {"mode": "token"},
            "headGroupSpec": {
                # Nothing of the run is placed on the head.
                "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
                "template": {
                    "metadata": {"labels": {_HEAD_LABEL: name}, "annotations": {_SAFE_TO_EVICT: "false"}},
                    "spec": head,
                },
            },
            "workerGroupSpecs": [
                {
                    "groupName": "gpu",
                    "replicas": job.nodes,
                    "minReplicas": job.nodes,
                    "maxReplicas": job.nodes,
                    "rayStartParams": {"num-gpus": str(job.gpus_per_node)},
                    "template": {**metadata, "spec": worker},
                }
            ],
        },
    }


def entrypoint(command: str, *, leaving: Path) -> str:
    """Return a line of shell: a run that was asked to stop (exit code 75) goes on here, unless its pod is being ended.

    KubeRay counts every other end as a failure (`backoffLimit`).
    """
    mark = shlex.quote(str(leaving))
    again = f"[ $code -eq {PreemptedError.exit_code} ] && [ ! -e {mark} ]"
    return f"while rm -f {mark}; do {command}; code=$?; {again} || exit $code; done"


def _has_sandbox(recipe: Recipe) -> bool:
    """Whether code of the model runs in a kernel sandbox, which is made of namespaces."""
    environment = recipe.environment
    tool = environment.tools.python if isinstance(environment, ClassEnvironmentConfig) else None
    boxes = environment.sandbox if isinstance(environment, HarborEnvironmentConfig) else None
    parts = (part for _, part in single_rewards(recipe.reward))
    tests = [part.sandbox for part in parts if isinstance(part, CodeTestsRewardConfig)]
    return "bubblewrap" in (*tests, boxes, None if tool is None else tool.sandbox)


def _devices(job: KubernetesJob) -> dict[str, JsonValue]:
    devices = {"nvidia.com/gpu": str(job.gpus_per_node), **_pairs(job.resources)}
    return {
        "requests": {"cpu": job.cpus_per_node, "memory": job.memory_per_node},
        "limits": {"memory": job.memory_per_node, **devices},
    }


def _pairs(words: Sequence[str]) -> dict[str, JsonValue]:
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def _toleration(word: str) -> dict[str, JsonValue]:
    labelled, _, effect = word.partition(":")
    key, has_value, value = labelled.partition("=")
    condition = {"operator": "Equal", "value": value} if has_value else {"operator": "Exists"}
    return {"key": key, **condition, **({"effect": effect} if effect else {})}


def _container(
    job: KubernetesJob, run: Path, resources: JsonValue, *words: str, has_adapters: bool = False
) -> dict[str, JsonValue]:
    """Return the container of a pod; `words` are for the hook at its end."""
    # RDMA registers memory, which the kernel counts as locked.
    capabilities: dict[str, JsonValue] = {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if has_adapters else {})}
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1", **_pairs(job.environment)}
    leaving: list[JsonValue] = ["python3", "-m", "megarl.tools.launch.leave", str(job.mount / run), *words]
    return {
        "name": "ray",
        "image": job.image,
        "workingDir": str(job.mount),
        "resources": resources,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "ports": [],
        # The signal of Kubernetes ends Ray, and with it all ranks: the driver is asked before, and saves.
        "lifecycle": {"preStop": {"exec": {"command": leaving}}},
        "volumeMounts": [{"name": volume, "mountPath": place} for volume, place in _places(job).items()],
    }


def _places(job: KubernetesJob) -> dict[str, str]:
    return {"shared": str(job.mount), "recipe": RECIPE_FOLDER, "shm": "/dev/shm"}  # noqa: S108 - of the pod


def _pod(
    job: KubernetesJob, name: str, container: JsonValue, *, grace_s: int, has_sandbox: bool
) -> dict[str, JsonValue]:
    names: list[JsonValue] = [{"name": secret} for secret in job.pull_secrets]
    secrets: dict[str, JsonValue] = {"imagePullSecrets": names} if names else {}
    # The profile of container runtimes forbids the namespaces of a sandbox within the pod.
    profile = "Unconfined" if has_sandbox else "RuntimeDefault"
    return {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": profile},
        },
        # Nothing in a pod asks Kubernetes for anything.
        "automountServiceAccountToken": False,
        # The hook at the end has this time.
        "terminationGracePeriodSeconds": grace_s,
        **secrets,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": job.claim}},
            {"name": "recipe", "configMap": {"name": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY}},
        ],
    }
