"""The entry of a run: settles what Ray reads when it is imported. The command line calls nothing deeper."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from megarl.checkpoint.mirror import claim_mirror, refuse_occupied
from megarl.checkpoint.resume import ResumePoint
from megarl.cluster.local_ray import end_left, private_ray, run_lease
from megarl.config.recipe import ClusterConfig, Recipe, RunConfig
from megarl.config.roles import PoolConfig
from megarl.env import (
    LOCAL_RAY_ENVIRONMENT,
    NO_TOKEN_ENVIRONMENT,
    RAY_ADDRESS,
    RAY_AUTH_TOKEN,
    RAY_AUTH_TOKEN_PATH,
    RAY_ENVIRONMENT,
    update_environment,
)
from megarl.errors import ConfigError, FinishedError, MachineError, Problem, naming_disk_faults
from megarl.observe.events import Noted, Record, Sink
from megarl.observe.observing import observing
from megarl.planner.fit import check_fit
from megarl.planner.hardware import GpuModel, gpu_named, gpu_of
from megarl.run.driver_process import drive_again, exit_notice
from megarl.run.inputs import Inputs
from megarl.run.preemption import ending_on_signals
from megarl.run.preflight import check_start
from megarl.run.resume import ResumeChoice, checked_resume_point, choose, is_of_run
from megarl.system.gpu_health import names_of_driver
from megarl.system.lease import JoinedLease, Lease
from megarl.system.run_lock import refuse_locked, run_lock
from megarl.system.start_log import note_piece, process_began


@ending_on_signals()
def train(
    recipe: Recipe,
    *,
    display: Sink,
    resume: ResumeChoice = "auto",
    allows_data_change: bool = False,
    overrides_fit: bool = False,
    tasks_file: Path | None = None,
    notify: Callable[[str], None] | None = None,
) -> None:
    """Run a recipe to its end; everything it started has ended when this returns or raises.

    A run that does not fit its GPUs is refused, unless `overrides_fit`: before anything starts where the recipe names
    the GPU or this machine has it, else once Ray reports it. A trace of Ray's tasks is written to `tasks_file`. With
    `notify`, the driver is a forked process, and another one takes over if it is killed; `notify` gets a sentence then.
    """
    address = ray_address_of(recipe.run)
    gpu = _known_gpu(recipe.cluster, address)
    if recipe.run.device != "cpu" and gpu is not None and not overrides_fit:
        check_fit(recipe, gpu)
    refuse_nodes_without_cluster(recipe.pools, address)
    ray_environment(address, recipe.cluster)  # a missing token is refused first
    refuse_locked(recipe.run_folder)
    # Everything that can be wrong with model, data and reward is found before an earlier run is moved.
    inputs = check_start(recipe, address=address)
    recipe = recipe.with_steps(len(inputs.train.prompts))
    driver = _Driver(
        recipe=recipe,
        inputs=inputs,
        program=inputs.program_digest(recipe.model_dump_json()),
        display=display,
        address=address,
        allows_data_change=allows_data_change,
        asks_ray_for_gpu=recipe.run.device != "cpu" and gpu is None and not overrides_fit,
        tasks_file=tasks_file,
        check_seconds=time.time() - process_began(),
    )
    with exit_notice(recipe.run_folder):
        if notify is None or not recipe.cluster.lease_s:
            driver.drive(resume)
            return
        with _no_ray_yet() if address is None else ray_environment(address, recipe.cluster):
            import megarl.run.run  # noqa: F401, PLC0415 - imports Ray, which reads the environment then

            drive_again(driver.drive, recipe.run_folder, resume, auto="auto", notify=notify)


def _known_gpu(cluster: ClusterConfig, address: str | None) -> GpuModel | None:
    """Return the GPU that the recipe names, or the smallest of this machine for a Ray that is started here."""
    if cluster.gpu is not None:
        return gpu_of(cluster)
    named = [gpu_named(name) for name in names_of_driver()] if address is None else []
    return min((gpu for gpu in named if gpu is not None), key=lambda gpu: gpu.memory_gib, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Driver:
    recipe: Recipe
    inputs: Inputs
    program: str
    """`Inputs.program_digest` of the run when its code was loaded."""
    display: Sink
    address: str | None
    allows_data_change: bool
    asks_ray_for_gpu: bool
    tasks_file: Path | None
    check_seconds: float
    """From the start of the command until model, data and reward were checked."""

    def drive(self, resume: ResumeChoice) -> None:
        """Take the steps of the run that are left."""
        recipe, inputs = self.recipe, self.inputs
        with naming_disk_faults(recipe.run_folder), run_lock(recipe.run_folder):
            notify = _notify_on(self.display)
            try:
                decision, tools = choose(recipe, resume, notify=notify), inputs.tools_digest
            except FinishedError:
                end_left(recipe.run_folder)
                raise
            allows = self.allows_data_change
            check = partial(checked_resume_point, model=recipe.model, inputs=inputs, allows_data_change=allows)
            notes = [*decision.notes]
            point = decision.point and check(decision.point, warn=notes.append)
            is_continued = point is not None and is_of_run(point, recipe.run_folder)
            claim = self._claim(is_continued=is_continued, warn=notes.append)
            lease, environment = self._lease(is_continued=is_continued)
            resumed_step = 0 if point is None else point.step
            started = observing(
                recipe, display=self.display, resumed_step=resumed_step, is_continued=is_continued, tools_digest=tools
            )
            with started as observer, environment:
                note_piece("imports and checks", began=time.time() - self.check_seconds)
                for note in notes:
                    observer.warned(note)

                def choose_earlier(damaged: Collection[Path]) -> ResumePoint | None:
                    earlier = choose(recipe, resume, damaged=damaged, notify=notify).point
                    return earlier and check(earlier, warn=observer.warned)

                from megarl.run.run import run_recipe  # noqa: PLC0415 - imports Ray, which reads the environment

                run_recipe(
                    recipe,
                    inputs,
                    observer,
                    ray_address=self.address,
                    lease=lease,
                    resume=point,
                    choose_earlier=choose_earlier,
                    mirror_claim=claim,
                    asks_ray_for_gpu=self.asks_ray_for_gpu,
                    tasks_file=self.tasks_file,
                )

    def _claim(self, *, is_continued: bool, warn: Callable[[str], None]) -> str | None:
        """Make this driver the owner of the run's mirror; refuse one with checkpoints of another run."""
        mirror, folder = self.recipe.checkpoint.mirror, self.recipe.run_folder
        if mirror is None:
            return None
        if not is_continued:
            refuse_occupied(mirror, folder.name)
        claim, problem = claim_mirror(mirror, folder)
        if problem:
            warn(f"checkpoint.mirror {mirror.url} cannot be claimed now, and is when it can be reached: {problem}")
        return claim

    def _lease(self, *, is_continued: bool) -> tuple[Lease, AbstractContextManager[None]]:
        """Return the lease of the run, and the settings of its Ray."""
        folder, cluster, program = self.recipe.run_folder, self.recipe.cluster, self.program
        if self.address is None:
            private = run_lease(folder, program, cluster, is_continued=is_continued)
            return private, private_ray(private)
        lease = JoinedLease(folder, self.address, program=program, seconds=cluster.lease_s, is_continued=is_continued)
        return lease, ray_environment(self.address, cluster)


