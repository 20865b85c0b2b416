"""Engines in the world: the package's own fleet, supervisor and generator, with servers that die, freeze and lie.

A token is a function of the weights, the seed and its place: whatever happens to engines, a group has the same tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp

from megarl.engine.client import EngineClient, EngineEndpoint, EngineKeys
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.http import HttpReply
from megarl.engine.lifecycle import RestartPolicy
from megarl.errors import MachineError, MegarlError, QuarantineError
from megarl.rollout.generator import FleetGenerator, sampling_seed
from megarl.rollout.task import Sampling, Vocabulary
from megarl.serving.processes import Engines
from megarl.serving.supervisor import Supervisor
from megarl.types import PolicyVersion, RolloutGroup
from tests.engine.engines import one_by_one
from tests.simulation import hostile
from tests.simulation.seams import clocks_of
from tests.simulation.world import Process, StuckError, World, WorldLoop
from tests.values import make_prompt

_EOS, _VOCAB, _MAX_TOKENS = 0, 64, 12
_TOKEN_S = 0.2
_SILENCE_S = 6.0
_STEPS, _PROMPTS = 4, 4
_LIMIT_S = 2000.0
_POLICY = RestartPolicy(max_restarts=50, back_off_s=1.0, silence_timeout_s=_SILENCE_S, start_timeout_s=30.0)


def token_at(version: int, seed: int, place: int) -> int:
    digest = hashlib.blake2b(f"{version} {seed} {place}".encode(), digest_size=2).digest()
    return digest[0] % _VOCAB if digest[1] % 8 else _EOS


def response_of(version: int, seed: int, num_given: int, max_tokens: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < max_tokens and (not tokens or tokens[-1] != _EOS):
        tokens.append(token_at(version, seed, num_given + len(tokens)))
    return tokens


@dataclass(eq=False)
class Server:
    """One start of an engine."""

    scene: Scene
    index: int
    version: int = 0
    is_frozen: bool = False
    ended: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    aborted: set[str] = field(default_factory=set)
    _pauses: list[asyncio.Future[None]] = field(default_factory=list)

    async def answer(self, path: str, body: dict[str, Any]) -> HttpReply:
        while self.is_frozen:
            await self._pause(None)
        if self.ended.done():
            raise aiohttp.ClientConnectionError("refused")
        if path == "/generate":
            return await self._generate(body)
        if path == "/abort_request":
            self.aborted.add(str(body.get("rid")))
            self._wake()
        return _reply({"weight_version": str(self.version)})

    def freeze(self, *, is_frozen: bool) -> None:
        self.is_frozen = is_frozen
        self._wake()

    def end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
        self._wake()

    async def _pause(self, seconds: float | None) -> None:
        """Wait until something happens to the server, at most for so long."""
        loop = asyncio.get_running_loop()
        pause = loop.create_future()
        self._pauses.append(pause)
        timer = None if seconds is None else loop.call_later(seconds, _resolve, pause)
        try:
            await pause
        finally:
            self._pauses.remove(pause)
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        for pause in self._pauses:
            _resolve(pause)

    async def _generate(self, body: dict[str, Any]) -> HttpReply:
        sampling, given = body["sampling_params"], len(body["input_ids"])
        version, seed = self.version, sampling["sampling_seed"]
        whole = response_of(version, seed, given, sampling["max_new_tokens"])
        tokens = await self._decoded(whole, body["rid"])
        if self.scene.chance.random() < 0.04:
            return self.scene.nonsense(tokens, version)
        is_cut = len(tokens) < len(whole)
        kind = "abort" if is_cut else "stop" if whole[-1] == _EOS else "length"
        return _reply(_generated(tokens, version, kind))

    async def _decoded(self, whole: list[int], rid: str) -> list[int]:
        """Take the time of all tokens; return those that there are when the request is aborted."""
        clock, pace_s = asyncio.get_running_loop().time, _TOKEN_S * (0.5 + self.scene.chance.random())
        left_s = pace_s * len(whole)
        while left_s > _TOKEN_S / 1000 and rid not in self.aborted:
            began, counts = clock(), not self.is_frozen
            await self._pause(left_s if counts else None)
            left_s -= clock() - began if counts else 0.0
            if self.ended.done():
                raise aiohttp.ServerDisconnectedError
        return whole[: len(whole) - math.ceil(left_s / pace_s)] if rid in self.aborted else whole


def _resolve(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)


def _generated(tokens: list[int], version: object, kind: str) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": kind},
        "weight_version": str(version),
        "output_token_logprobs": [[-1.0, token, None] for token in tokens],
    }
    return {"output_ids": tokens, "meta_info": meta}


def _reply(content: object) -> HttpReply:
    return HttpReply(status_code=200, content=json.dumps(content).encode())


class SimulatedEngines(Engines):
    """The processes of all engines."""

    def __init__(self, scene: Scene, num_engines: int) -> None:
        self._scene = scene
        self.servers = [Server(scene, index) for index in range(num_engines)]

    async def start(self, index: int) -> EngineEndpoint:
        await asyncio.sleep(3.0 * self._scene.chance.random())
        if self._scene.chance.random() < 0.1:
            raise MachineError(f"engine {index}: out of memory")
        self.servers[index] = Server(self._scene, index)
        return self.client(index).endpoint

    def has_nodes(self, index: int) -> bool:
        return True

    async def wait_end(self, index: int) -> str:
        return str(await asyncio.shield(self.servers[index].ended))

    async def end(self, index: int) -> None:
        self.servers[index].end("ended")

    def client(self, index: int) -> EngineClient:
        async def send(_method: str, url: str, _headers: Mapping[str, str], content: bytes | None) -> HttpReply:
            await asyncio.sleep(0.01)
            path = "/" + url.split("/", 3)[3]
            return await self.servers[index].answer(path, json.loads(content) if content else {})

        endpoint = EngineEndpoint(
            index=index,
            host="sim",
            port=30000 + index,
            tensor=1,
            device="cpu",
            keys=EngineKeys(api="api-key", admin="admin-key"),
        )
        return EngineClient(endpoint, request_timeout_s=20.0, send=one_by_one(send))


@dataclass(eq=False)
class Scene:
    """A fleet with its steps: prompts, answers, a publish."""

    seed: int
    chance: random.Random = field(init=False)
    broken: list[str] = field(default_factory=list)
    num_nonsense: int = 0
    num_accidents: int = 0
    log: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def nonsense(self, tokens: list[int], version: int) -> HttpReply:
        """Return a reply of an engine that is broken."""
        self.num_nonsense += 1
        good = _generated(tokens, version, "stop")
        kind = self.chance.randrange(6)
        if kind == 0:
            content = hostile.text(self.chance).encode(errors="replace")
            return HttpReply(status_code=self.chance.choice((200, 500)), content=content)
        if kind == 1:
            good["output_ids"] = [10**12, *tokens]
        elif kind == 2:
            good["meta_info"]["output_token_logprobs"] = [[hostile.number(self.chance), 1, None] for _ in tokens]
        elif kind == 3:
            good["meta_info"]["weight_version"] = str(version + 1)
        elif kind == 4:
            good["meta_info"] = hostile.value(self.chance)
        else:
            good["meta_info"]["finish_reason"] = {"type": hostile.text(self.chance)}
        return _reply(good)

    async def play(self) -> None:
        engines = SimulatedEngines(self, 1 + self.chance.randrange(4))
        fleet = Fleet(
            [engines.client(index) for index in range(len(engines.servers))],
            max_outstanding=8,
            publish_timeout_s=200.0,
            policy=_POLICY,
        )
        self._fleet, self._engines = fleet, engines
        fleet.listen(lambda engine, _: self._note(f"engine {engine.index} is {engine.state}: {engine.reason}"))
        await fleet.committed(PolicyVersion(0), fleet.engines)
        supervisor = Supervisor(fleet, engines, connect=lambda endpoint: engines.client(endpoint.index))
        supervisor.attach(self._catch_up)
        vocabulary = Vocabulary(size=_VOCAB, eos_ids=(_EOS,), max_context_tokens=512, decode=lambda _ids: "")
        sampling = Sampling(num_rollouts=2, temperature=1.0, top_p=1.0, top_k=None, max_response_tokens=_MAX_TOKENS)
        generator = FleetGenerator(fleet, sampling=sampling, vocabulary=vocabulary, seed=1, max_attempts=4)
        async with supervisor.running():
            disturbing = asyncio.create_task(self._disturb())
            for version in range(_STEPS):
                await asyncio.gather(*(self._group(generator, version, number) for number in range(_PROMPTS)))
                await self._publish(version + 1)
            disturbing.cancel()
            await self._recover()
        await fleet.close()

    async def _group(self, generator: FleetGenerator, version: int, number: int) -> None:
        prompt = make_prompt(number, token_ids=[1, number + 1])
        try:
            group = await generator.generate(prompt)
        except QuarantineError:
            if self.num_accidents + self.num_nonsense < 2:
                self.broken.append(f"an answer is retried: prompt {number} is given up after {self.num_accidents}")
            return
        self._note(f"prompt {number} is answered")
        self._compare(group, version)

    def _note(self, text: str) -> None:
        self.log.append((asyncio.get_running_loop().time(), text))

    def _compare(self, group: RolloutGroup, version: int) -> None:
        for index, rollout in enumerate(group.rollouts):
            seed = sampling_seed(1, group.prompt.uid, epoch=0, index=index)
            wanted = response_of(version, seed, len(group.prompt.token_ids), _MAX_TOKENS)
            if rollout.token_ids.tolist() != wanted or set(rollout.versions.tolist()) != {version}:
                self.broken.append(f"tokens follow from weights and seed: {rollout.token_ids.tolist()}, not {wanted}")

    async def _catch_up(self, engine: Engine) -> bool:
        await asyncio.sleep(1.0)
        server = self._engines.servers[engine.index]
        if server.ended.done() or server.is_frozen:
            return False
        server.version = int(self._fleet.committed_version())
        await self._fleet.joined(engine)
        return True

    async def _publish(self, version: int) -> None:
        """Send a version to the engines that can be reached; the others catch up later."""
        reached = []
        for engine in await self._fleet.any_reachable():
            server = self._engines.servers[engine.index]
            if not server.ended.done() and not server.is_frozen:
                server.version = version
                reached.append(engine)
        if not reached:
            await asyncio.sleep(1.0)
            await self._publish(version)
            return
        await self._fleet.committed(PolicyVersion(version), reached)

    async def _disturb(self) -> None:
        while True:
            await asyncio.sleep(self.chance.uniform(2.0, 12.0))
            server = self.chance.choice(self._engines.servers)
            if server.ended.done():
                continue
            self.num_accidents += 1
            if self.chance.random() < 0.5:
                server.end("exited with SIGKILL")
            else:
                server.freeze(is_frozen=True)
                thaw = partial(server.freeze, is_frozen=False)
                asyncio.get_running_loop().call_later(self.chance.choice((1.0, 4.0, 20.0)), thaw)

    async def _recover(self) -> None:
        """Wait until every engine serves again: nothing happens to them any more."""
        try:
            async with asyncio.timeout(600.0):
                while not all(engine.is_live for engine in self._fleet.engines):
                    await asyncio.sleep(1.0)
        except TimeoutError:
            states = [f"{engine.index} {engine.state}: {engine.reason}" for engine in self._fleet.engines]
            self.broken.append(f"progress: engines do not come back: {states}")


def run_scene(seed: int) -> Scene:
    """Return a fleet's history with what it broke."""
    scene = Scene(seed)
    play_alone(seed, "driver", scene.play, survives="a fleet survives", broken=scene.broken)
    return scene


def play_alone(
    seed: int, name: str, play: Callable[[], Coroutine[Any, Any, None]], *, survives: str, broken: list[str]
) -> None:
    """Play in the only process of a world, with a fleet's clock; add what it broke."""
    world = World(seed, limit_s=_LIMIT_S)
    process = Process(world, name, host=name)

    def work() -> None:
        try:
            WorldLoop(process).run(play)
        except MegarlError as error:
            broken.append(f"{survives}: {type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - what a user would see as exit code 70
            broken.append(f"no exit 70: {type(error).__name__}: {error}")

    process.spawn(work)
    (clock,) = clocks_of(Fleet.__init__)
    with clock:
        try:
            world.run()
        except StuckError as error:
            broken.append(f"every wait ends: {error}")
