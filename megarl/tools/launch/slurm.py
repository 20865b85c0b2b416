"""Render a recipe as a Slurm job: the options for Slurm, and the settings that `slurm_job.sh` reads.

The settings are quoted assignments above the text of the script, so that no value is ever run.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint.folder import CHECKPOINTS_FOLDER, LATEST_STEP_FILE
from megarl.config.recipe import DataConfig, ModelConfig, Recipe, RunConfig
from megarl.config.roles import PoolConfig, RolesConfig
from megarl.config.section import CPU_SLOT, EXCLUDED_FILE
from megarl.errors import ConfigError, Problem
from megarl.planner.fit import Sizes

BODY = Path(__file__).parent / "slurm_job.sh"
READY_TIMEOUT_S = 300
_SPARE_S = 60
"""Slurm's clock is this coarse."""
_SHORTEST_S = 3600.0
_DAY_S = 86400.0
DOCTOR_TIME = "2:00:00"
"""Time limit of a job that brings a cluster up: engines of large models start for a quarter of an hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """The options of `megarl launch slurm`."""

    recipe_path: Path
    overrides: tuple[str, ...] = ()
    folder: Path
    """The working folder of the job; relative paths of the recipe start there."""
    nodes: int
    gpus_per_node: int
    cpus_per_node: int | None = None
    """None reserves whole nodes."""
    gpu_request: str | None = None
    """Replaces `--gpus-per-node` on clusters that need another option, such as `--gres=gpu:h100:8`."""
    partition: str | None = None
    account: str | None = None
    time_limit: str | None = None
    first_save_s: float = 0.0
    """From the start of the job to its first save by the plan; 0 without a plan."""
    container: str | None = None
    venv: Path | None = None
    """None without a container is the environment that megarl runs in now."""
    mounts: tuple[Path, ...] = ()
    environment: tuple[str, ...] = ()
    """NAME=VALUE, for every process of the job."""
    modules: tuple[str, ...] = ()
    prolog: Path | None = None
    """A file of shell commands that the job sources before it starts anything."""
    max_failures: int = 3
    is_doctor: bool = False
    """The job brings the cluster up with `megarl doctor --cluster` instead of training, and is never queued again."""


def render(job: SlurmJob, recipe: Recipe) -> str:
    """Return the whole script; raise a ConfigError where the recipe does not fit the job."""
    lead = lead_s(0.0 if job.is_doctor else recipe.checkpoint.time_to_save_s)
    pools = check_pools(recipe.pools, nodes=job.nodes, gpus_per_node=job.gpus_per_node)
    problems = [*pools, *_check_words(job), *_check_time(job, lead)]
    if problems:
        raise ConfigError(str(job.recipe_path), tuple(problems))
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in _options(job, recipe.run, lead)), ""]
    mounts = _mounts(job, recipe.run.folder, recipe.model, recipe.data, recipe.roles)
    lines += [*_settings(job, recipe.run, mounts), "", BODY.read_text()]
    return "\n".join(lines)


def check_pools(pools: Mapping[str, PoolConfig], *, nodes: int, gpus_per_node: int) -> Iterator[Problem]:
    """Pack the pools as a run does: a pool takes its GPUs of a node on as many nodes as it has, the largest first."""
    needed, given = sum(pool.gpus for pool in pools.values()), nodes * gpus_per_node
    if needed > given:
        yield Problem(
            key="pools",
            message=f"need {needed} gpus, {nodes} nodes of {gpus_per_node} have {given}; "
            f"ask for --nodes {-(-needed // gpus_per_node)}",
        )
        return
    free = [gpus_per_node] * nodes
    for name, pool in sorted(pools.items(), key=lambda item: -item[1].gpus_per_node):
        # The nodes with the least room that is enough.
        fitting = sorted((room, node) for node, room in enumerate(free) if room >= pool.gpus_per_node)
        if len(fitting) < pool.nodes:
            yield Problem(
                key=f"pools.{name}",
                message=f"needs {pool.gpus_per_node} gpus on each of {pool.nodes} node(s); {len(fitting)} of "
                f"{nodes} nodes of {gpus_per_node} have them beside the other pools; ask for more --nodes",
            )
            return
        for _, node in fitting[: pool.nodes]:
            free[node] -= pool.gpus_per_node


def _check_words(job: SlurmJob) -> Iterator[Problem]:
    """Refuse words that could add to a line: Slurm reads an option to the end of its line."""
    words = {
        "--partition": job.partition,
        "--account": job.account,
        "--gpu-request": job.gpu_request,
        "--container": job.container,
    }
    for name, word in words.items():
        if word is not None and not re.fullmatch(r"[\w.,:=/@+#-]+", word):
            yield Problem(key=name, message=f"{word!r} is not one word of letters, digits and .,:=/@+#-_")
    for module in job.modules:
        if not re.fullmatch(r"[\w.+/-]+", module):
            yield Problem(key="--module", message=f"{module!r} is not the name of a module, such as cuda/13.0")
    for assignment in job.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*=[^\n]*", assignment):
            yield Problem(key="--env", message=f"{assignment!r} is not NAME=VALUE, such as NCCL_IB_HCA=mlx5")
    if re.search(r"\s", str(job.folder)):
        yield Problem(
            key="--chdir", message=f"{job.folder}: Slurm accepts no folder with blanks; run this command in another one"
        )


def _check_time(job: SlurmJob, lead: int) -> Iterator[Problem]:
    if job.time_limit is None:
        return
    seconds = parse_time(job.time_limit)
    if seconds is None:
        message = f"{job.time_limit!r} is not a time for Slurm; write 90, 12:00:00 or 2-12:00:00"
        yield Problem(key="--time", message=message)
    elif seconds <= 2 * lead:
        yield Problem(
            key="--time",
            message=f"{job.time_limit} is too short: {lead} s before its end the job stops training to save "
            f"(checkpoint.grace_s and {_SPARE_S} s for Slurm's clock)",
        )
    elif not job.is_doctor and seconds < lead + job.first_save_s:
        yield Problem(
            key="--time",
            message=f"{job.time_limit} is too short: a start and the first step take about {job.first_save_s:.0f} s by "
            f"the plan, and {lead} s before its end the job stops training to save; no step would ever be saved",
        )


def time_limit(sizes: Sizes) -> str | None:
    """Return half as much again as a run takes by its plan, at most a day: a longer run is queued again."""
    if sizes.run_time is None or sizes.limits is None:
        return None
    total_s = math.inf if sizes.run_time.total_s is None else 1.5 * sizes.run_time.total_s
    lead = lead_s(sizes.limits.grace_s)
    needed_s = max(_SHORTEST_S, 2 * (lead + sizes.limits.first_save_s))
    hours = math.ceil(min(max(total_s + lead, needed_s), max(_DAY_S, needed_s)) / 3600)
    return f"{hours}:00:00"


def parse_time(text: str) -> int | None:
    """Return seconds from minutes, minutes:seconds, hours:minutes:seconds or days-hours[:minutes[:seconds]]."""
    if not re.fullmatch(r"(?:\d+-\d+(?::\d+){0,2}|\d+(?::\d+){0,2})", text):
        return None
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def lead_s(grace_s: float) -> int:
    """Return how many seconds before its end a job is asked to save and exit."""
    return int(grace_s) + _SPARE_S


def _options(job: SlurmJob, run: RunConfig, lead: int) -> Iterator[str]:
    yield f"--job-name=megarl-{run.name}"
    yield f"--chdir={job.folder}"
    yield f"--output=megarl-{run.name}-%j.log"
    yield "--open-mode=append"
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    if job.cpus_per_node is None:
        yield "--exclusive"
        yield "--mem=0"
    else:
        yield f"--cpus-per-task={job.cpus_per_node}"
    if run.device == "cuda":
        yield job.gpu_request or f"--gpus-per-node={job.gpus_per_node}"
    for name, value in (("partition", job.partition), ("account", job.account), ("time", job.time_limit)):
        if value is not None:
            yield f"--{name}={value}"
    yield f"--signal=B:USR1@{lead}"
    yield "--no-requeue" if job.is_doctor else "--requeue"


def _settings(job: SlurmJob, run: RunConfig, mounts: Sequence[Path]) -> Iterator[str]:
    train_words = ["doctor", str(job.recipe_path), "--cluster"] if job.is_doctor else ["train", str(job.recipe_path)]
    for assignment in job.overrides:
        train_words += ["--set", assignment]
    resources = json.dumps({CPU_SLOT: job.gpus_per_node})
    devices = f"--num-gpus={job.gpus_per_node}" if run.device == "cuda" else f"--resources={resources}"
    yield _assign("train_words", train_words)
    yield _assign("devices", [devices])
    yield from _container(job, mounts, device=run.device)
    yield _assign("environment", job.environment)
    yield _assign("modules", job.modules)
    yield _assign("prolog", "" if job.prolog is None else str(job.prolog))
    yield _assign("log_root", str(_absolute(job, run.folder) / "slurm"))
    yield _assign("excluded_file", str(_absolute(job, run.folder) / run.name / EXCLUDED_FILE))
    checkpoints = _absolute(job, run.folder) / run.name / CHECKPOINTS_FOLDER
    yield _assign("latest_step_file", str(checkpoints / LATEST_STEP_FILE))
    yield _assign("ready_timeout_s", str(READY_TIMEOUT_S))
    yield _assign("max_failures", str(0 if job.is_doctor else job.max_failures))
    programs = "" if job.container is not None else str((job.venv or Path(sys.prefix)) / "bin")
    yield _assign("programs", programs)


def _container(job: SlurmJob, mounts: Sequence[Path], *, device: str) -> Iterator[str]:
    """Yield how steps enter the container: Apptainer runs .sif files, pyxis (`--container-image`) all others."""
    kind, options, inside = "none", [], []
    if job.container is not None and job.container.endswith(".sif"):
        binds = [word for mount in mounts for word in ("--bind", str(mount))]
        nv = ["--nv"] if device == "cuda" else []
        kind, inside = "apptainer", ["apptainer", "exec", *nv, *binds, "--pwd", str(job.folder), job.container]
    elif job.container is not None:
        kind, options = "pyxis", [f"--container-image={job.container}", f"--container-workdir={job.folder}"]
        names = [assignment.partition("=")[0] for assignment in job.environment]
        if names:
            # Otherwise a value of the image wins.
            options.append(f"--container-env={','.join(names)}")
    yield _assign("container", kind)
    yield _assign("srun_options", options)
    yield _assign("inside", inside)
    yield _assign("mounts", ",".join(f"{mount}:{mount}" for mount in mounts) if kind == "pyxis" else "")


def _mounts(job: SlurmJob, runs: Path, model: ModelConfig, data: DataConfig, roles: RolesConfig) -> list[Path]:
    """Return the folders that the run reads or writes, without those inside another one of them."""
    paths = [runs, model.path, job.recipe_path.parent]
    paths += [path.parent for path in (*data.train, *data.eval)]
    paths += [role.path for role in (roles.critic, roles.reference) if role is not None and role.path is not None]
    paths += [*(role.model for role in roles.frozen.values()), *(role.model for role in roles.teacher_ranks.values())]
    folders = sorted({job.folder, *(_absolute(job, path) for path in (*paths, *job.mounts))})
    return [folder for folder in folders if not any(other in folder.parents for other in folders)]


def _absolute(job: SlurmJob, path: Path) -> Path:
    return path if path.is_absolute() else job.folder / path


def _assign(name: str, value: str | Sequence[str]) -> str:
    if isinstance(value, str):
        return f"{name}={_quoted(value)}"
    return f"{name}=({' '.join(map(_quoted, value))})"


def _quoted(word: str) -> str:
    """Quote even where a shell needs no quotes: a bare comma in an array looks like a mistake."""
    quoted = shlex.quote(word)
    return quoted if quoted != word else f"'{word}'"