def _notify_on(display: Sink) -> Callable[[str], None]:
    """Return what shows a line before the run has an observer: fetching a checkpoint takes long."""
    return lambda text: display.record(Record(sequence=0, time=datetime.now(UTC), event=Noted(text=text)))


def ray_address_of(run: RunConfig) -> str | None:
    """The Ray cluster to join; None starts a private one."""
    return run.ray_address or RAY_ADDRESS.read() or None


def refuse_nodes_without_cluster(pools: Mapping[str, PoolConfig], address: str | None) -> None:
    """Raise ConfigError for pools of several nodes where there is no Ray cluster to join."""
    wide = [f"pools.{name}" for name, pool in pools.items() if pool.nodes > 1]
    if address is None and wide:
        message = (
            "several nodes need a Ray cluster, and a private Ray is this machine alone: "
            "name a cluster (RAY_ADDRESS or run.ray_address), or try the recipe here with `megarl rehearse`"
        )
        raise ConfigError("recipe", tuple(Problem(key=f"{key}.nodes", message=message) for key in wide))


def ray_environment(address: str | None, cluster: ClusterConfig) -> AbstractContextManager[None]:
    """Return the settings for the Ray at `address`, or for a private one; a missing token is refused here.

    Ray reads them when it is first imported.
    """
    if address is None:
        return private_ray()
    return joined_ray(has_token=find_token(allows_none=cluster.allows_no_token))


def find_token(*, allows_none: bool) -> bool:
    """Return whether there is a token for a running cluster; raise MachineError where one is needed and missing."""
    named = RAY_AUTH_TOKEN_PATH.read()
    path = Path(named).expanduser() if named else Path.home() / ".ray" / "auth_token"
    if not named and RAY_AUTH_TOKEN.read():
        return True
    try:
        if path.read_text().strip():
            return True
        reason = "is empty"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    if named:
        raise MachineError(
            f"RAY_AUTH_TOKEN_PATH: {path} {reason}; copy the token file of the cluster's head there, mode 600"
        )
    if not allows_none:
        raise MachineError(
            "no token for the Ray cluster: name the file with it in RAY_AUTH_TOKEN_PATH, or set "
            "cluster.allows_no_token: true for a cluster that was started without one"
        )
    return False


@contextmanager
def joined_ray(*, has_token: bool = True) -> Iterator[None]:
    """Set the environment for a running Ray cluster."""
    update_environment({**RAY_ENVIRONMENT, **({} if has_token else NO_TOKEN_ENVIRONMENT)})
    yield


@contextmanager
def _no_ray_yet() -> Iterator[None]:
    """Set what every private Ray has in common: each driver starts its own."""
    update_environment({**RAY_ENVIRONMENT, **LOCAL_RAY_ENVIRONMENT})
    yield
