"""The nodes of a Ray cluster: equal versions, readable files and clocks.

Import this module inside `ray_environment`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.config.recipe import Recipe
from megarl.config.roles import RolesConfig
from megarl.tools.doctor import Check, CheckStatus
from megarl.tools.doctor.packages import local_versions

_MAX_SKEW_S = 2.0
_CONNECT_TIMEOUT_S = 10.0
_NODE_TIMEOUT_S = 60.0
_FOLDER = "doctor"
"""Inside the folder of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """The versions, files and clock of one node."""

    versions: Mapping[str, str]
    missing_files: tuple[str, ...]
    """Files that a process there must read and cannot."""
    can_write: bool
    """Into the folder of the run."""
    clock_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """The report of one node, or why there is none; the times are by our clock."""

    node: str
    report: NodeReport | None
    asked_at: float
    answered_at: float
    error: str = ""


def describe(recipe: Recipe) -> Callable[[], NodeReport]:
    """Return the function that describes a node for this recipe."""
    return partial(describe_node, _files(recipe.model.path, recipe.roles), recipe.run_folder.absolute())


def own_folder(recipe: Recipe, *, starts_ray: bool) -> Recipe:
    """Return the recipe with a folder of its own: a Ray that is started logs there, not over the log of the run."""
    run = recipe.run.model_copy(update={"folder": recipe.run_folder, "name": _FOLDER})
    recipe = recipe.model_copy(update={"run": run})
    if starts_ray:
        recipe.run_folder.mkdir(parents=True, exist_ok=True)
    return recipe


def try_nodes(described: Callable[[], NodeReport]) -> list[NodeAnswer]:
    """Return the answer of every live node."""
    return [_ask_node(node, described) for node in ray.nodes() if node["Alive"]]


def connect_error(address: str) -> str:
    """Return why a connection fails, else an empty text. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return ""
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _files(model: Path, roles: RolesConfig) -> tuple[Path, ...]:
    """Return the files that ranks and engines open on their nodes; data is read where megarl is started."""
    folders = [model]
    folders += [role.path for role in (roles.critic, roles.reference) if role is not None and role.path is not None]
    folders += [*(role.model for role in roles.frozen.values()), *(role.model for role in roles.teacher_ranks.values())]
    return tuple(folder.absolute() / "config.json" for folder in folders)


def describe_node(files: Sequence[Path], run_folder: Path) -> NodeReport:
    """Return the report of the node that this runs on."""
    existing = next(path for path in (run_folder, *run_folder.parents) if path.exists())
    return NodeReport(
        versions=local_versions(),
        missing_files=tuple(str(path) for path in files if not os.access(path, os.R_OK)),
        can_write=os.access(existing, os.W_OK),
        clock_s=time.time(),
    )


def check_nodes(nodes: Sequence[NodeAnswer]) -> Iterator[Check]:
    yield _ok("nodes", str(len(nodes)))
    for node in nodes:
        if node.report is None:
            remedy = f"{node.error}; install the same megarl there and start Ray again"
            yield _error("node", f"{node.node} does not answer", remedy)
    reports = {node.node: node.report for node in nodes if node.report is not None}
    if reports:
        yield from _check_versions(reports)
        yield from _check_files(reports)
        yield _check_clocks(nodes)


def _check_versions(reports: Mapping[str, NodeReport]) -> Iterator[Check]:
    first_name, first = next(iter(reports.items()))
    num_differing = 0
    for name, report in reports.items():
        for package, version in report.versions.items():
            if version != first.versions.get(package):
                num_differing += 1
                yield _error(
                    package,
                    f"{version} on {name}, {first.versions.get(package)} on {first_name}",
                    "install the same versions on every node, best from one image or one shared folder",
                )
    if not num_differing:
        yield _ok("versions", "the same on every node")


def _check_files(reports: Mapping[str, NodeReport]) -> Iterator[Check]:
    missing = [(name, path) for name, report in reports.items() for path in report.missing_files]
    read_only = [name for name, report in reports.items() if not report.can_write]
    for name, path in missing:
        remedy = "put it on storage that every node has under the same path"
        if all(path in report.missing_files for report in reports.values()):
            if name == next(iter(reports)):
                yield _warning("files", f"{path} is on no node", f"a run needs it: {remedy}")
        else:
            yield _error("files", f"{path} cannot be read on {name}", remedy)
    for name in read_only:
        remedy = "every rank writes its part of a checkpoint: choose a run.folder that all nodes share"
        yield _error("files", f"the run's folder cannot be written on {name}", remedy)
    if not missing and not read_only:
        yield _ok("files", "there on every node")


def _check_clocks(nodes: Sequence[NodeAnswer]) -> Check:
    """Compare with our clock; a node reads its own at some time between question and answer."""
    skews = {
        node.node: max(node.asked_at - node.report.clock_s, node.report.clock_s - node.answered_at, 0.0)
        for node in nodes
        if node.report is not None
    }
    worst = max(skews, key=lambda name: skews[name])
    if skews[worst] <= _MAX_SKEW_S:
        return _ok("clocks", f"within {_MAX_SKEW_S:g} s")
    found = f"{worst} is {skews[worst]:.1f} s off"
    remedy = "events of the nodes cannot be put in order: synchronise the clocks (chrony)"
    return _warning("clocks", found, remedy)


def _ok(name: str, found: str) -> Check:
    return Check(area="cluster", name=name, found=found, status=CheckStatus.OK)


def _warning(name: str, found: str, remedy: str) -> Check:
    return Check(area="cluster", name=name, found=found, status=CheckStatus.WARNING, remedy=remedy)


def _error(name: str, found: str, remedy: str) -> Check:
    return Check(area="cluster", name=name, found=found, status=CheckStatus.ERROR, remedy=remedy)


def _ask_node(node: Mapping[str, object], describe: Callable[[], NodeReport]) -> NodeAnswer:
    name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    strategy = NodeAffinitySchedulingStrategy(str(node["NodeID"]), soft=False)
    asked_at = time.time()
    # Ray takes a function by its name, and a partial has none.
    reference = ray.remote(_call).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(describe)
    try:
        report = cast("NodeReport", ray.get(reference, timeout=_NODE_TIMEOUT_S))
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        return NodeAnswer(node=name, report=None, asked_at=asked_at, answered_at=time.time(), error=reason)
    return NodeAnswer(node=name, report=report, asked_at=asked_at, answered_at=time.time())


def _call(describe: Callable[[], NodeReport]) -> NodeReport:
    return describe()
