"""Agents inside of boxes: a program of the box asks the model, and the task's tests grade what it left."""

from __future__ import annotations

import shlex

from megarl.episodes.chat_endpoint import ChatEndpoint
from megarl.episodes.harbor.environments import HarborEnvironments
from megarl.episodes.protocol import Row, TokenSession, Transcript
from megarl.types import Ending, Score

_TRANSCRIPT = Transcript(prompt=(), messages=(), ending=Ending.ANSWERED.value)
"""Tests look at the box alone."""


class BoxAgents:
    """`Agents` of one command line."""

    def __init__(
        self, command: str, environments: HarborEnvironments, endpoint: ChatEndpoint, *, wall_s: float
    ) -> None:
        self._command = command
        self._environments = environments
        self._endpoint = endpoint
        self._wall_s = wall_s

    async def run(self, row: Row, session: TokenSession) -> Score:
        environment = await self._environments.open(row)
        try:
            # The pipe also keeps the agent from the rest of the script, which some boxes read from the same input.
            command = f"printf %s {shlex.quote(str(row['prompt']))} | (\n{self._command}\n)"
            async with self._endpoint.episode(session, listener=await environment.listener()) as access:
                await environment.run_agent(command, access.variables, wall_s=self._wall_s, session=session)
            return await environment.score(_TRANSCRIPT)
        finally:
            await environment.close()

    async def close(self) -> None:
        await self._environments.close()
        await self._endpoint.close()
