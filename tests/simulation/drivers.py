"""One start of `megarl train` in the world: the package's own entry, with everything that it tells."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from megarl.config.recipe import Recipe
from megarl.errors import FinishedError, MegarlError
from megarl.observe.events import CheckpointSaved, Record
from megarl.observe.observer import Observer
from megarl.run import launch
from megarl.run.begin import PolicyInputs
from megarl.types import ONE_POLICY
from tests.simulation.sample_run import sample_inputs
from tests.simulation.world import Process, calling_process, current_process


@dataclass(eq=False)
class Sink:
    """Passes on the events of one driver."""

    name: str

    def record(self, record: Record) -> None:
        process = current_process()
        if isinstance(record.event, CheckpointSaved) and process is not None:
            run, disk = process.values["run"], process.values["disk"]
            run.acknowledged[disk] = max(record.event.step, run.acknowledged.get(disk, 0))
            process.world.note(f"{self.name}: saved step {record.event.step}")
        text = getattr(record.event, "text", None) or getattr(record.event, "reason", None)
        if text and process is not None:
            process.world.note(f"{self.name}: {text}")
            if text.startswith("copied step "):
                run = process.values["run"]
                run.acknowledged[None] = max(int(text.split()[2]), run.acknowledged.get(None, 0))

    def close(self) -> None:
        pass


class _NoMeter:
    """Counts nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@contextmanager
def observing_driver(*_: object, display: Sink, resumed_step: int, **__: object) -> Iterator[Observer]:
    values = calling_process().values
    if values["store"].is_sound or values["driver"].expected <= resumed_step:
        values["run"].resumed.append((display.name, values["driver"].expected, resumed_step))
    yield Observer([display], meter=cast("Any", _NoMeter()))


@dataclass(eq=False)
class Driver:
    """One start of `megarl train`."""

    process: Process
    recipe: Recipe
    outcome: str = "running"
    error: BaseException | None = None
    expected: int = 0
    """The step that it must begin from, or after."""

    def run(self) -> None:
        try:
            driver = launch._Driver(
                recipe=self.recipe,
                policies={ONE_POLICY: PolicyInputs(name=ONE_POLICY, recipe=self.recipe, inputs=sample_inputs())},
                program="program",
                display=cast("Any", Sink(self.process.name)),
                display_of=None,
                address="ray:6379",
                early=None,
                allows_data_change=False,
                asks_ray_for_gpu=False,
                tasks_file=None,
                check_seconds=0.0,
            )
            driver.drive("auto")
            self.outcome = "finished"
        except FinishedError:
            self.outcome = "finished"
        except MegarlError as error:
            self.outcome, self.error = f"exit {error.exit_code}", error
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            self.outcome, self.error = "exit 130", error
        except Exception as error:  # noqa: BLE001 - the invariants judge it
            self.outcome, self.error = "bug", error
            self.process.world.note("".join(traceback.format_exception(error)[-12:]))
        self.process.world.note(f"{self.process.name}: {self.outcome} {self.error or ''}")
        if self.outcome != "finished":
            # Its process exits: a thread that a disk holds, the lock, and actors that are not detached end with it.
            self.process.kill()
