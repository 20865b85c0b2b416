"""A Ray cluster: the same versions on every node, every file there, clocks that agree, groups that can reduce."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.recipe import Recipe
from megarl.errors import MachineError
from megarl.runtime.launch import joined_ray, private_ray
from megarl.tools.doctor.checks import Check, CheckStatus
from megarl.tools.doctor.versions import local_versions

if TYPE_CHECKING:
    from megarl.tools.doctor.probe import ClusterReport, GroupReport, NodeAnswer

_MAX_SKEW_S = 2.0
_CONNECT_TIMEOUT_S = 10.0
_FOLDER = "doctor"
"""Inside the folder of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a node says about itself."""

    versions: Mapping[str, str]
    missing_files: tuple[str, ...]
    """Of those a process there would open."""
    can_write: bool
    """The folder of the run."""
    clock_s: float


def describe_node(files: Sequence[Path], run_folder: Path) -> NodeReport:
    """Runs on the node."""
    existing = next(path for path in (run_folder, *run_folder.parents) if path.exists())
    return NodeReport(
        versions=local_versions(),
        missing_files=tuple(str(path) for path in files if not os.access(path, os.R_OK)),
        can_write=os.access(existing, os.W_OK),
        clock_s=time.time(),
    )


def check_cluster(recipe: Recipe, *, address: str | None) -> Iterator[Check]:
    """Joins Ray at `address`, or starts one here."""
    ask = partial(describe_node, _files(recipe), recipe.run_folder.absolute())
    # A Ray of our own leaves its log beside a run's, not in place of it.
    aside = recipe.run.model_copy(update={"folder": recipe.run_folder, "name": _FOLDER})
    recipe = recipe.model_copy(update={"run": aside})
    if address is not None and (error := _unreachable(address)):
        remedy = f"{error}; name the host and port that `ray start --head` printed"
        yield Check(
            area="cluster", name="ray", found=f"{address} is not there", verdict=CheckStatus.ERROR, remedy=remedy
        )
        return
    with private_ray() if address is None else joined_ray():
        # Ray reads its environment when it is imported, and only then.
        from megarl.tools.doctor.probe import probe  # noqa: PLC0415

        try:
            report = probe(recipe, ask, address=address)
        except MachineError as error:
            yield Check(area="cluster", name="ray", found="unusable", verdict=CheckStatus.ERROR, remedy=str(error))
            return
    yield from judge(report)


def _unreachable(address: str) -> str:
    """Why nobody listens there; Ray itself would try for minutes. Empty where somebody does, or cannot be asked."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return ""
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _files(recipe: Recipe) -> tuple[Path, ...]:
    """What ranks and engines open on their own nodes; data is read where megarl is started."""
    roles = recipe.roles
    folders = [recipe.model.path]
    folders += [role.path for role in (roles.critic, roles.reference) if role is not None and role.path is not None]
    return tuple(folder.absolute() / "config.json" for folder in folders)


def judge(report: ClusterReport[NodeReport]) -> Iterator[Check]:
    yield Check(area="cluster", name="nodes", found=str(len(report.nodes)), verdict=CheckStatus.OK)
    answers = [(node, node.answer) for node in report.nodes if node.answer is not None]
    for node in report.nodes:
        if node.answer is None:
            yield Check(
                area="cluster",
                name="node",
                found=f"{node.node} does not answer",
                verdict=CheckStatus.ERROR,
                remedy=f"{node.error}; install the same megarl there and start Ray again",
            )
    if answers:
        yield from _versions([(node.node, answer) for node, answer in answers])
        yield from _files_of([(node.node, answer) for node, answer in answers])
        yield _clocks(answers)
    for group in report.groups:
        yield _group(group)


def _versions(answers: Sequence[tuple[str, NodeReport]]) -> Iterator[Check]:
    first_name, first = answers[0]
    num_differing = 0
    for name, answer in answers[1:]:
        for package, version in answer.versions.items():
            if version != first.versions.get(package):
                num_differing += 1
                yield Check(
                    area="cluster",
                    name=package,
                    found=f"{version} on {name}, {first.versions.get(package)} on {first_name}",
                    verdict=CheckStatus.ERROR,
                    remedy="install the same versions on every node, best from one image or one shared folder",
                )
    if not num_differing:
        yield Check(area="cluster", name="versions", found="the same on every node", verdict=CheckStatus.OK)


def _files_of(answers: Sequence[tuple[str, NodeReport]]) -> Iterator[Check]:
    missing = [(name, path) for name, answer in answers for path in answer.missing_files]
    locked = [name for name, answer in answers if not answer.can_write]
    for name, path in missing:
        yield Check(
            area="cluster",
            name="files",
            found=f"{path} cannot be read on {name}",
            verdict=CheckStatus.ERROR,
            remedy="put it on storage that every node has under the same path",
        )
    for name in locked:
        yield Check(
            area="cluster",
            name="files",
            found=f"the run's folder cannot be written on {name}",
            verdict=CheckStatus.ERROR,
            remedy="every rank writes its part of a checkpoint: choose a run.folder that all nodes share",
        )
    if not missing and not locked:
        yield Check(area="cluster", name="files", found="there on every node", verdict=CheckStatus.OK)


def _clocks(answers: Sequence[tuple[NodeAnswer[NodeReport], NodeReport]]) -> Check:
    """Against ours; a node's clock is read at some time between question and answer."""
    skews = {
        node.node: max(node.asked_at - answer.clock_s, answer.clock_s - node.answered_at, 0.0)
        for node, answer in answers
    }
    worst = max(skews, key=lambda name: skews[name])
    is_close = skews[worst] <= _MAX_SKEW_S
    return Check(
        area="cluster",
        name="clocks",
        found=f"within {_MAX_SKEW_S:g} s" if is_close else f"{worst} is {skews[worst]:.1f} s off",
        verdict=CheckStatus.OK if is_close else CheckStatus.WARNING,
        remedy="" if is_close else "events of the nodes cannot be put in order: synchronise the clocks (chrony)",
    )


def _group(group: GroupReport) -> Check:
    name = f"all-reduce, {group.name}"
    if group.error:
        return Check(
            area="cluster",
            name=name,
            found=f"{group.num_ranks} ranks over {group.backend} fail",
            verdict=CheckStatus.ERROR,
            remedy=f"{group.error}; open the nodes' ports to each other, or name their network in network.bind "
            "and its interface in NCCL_SOCKET_IFNAME",
        )
    rate = group.bytes_per_second / 1e9
    found = f"{group.num_ranks} ranks over {group.backend}, {rate:.2f} GB/s"
    return Check(area="cluster", name=name, found=found, verdict=CheckStatus.OK)
