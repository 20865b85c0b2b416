"""Environments of Harbor tasks: the model works in a box, and the task's tests grade what it left.

A failure of the machine loses the episode and is never a reward. Where tests write no reward or do not end, the same
tests run once in a box that no model has touched: if they work there, the episode has broken its own box and scores 0;
if not, the task or the machine is at fault and the score is lost.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from megarl.episodes.harbor.boxes import Box, BoxBrokenError, Boxes, CommandResult
from megarl.episodes.harbor.tasks import BoxLimits, HarborTask, read_task
from megarl.episodes.protocol import Call, Observation, Row, TokenSession, ToolSchema, Transcript
from megarl.errors import DataError, EnvironmentLostError, ScoreLostError
from megarl.system.foreign import finite32, one_line, read_json, whole_text
from megarl.types import Score

logger = logging.getLogger(__name__)

BASH = ToolSchema(
    name="bash",
    description=(
        "Run a command with bash in the task's working folder and return its output. Files and processes in the "
        "background stay; the working folder and variables do not."
    ),
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The command, of one or several lines."}},
        "required": ["command"],
    },
)
_REWARDS = "/logs/verifier"
_READ_TIMEOUT_S = 60.0
_PREPARE = f"rm -rf {_REWARDS} && mkdir -p {_REWARDS} /logs/agent /logs/artifacts"
_READ = f"cat {_REWARDS}/reward.json 2>/dev/null || cat {_REWARDS}/reward.txt"
_MAX_REWARDS = 64


class _NoRewardError(Exception):
    """The tests of a task gave no number; the message says why."""


class HarborEnvironments:
    """`Environments` of a folder of tasks; at most `max_boxes` are open at once."""

    tools = (BASH,)

    def __init__(
        self, tasks: Path, boxes: Boxes, *, defaults: BoxLimits, max_boxes: int, call_deadline_s: float
    ) -> None:
        self._tasks = tasks
        self._boxes = boxes
        self._defaults = defaults
        self._places = asyncio.Semaphore(max_boxes)
        self._call_deadline_s = call_deadline_s
        self._checked: asyncio.Task[None] | None = None
        """Whether this node can have boxes, asked once: every episode would be lost there."""
        self._known: dict[str, HarborTask] = {}
        self._works: dict[str, asyncio.Task[str | None]] = {}
        """By task: runs of its tests in an untouched box that are under way."""

    async def open(self, row: Row) -> HarborEnvironment:
        task = await self._task(row)
        if self._checked is None:
            self._checked = asyncio.create_task(self._boxes.check(self._defaults))
        await asyncio.shield(self._checked)
        await self._places.acquire()
        try:
            box = await self._boxes.open(task)
        except BaseException:
            self._places.release()
            raise
        return HarborEnvironment(self, task, box, self._call_deadline_s)

    async def close(self) -> None:
        controls = list(self._works.values())
        for control in controls:
            control.cancel()
        await asyncio.gather(*controls, return_exceptions=True)
        await self._boxes.close()

    def give_back(self) -> None:
        self._places.release()

    async def fault_of(self, task: HarborTask) -> str | None:
        """Return why a task's tests give no reward in a box that nobody has touched; None where they do."""
        if task.name not in self._works:
            control = self._works[task.name] = asyncio.create_task(self._control(task))
            # Asked again the next time: the machine may be short of something then.
            control.add_done_callback(lambda _: self._works.pop(task.name, None))
        return await asyncio.shield(self._works[task.name])

    async def _control(self, task: HarborTask) -> str | None:
        try:
            box = await self._boxes.open(task)
            try:
                await rewards_of(task, box)
            finally:
                await box.close()
        except (_NoRewardError, EnvironmentLostError, BoxBrokenError) as error:
            return str(error)
        return None

    async def _task(self, row: Row) -> HarborTask:
        extra = row.get("extra_info")
        name = extra.get("task") if isinstance(extra, Mapping) else None
        if not isinstance(name, str):
            raise DataError(
                f"row {row['uid']} names no task in extra_info.task; write rows with megarl data prepare harbor"
            )
        if name not in self._known:
            self._known[name] = await asyncio.to_thread(partial(read_task, self._tasks, name, self._defaults))
        return self._known[name]


