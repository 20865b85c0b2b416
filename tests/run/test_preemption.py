from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.errors import MachineError, PreemptedError, StoppedError
from megarl.run.preemption import ending_on_signals, interrupt, preemptible
from megarl.system.run_lock import run_lock
from tests.system.test_run_lock import ELSEWHERE, write


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def step(seconds: float = 0.05) -> str:
    await asyncio.sleep(seconds)
    return "finished"


def test_a_run_that_is_still_starting_leaves_at_once() -> None:
    async def main() -> None:
        with preemptible(grace_s=60):
            terminate()
            await asyncio.sleep(60)

    with pytest.raises(PreemptedError, match="before the step was saved"):
        asyncio.run(main())


@pytest.fixture(autouse=True)
def _default_signals() -> Iterator[None]:
    """Under nohup, or in the background of a script, some signals are ignored from the start."""
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupted = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, hang_up)
    signal.signal(signal.SIGINT, interrupted)


@pytest.mark.parametrize(
    ("grace_s", "numbers"),
    [
        (0.05, [signal.SIGTERM]),
        (0.05, [signal.SIGUSR1]),
        (60, [signal.SIGTERM, signal.SIGTERM]),
        (60, [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM]),
        (60, [signal.SIGTERM, signal.SIGINT]),
        (0.05, [signal.SIGHUP]),
    ],
)
def test_a_long_step_is_left_after_the_grace_or_when_terminated_twice(
    grace_s: float, numbers: list[signal.Signals]
) -> None:
    async def main() -> None:
        with preemptible(grace_s=grace_s) as preemption:
            preemption.begin_steps()
            for number in numbers:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.01)
            await step(60)

    with pytest.raises(PreemptedError) as caught:
        asyncio.run(asyncio.wait_for(main(), timeout=60))
    assert caught.value.exit_code == 75
    assert f"stopped by {numbers[0].name}" in str(caught.value)


@pytest.mark.fault("a terminal that is closed (SIGHUP)", "the step is saved, exit code 75, unless under nohup")
def test_a_closed_terminal_lets_the_step_be_saved_and_nohup_is_respected() -> None:
    async def main() -> tuple[str, str]:
        with preemptible(grace_s=60) as preemption:
            preemption.begin_steps()
            os.kill(os.getpid(), signal.SIGHUP)
            return await step(), preemption.signal_name

    assert asyncio.run(main()) == ("finished", "SIGHUP")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert asyncio.run(main()) == ("finished", "")
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.fault("a signal of the scheduler while Ray starts", "exit code 75")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("is_swallowed", [False, True])
def test_a_signal_while_ray_starts_is_a_preemption(number: signal.Signals, is_swallowed: bool) -> None:
    """The loop handles no signals while a call in it waits."""

    @contextmanager
    def opening() -> Iterator[None]:
        with suppress(PreemptedError if is_swallowed else ZeroDivisionError):  # as a library may
            os.kill(os.getpid(), number)
            time.sleep(60)
        yield

    async def main() -> None:
        with opening(), preemptible(grace_s=60):
            raise AssertionError("nothing is started any more")

    before = signal.getsignal(number)
    with pytest.raises(PreemptedError, match=f"stopped by {number.name}") as caught, ending_on_signals():
        asyncio.run(main())
    assert caught.value.exit_code == 75
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("num_before", [0, 1], ids=["finished", "preempted"])
def test_a_signal_while_everything_is_taken_down_interrupts_nothing(num_before: int) -> None:
    taken_down = []

    async def main() -> None:
        try:
            with preemptible(grace_s=60):
                for _ in range(num_before):
                    terminate()
                    await asyncio.sleep(60)
        finally:
            terminate()
            taken_down.append(True)

    with pytest.raises(PreemptedError) if num_before else nullcontext(), ending_on_signals():
        asyncio.run(main())
    assert taken_down == [True]


@pytest.mark.fault("a driver that was frozen until another took over, in a step", "it is cancelled at once")
def test_a_driver_that_lost_its_run_is_cancelled_in_the_middle_of_a_step(tmp_path: Path) -> None:
    folder, calls = tmp_path / "run", []

    async def main() -> None:
        with preemptible(grace_s=3600, run_folder=folder) as preemption:
            preemption.begin_steps()
            write(folder, replace(ELSEWHERE, token=99))
            while True:
                calls.append(await step())

    began = time.monotonic()
    with pytest.raises(MachineError, match="process 12 on node7 has taken over"), run_lock(folder, beat_s=0.1):
        asyncio.run(main())
    assert time.monotonic() - began < 60
    assert len(calls) < 1000


def test_early_warnings_do_not_hurry() -> None:
    async def main() -> tuple[str, str]:
        with preemptible(grace_s=60) as preemption:
            preemption.begin_steps()
            for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
                os.kill(os.getpid(), number)
            await asyncio.wait_for(preemption.requested.wait(), timeout=60)
            return await step(), preemption.signal_name

    assert asyncio.run(main()) == ("finished", "SIGUSR1")


def test_taking_down_is_not_interrupted_by_more_signals() -> None:
    taken_down = []

    async def main() -> None:
        with preemptible(grace_s=60):
            try:
                terminate()
                await asyncio.sleep(60)
            finally:
                terminate()
                await asyncio.sleep(0.05)
                taken_down.append(True)

    with pytest.raises(PreemptedError):
        asyncio.run(main())
    assert taken_down == [True]


def test_ctrl_c_is_not_a_preemption() -> None:
    async def main() -> None:
        with preemptible(grace_s=60) as preemption:
            preemption.begin_steps()
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(1)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


def test_the_first_ctrl_c_asks_and_the_second_ends() -> None:
    async def main(times: int) -> str:
        with preemptible(grace_s=60) as preemption:
            preemption.begin_steps()
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                # Not `wait_for`: in Python 3.11 it loses a cancellation that comes when its wait is over.
                await preemption.requested.wait()
                await asyncio.sleep(0.01)
            assert preemption.signal_name == "SIGINT"
            return await step(0.05 if times == 1 else 60)

    assert asyncio.run(main(1)) == "finished"
    began = time.monotonic()
    with pytest.raises(StoppedError, match="stopped by Ctrl-C before the step was saved; the same command") as caught:
        asyncio.run(main(2))
    assert time.monotonic() - began < 30, "the step was not left"
    assert caught.value.exit_code == 130


def test_a_run_in_another_thread_is_stopped_by_a_call() -> None:
    """A notebook runs it so: Python handles no signals outside the main thread."""
    ready = threading.Event()

    async def main() -> str:
        with preemptible(grace_s=60) as preemption:
            preemption.begin_steps()
            ready.set()
            await asyncio.wait_for(preemption.requested.wait(), timeout=60)
            return str(preemption.error("after step 3: saved"))

    assert not interrupt()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, main())
        assert ready.wait(60)
        assert interrupt()
        assert running.result(60).startswith("stopped by Ctrl-C after step 3: saved; the same command goes on")
    assert not interrupt()
