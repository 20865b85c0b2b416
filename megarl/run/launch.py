"""The entry of a run: settles what Ray reads when it is imported. The command line calls nothing deeper."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster.local_ray import early_ray, end_left, private_ray, run_lease
from megarl.config.recipe import POLICIES_FOLDER, ClusterConfig, Recipe, RunConfig
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
from megarl.observe.events import Sink
from megarl.observe.shared import SharedObserver
from megarl.planner.fit import check_fit
from megarl.planner.hardware import GpuModel, gpu_named, gpu_of
from megarl.run.begin import PolicyInputs, begin
from megarl.run.driver_process import drive_again, exit_notice
from megarl.run.preemption import ending_on_signals
from megarl.run.preflight import check_start
from megarl.run.resume import ResumeChoice
from megarl.system.gpu_health import names_of_driver
from megarl.system.imports import uncollected
from megarl.system.lease import EarlyRay, JoinedLease, Lease, digest_program
from megarl.system.run_lock import refuse_locked, run_lock
from megarl.system.start_log import note_piece, process_began
from megarl.types import ONE_POLICY


@ending_on_signals()
def train(
    recipe: Recipe,
    *,
    display: Sink,
    display_of: Callable[[str], Sink] | None = None,
    resume: ResumeChoice = "auto",
    allows_data_change: bool = False,
    overrides_fit: bool = False,
    tasks_file: Path | None = None,
    notify: Callable[[str], None] | None = None,
) -> None:
    """Run a recipe to its end; everything it started has ended when this returns or raises.

    A run that does not fit its GPUs is refused, unless `overrides_fit`: before anything starts where the recipe names
    the GPU or this machine has it, else once Ray reports it. `display_of` returns the display of one of several
    policies; without it they are refused. A trace of Ray's tasks is written to `tasks_file`. With `notify`, the driver
    is a forked process, and another one takes over if it is killed; `notify` gets a sentence then.
    """
    if recipe.policies and display_of is None:
        message = "this trains or evaluates one; train several with the command `megarl train`"
        raise ConfigError(recipe.run.name, (Problem(key=POLICIES_FOLDER, message=message),))
    address = ray_address_of(recipe.run)
    gpu = _known_gpu(recipe.cluster, address)
    if recipe.run.device != "cpu" and gpu is not None and not overrides_fit:
        check_fit(recipe, gpu)
    refuse_nodes_without_cluster(recipe.pools, address)
    ray_environment(address, recipe.cluster)  # a missing token is refused first
    refuse_locked(recipe.run_folder)
    num_slots = sum(pool.gpus for pool in recipe.pools.values())
    with nullcontext() if address else early_ray(recipe.run, recipe.cluster, num_slots=num_slots) as early:
        # Everything that can be wrong with model, data and reward is found before an earlier run is moved.
        policies = _checked(recipe, address)
        if not recipe.policies:
            recipe = policies[ONE_POLICY].recipe
        driver = _Driver(
            recipe=recipe,
            policies=policies,
            program=_program(recipe, policies),
            display=display,
            display_of=display_of,
            address=address,
            early=early,
            allows_data_change=allows_data_change,
            asks_ray_for_gpu=recipe.run.device != "cpu" and gpu is None and not overrides_fit,
            tasks_file=tasks_file,
            check_seconds=time.time() - process_began(),
        )
        with exit_notice(recipe.run_folder):
            if notify is None or not recipe.cluster.lease_s:
                driver.drive(resume)
            else:
                driver.drive_forked(resume, notify)


def _checked(recipe: Recipe, address: str | None) -> dict[str, PolicyInputs]:
    """Return what the policies of a recipe are trained with, by their names."""
    policies = {}
    for name, each in (recipe.by_policy() or {ONE_POLICY: recipe}).items():
        inputs = check_start(each, address=address)
        complete = each.with_steps(len(inputs.train.prompts))
        policies[name] = PolicyInputs(name=name, recipe=complete, inputs=inputs)
    return policies


def _known_gpu(cluster: ClusterConfig, address: str | None) -> GpuModel | None:
    """Return the GPU that the recipe names, or the smallest of this machine for a Ray that is started here."""
    if cluster.gpu is not None:
        return gpu_of(cluster)
    named = [gpu_named(name) for name in names_of_driver()] if address is None else []
    return min((gpu for gpu in named if gpu is not None), key=lambda gpu: gpu.memory_gib, default=None)


def _program(recipe: Recipe, policies: Mapping[str, PolicyInputs]) -> str:
    """Return a digest of what running processes are made of: they keep what they have loaded of the user's code."""
    return digest_program(recipe.model_dump_json() + "".join(each.inputs.code for each in policies.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Driver:
    recipe: Recipe
    policies: Mapping[str, PolicyInputs]
    """By name."""
    program: str
    """The digest of all programs of the run when their code was loaded."""
    display: Sink
    display_of: Callable[[str], Sink] | None
    address: str | None
    early: EarlyRay | None
    """The Ray that the first driver uses, if it has started."""
    allows_data_change: bool
    asks_ray_for_gpu: bool
    tasks_file: Path | None
    check_seconds: float
    """From the start of the command until model, data and reward were checked."""

    def drive(self, resume: ResumeChoice) -> None:
        """Take the steps of the run that are left."""
        folder = self.recipe.run_folder
        with naming_disk_faults(folder), ExitStack() as stack:
            for each in dict.fromkeys((folder, *(policy.recipe.run_folder for policy in self.policies.values()))):
                stack.enter_context(run_lock(each))
            try:
                begun = begin(self.policies, resume, display=self.display, allows_data_change=self.allows_data_change)
            except FinishedError:
                end_left(folder)
                raise
            lease, environment = self._lease(is_continued=any(policy.is_continued for policy in begun))
            observers = [policy.observing(self._display(policy.name), stack) for policy in begun]
            observer = observers[0] if len(observers) == 1 else SharedObserver(observers)
            stack.enter_context(environment)
            note_piece("imports and checks", began=time.time() - self.check_seconds)

            from megarl.run.run import run_recipe  # noqa: PLC0415 - imports Ray, which reads the environment

            left = {
                policy.name: keys for policy in begun if (keys := self.recipe.policies.get(policy.name)) is not None
            }
            run_recipe(
                self.recipe.model_copy(update={"policies": left}),
                list(zip(begun, observers, strict=True)),
                observer,
                ray_address=self.address,
                lease=lease,
                asks_ray_for_gpu=self.asks_ray_for_gpu,
                tasks_file=self.tasks_file,
            )

    def drive_forked(self, resume: ResumeChoice, notify: Callable[[str], None]) -> None:
        """Take the steps in a forked process, and in another one if that is killed."""
        address, cluster = self.address, self.recipe.cluster
        with _no_ray_yet() if address is None else ray_environment(address, cluster):
            with uncollected():
                import megarl.run.run  # noqa: F401, PLC0415 - imports Ray, which reads the environment then

            leave = (lambda: None) if self.early is None else self.early.pipe.close
            drive_again(self.drive, self.recipe.run_folder, resume, auto="auto", notify=notify, leave=leave)

    def _display(self, policy: str) -> Sink:
        return self.display_of(policy) if policy and self.display_of is not None else self.display

    def _lease(self, *, is_continued: bool) -> tuple[Lease, AbstractContextManager[None]]:
        """Return the lease of the run, and the settings of its Ray."""
        folder, cluster, program = self.recipe.run_folder, self.recipe.cluster, self.program
        if self.address is None:
            private = run_lease(folder, program, cluster, is_continued=is_continued, early=self.early)
            return private, private_ray(private)
        lease = JoinedLease(folder, self.address, program=program, seconds=cluster.lease_s, is_continued=is_continued)
        return lease, ray_environment(self.address, cluster)


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