class HarborEnvironment:
    """The box of one episode."""

    opening = None
    tools = (BASH,)

    def __init__(self, owner: HarborEnvironments, task: HarborTask, box: Box, call_deadline_s: float) -> None:
        self._owner = owner
        self._task = task
        self._box = box
        self._call_deadline_s = call_deadline_s
        self._used_s = 0.0
        self._is_open = True

    async def call(self, call: Call) -> Observation:
        if call.name != BASH.name:
            return Observation(text=f"error: there is no tool {call.name[:100]}; there is: bash", is_error=True)
        command = call.arguments.get("command")
        if not isinstance(command, str) or len(call.arguments) != 1:
            return Observation(text='error: bash takes one argument, {"command": "..."}', is_error=True)
        left = None if self._task.agent_s is None else self._task.agent_s - self._used_s
        timeout_s = self._call_deadline_s if left is None else min(self._call_deadline_s, left)
        began = time.monotonic()
        try:
            result = await self._box.run(whole_text(command), variables={}, timeout_s=timeout_s)
        except BoxBrokenError as error:
            return Observation(text=f"error: the box is broken: {error}", ended=True, is_error=True)
        self._used_s += time.monotonic() - began
        if left is not None and self._used_s >= (self._task.agent_s or 0.0):
            text = f"{_text(result)}\n[the task's time of {self._task.agent_s:g} s is used up]"
            return Observation(text=text, ended=True, is_error=True)
        return Observation(text=_text(result), is_error=result.code != 0)

    async def listener(self) -> socket.socket | None:
        """Return a socket that listens inside of the box; None where the box reaches this machine over a network."""
        return await self._box.listener()

    async def run_agent(
        self, command: str, variables: Mapping[str, str], *, wall_s: float, session: TokenSession
    ) -> None:
        """Let an agent work in the box; an EnvironmentLostError if it fails before the model has said a word."""
        timeout_s = wall_s if self._task.agent_s is None else self._task.agent_s
        try:
            result = await self._box.run(command, variables=variables, timeout_s=timeout_s)
        except BoxBrokenError as error:
            logger.info("an agent broke its box task=%s why=%s", self._task.name, error)
            return
        if result.code != 0:
            said = one_line(_text(result)[-300:])
            if session.num_sampled == 0:
                raise EnvironmentLostError(f"agent did not ask the model: {said}")
            logger.info("an agent failed task=%s why=%s", self._task.name, said)

    async def score(self, transcript: Transcript) -> Score:
        try:
            rewards = await rewards_of(self._task, self._box)
        except EnvironmentLostError as error:
            raise ScoreLostError(f"task {self._task.name}: {error}") from None
        except (_NoRewardError, BoxBrokenError) as error:
            fault = await self._owner.fault_of(self._task)
            if fault is not None:
                message = f"task {self._task.name}: its tests give no reward in a fresh box either: {fault}"
                raise ScoreLostError(message) from None
            logger.info("an episode broke its box task=%s why=%s", self._task.name, error)
            return Score(value=0.0, components={"broken_box": 1.0})
        value = rewards.get("reward", sum(rewards.values()) / len(rewards))
        return Score(value=value, components=rewards)

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            await self._box.close()
        finally:
            self._owner.give_back()


async def rewards_of(task: HarborTask, box: Box) -> dict[str, float]:
    """Run a task's tests in a box and return the rewards that they wrote; a _NoRewardError if there is none."""
    await box.put(task.tests, "/tests")
    variables = task.verifier_variables
    prepared = await box.run(_PREPARE, variables={}, timeout_s=_READ_TIMEOUT_S)
    if prepared.code != 0:
        raise _NoRewardError(f"{_REWARDS} cannot be made: {one_line(_text(prepared))}")
    ran = await box.run("bash /tests/test.sh", variables=variables, timeout_s=task.verifier_s)
    if ran.stopped is not None:
        raise _NoRewardError(f"tests/test.sh was stopped: {ran.stopped}")
    written = await box.run(_READ, variables={}, timeout_s=_READ_TIMEOUT_S)
    if written.code != 0:
        said = one_line(ran.output[-300:].strip())
        raise _NoRewardError(f"tests/test.sh wrote no reward (exit status {ran.code}): {said}")
    return read_rewards(written.output)


def read_rewards(text: str) -> dict[str, float]:
    """Return the rewards by name; a single number is `reward`."""
    try:
        # A number of reward.txt need not be one of JSON, such as `.5`.
        value = read_json(text) if "{" in text else float(text)
    except ValueError:
        raise _NoRewardError(f"the reward is neither a number nor JSON: {one_line(text)}") from None
    named: Mapping[str, object] = value if isinstance(value, dict) else {"reward": value}
    found: dict[str, float] = {}
    for name, each in named.items():
        number = None if isinstance(each, bool | str) else finite32(each)
        if number is None:
            raise _NoRewardError(f"the reward {one_line(name, max_characters=60)} is no finite number")
        found[one_line(name, max_characters=60)] = number
    if not 0 < len(found) <= _MAX_REWARDS:
        raise _NoRewardError(f"there are {len(found)} rewards; write one to {_MAX_REWARDS}")
    return found


def _text(result: CommandResult) -> str:
    """Return what the model reads of a command."""
    parts = [result.output.rstrip("\n")]
    if result.stopped is not None:
        parts.append(f"error: the command was stopped: {result.stopped}")
    elif result.code != 0:
        parts.append(f"[exit status {result.code}]")
    return "\n".join(part for part in parts if part)
