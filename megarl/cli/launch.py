"""`megarl launch`: checks that a recipe fits its nodes, writes it as a job of a scheduler, and submits it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from megarl.cli.recipe import Overrides, RecipePath, ShapeName, load_checked
from megarl.config.load import read_recipe
from megarl.config.recipe import Recipe
from megarl.errors import ConfigError, MachineError, Problem, writing
from megarl.planner.fit import PlanQuestion, Sizes, answer
from megarl.planner.limits import with_limits

launch_app = typer.Typer(no_args_is_help=True, help="Make jobs for schedulers.")

_GpusPerNode = Annotated[int | None, typer.Option(min=1, help="Those of the largest pool if not given.")]
_Environment = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME=VALUE", help="Set it in every process. May be repeated.", show_default=False),
]
_Resources = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=COUNT", help="Adapters of a pod with GPUs, as rdma/hca=8. May be repeated.", show_default=False
    ),
]
_Tolerations = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY[=VALUE][:EFFECT]", help="Of pods with GPUs. May be repeated.", show_default=False),
]
_Selectors = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="A label of nodes for pods with GPUs. May be repeated.", show_default=False),
]
_Annotations = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Of pods with GPUs. May be repeated.", show_default=False),
]
_Secrets = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="For the registry of the image. May be repeated.", show_default=False),
]
_Modules = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Load it in the job. May be repeated.", show_default=False)
]
_Prolog = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Shell commands that the job sources before it starts anything.")
]
_GpuRequest = Annotated[
    str | None, typer.Option(metavar="OPTION", help="Replaces --gpus-per-node=N, as in --gres=gpu:h100:8.")
]
_Container = Annotated[
    str | None, typer.Option(metavar="IMAGE", help="A .sif file for Apptainer, or an image for pyxis.")
]
_OverridesFit = Annotated[
    bool, typer.Option("--override-fit", help="Write the job even if the run does not fit its GPUs.")
]
_Time = Annotated[
    str | None,
    typer.Option(help="As sbatch takes it: 90, 12:00:00, 2-12:00:00. By default from the plan, a day at most."),
]
_IsDoctor = Annotated[
    bool, typer.Option("--doctor", help="Bring the nodes up with `megarl doctor --cluster` instead of training.")
]
_SUBMIT_TIMEOUT_S = 60.0


@launch_app.command()
def slurm(
    recipe: RecipePath,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.", show_default=False)],
    overrides: Overrides = None,
    gpus_per_node: _GpusPerNode = None,
    cpus_per_node: Annotated[int | None, typer.Option(min=1, help="Whole nodes if not given.")] = None,
    gpu_request: _GpuRequest = None,
    partition: Annotated[str | None, typer.Option(help="As sbatch takes it.")] = None,
    account: Annotated[str | None, typer.Option(help="As sbatch takes it.")] = None,
    time: _Time = None,
    container: _Container = None,
    venv: Annotated[Path | None, typer.Option(metavar="DIR", help="That of this command if not given.")] = None,
    mount: Annotated[list[Path] | None, typer.Option(metavar="DIR", help="Mount it too. May be repeated.")] = None,
    env: _Environment = None,
    module: _Modules = None,
    prolog: _Prolog = None,
    max_failures: Annotated[int, typer.Option(min=0, help="Give up after this many failures of machines.")] = 3,
    is_doctor: _IsDoctor = False,
    shape: ShapeName = None,
    overrides_fit: _OverridesFit = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the script here; by default it is printed.")
    ] = None,
    is_submitted: Annotated[bool, typer.Option("--submit", help="Submit the job with sbatch.")] = False,
) -> None:
    """Write an sbatch script for a recipe.

    The job runs Ray on every node and megarl on the first, saves before its time limit, and is queued again. The recipe
    has to fit its GPUs by `megarl plan`. Model and data may be on the cluster only; the job checks them there.
    """
    if container is not None and venv is not None:
        problem = Problem(key="", message="name a --container or a --venv, not both")
        raise ConfigError("megarl launch slurm", (problem,))
    checked, sizes = _checked(recipe, overrides or [], shape=shape, overrides_fit=overrides_fit)

    from megarl.tools.launch.slurm import DOCTOR_TIME, SlurmJob, render, time_limit

    job = SlurmJob(
        recipe_path=recipe.absolute(),
        overrides=tuple(overrides or ()),
        folder=Path.cwd(),
        nodes=nodes,
        gpus_per_node=gpus_per_node or max(pool.gpus_per_node for pool in checked.pools.values()),
        cpus_per_node=cpus_per_node,
        gpu_request=gpu_request,
        partition=partition,
        account=account,
        time_limit=time or (DOCTOR_TIME if is_doctor else None if sizes is None else time_limit(sizes)),
        first_save_s=0.0 if sizes is None or sizes.limits is None else sizes.limits.first_save_s,
        container=container,
        venv=None if venv is None else venv.absolute(),
        mounts=tuple(path.absolute() for path in mount or ()),
        environment=tuple(env or ()),
        modules=tuple(module or ()),
        prolog=None if prolog is None else prolog.absolute(),
        max_failures=max_failures,
        is_doctor=is_doctor,
    )
    _deliver(render(job, checked), out, is_submitted=is_submitted)


@launch_app.command()
def kubernetes(
    recipe: RecipePath,
    nodes: Annotated[int, typer.Option(min=1, help="Number of pods with GPUs.", show_default=False)],
    image: Annotated[
        str, typer.Option(metavar="NAME@sha256:...", help="The image of megarl, by its digest.", show_default=False)
    ],
    claim: Annotated[
        str, typer.Option(help="A volume claim that all pods can write: models, data, runs.", show_default=False)
    ],
    overrides: Overrides = None,
    gpus_per_node: _GpusPerNode = None,
    mount: Annotated[Path, typer.Option(help="Where pods see the volume; relative paths start there.")] = Path(
        "/shared"
    ),
    cpus: Annotated[str, typer.Option(help="Cores of a pod with GPUs.")] = "64",
    memory: Annotated[str, typer.Option(help="Memory of a pod with GPUs.")] = "900Gi",
    resource: _Resources = None,
    env: _Environment = None,
    toleration: _Tolerations = None,
    node_selector: _Selectors = None,
    annotation: _Annotations = None,
    pull_secret: _Secrets = None,
    max_failures: Annotated[int, typer.Option(min=0, help="Give up after this many failures.")] = 3,
    shape: ShapeName = None,
    overrides_fit: _OverridesFit = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the job here; by default it is printed.")
    ] = None,
) -> None:
    """Write a job of the KubeRay operator for a recipe.

    The run has to fit its GPUs by `megarl plan`. Model and data may be on the cluster only; the job checks them there.
    """
    checked, _ = _checked(recipe, overrides or [], shape=shape, overrides_fit=overrides_fit)

    from megarl.tools.launch.kubernetes import KubernetesJob, render

    job = KubernetesJob(
        source=str(recipe),
        nodes=nodes,
        gpus_per_node=gpus_per_node or max(pool.gpus_per_node for pool in checked.pools.values()),
        image=image,
        claim=claim,
        mount=mount,
        cpus_per_node=cpus,
        memory_per_node=memory,
        max_failures=max_failures,
        resources=tuple(resource or ()),
        environment=tuple(env or ()),
        tolerations=tuple(toleration or ()),
        node_selector=tuple(node_selector or ()),
        annotations=tuple(annotation or ()),
        pull_secrets=tuple(pull_secret or ()),
    )
    rendered = render(job, checked)
    if out is None:
        print(rendered, end="")
    else:
        _write(out, rendered, mode=0o644)
        print(f"wrote {out}; start it with: kubectl apply -f {out}")


def _checked(
    path: Path, overrides: list[str], *, shape: str | None, overrides_fit: bool
) -> tuple[Recipe, Sizes | None]:
    """Return the recipe with the limits of its plan, after the checks that are possible here, and its sizes, None where
    nothing is planned; raise a ConfigError if it does not fit its GPUs."""
    recipe = read_recipe(path, overrides).recipe
    missing = [str(each) for each in (recipe.model.path, *recipe.data.train, *recipe.data.eval) if not each.exists()]
    if not missing:
        load_checked(path, overrides)
    else:
        print(f"warning: not on this machine, checked when the job starts: {', '.join(missing)}", file=sys.stderr)
    if recipe.run.device == "cpu" or overrides_fit:
        return recipe, None
    planned = answer(path, overrides, PlanQuestion(shape_name=shape))
    if not planned.plan.sizes.fits:
        ways = [" ".join(f"--set {each}" for each in proposal.assignments) for proposal in planned.proposals]
        remedy = f"fits with {' or with '.join(ways)}" if ways else "it needs more GPUs or a smaller model"
        message = f"{planned.plan.sizes.excess}; {remedy}; --override-fit writes the job anyway"
        raise ConfigError(str(path), (Problem(key=f"does not fit {planned.plan.gpu.name}", message=message),))
    return with_limits(recipe, planned.plan.sizes.limits), planned.plan.sizes


def _deliver(script: str, out: Path | None, *, is_submitted: bool) -> None:
    if out is not None:
        _write(out, script, mode=0o755)
    if is_submitted:
        print(_submit(script))
    elif out is None:
        print(script, end="")
    else:
        print(f"wrote {out}; submit it with: sbatch {out}")


def _write(path: Path, script: str, *, mode: int) -> None:
    with writing(f"--out {path}"):
        path.write_text(script)
        path.chmod(mode)


def _submit(script: str) -> str:
    program = shutil.which("sbatch")
    if program is None:
        raise MachineError("sbatch not found; run this on a machine with Slurm, or write the script with --out")
    done = subprocess.run(  # noqa: S603 - the program was looked up, the script comes by its standard input
        [program], input=script, capture_output=True, text=True, timeout=_SUBMIT_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise MachineError(f"sbatch refused the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip()
