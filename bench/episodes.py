"""CPU of a turn of an episode outside the engines: asking, checking, the call in its process, tokens, score.

As a rollout worker of a run plays them, with a class in worker processes. A server that answers at once stands for the
engine and is not counted.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
from aiohttp import web

from bench.dataplane import PlaneFigure, fleet_of
from bench.instant_engine import serving
from megarl.config.environment import ClassEnvironmentConfig
from megarl.config.model import read_model_shape
from megarl.config.roles import RolloutRoleConfig
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.engine.batches import Line
from megarl.engine.fleet import Fleet
from megarl.episodes.play import EpisodeSetup, tools_of
from megarl.observe.observer import Observer
from megarl.reward.scorer import ExactScorer
from megarl.rollout.task import RolloutTask, Sampling, Vocabulary
from megarl.rollout.worker import RolloutWorker, cache_sizes
from megarl.system.network import LOOPBACK
from megarl.tools.quickstart.calculator import SHAPE, call_text
from megarl.tools.quickstart.tiny_model import TOOL, write_config
from megarl.types import Prompt

CALCULATOR = Path(__file__).resolve().parent.parent / "examples" / "calculator.py"
_GROUP = 8
_NUM_OPEN = 8
"""Groups under way at once."""


def measure_episodes(*, num_episodes: int = 512, num_turns: int = 4) -> list[PlaneFigure]:
    """Play episodes of one call less than they have turns."""
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
        folder = Path(name)
        write_config(folder, SHAPE)
        config = ClassEnvironmentConfig(kind="class", path=CALCULATOR, call_format="llama", workers=16, max_turns=16)
        tools = [tool.as_function for tool in tools_of(config)]
        tokenizer = load_tokenizer(folder, vocab=SHAPE.vocab, tools=tools)
        said = [tokenizer.encode([text])[0].tolist() for text in (call_text((123, 456)), "579")]
        with _engine(said, tokenizer, num_turns - 1) as port:
            driver_s, workers_s, turns = asyncio.run(_play(config, tokenizer, folder, port, num_episodes))
    assert turns == num_episodes * num_turns, f"{turns} turns of {num_episodes} episodes"
    label = f"{num_episodes} episodes of {num_turns} turns"
    return [
        PlaneFigure(name=f"a turn, {label}: driver", value=1e3 * driver_s / turns, unit="ms CPU"),
        PlaneFigure(name=f"a turn, {label}: environments", value=1e3 * workers_s / turns, unit="ms CPU"),
        PlaneFigure(
            name=f"a turn, {label}: together", value=1e3 * (driver_s + workers_s) / turns, unit="ms CPU", goal=2.0
        ),
    ]


async def _play(
    config: ClassEnvironmentConfig, tokenizer: Tokenizer, folder: Path, port: int, num_episodes: int
) -> tuple[float, float, int]:
    """Return the CPU seconds of this process and of the environments, and the number of turns."""
    rollout = RolloutRoleConfig(pool="rollout")
    setup = EpisodeSetup.of(config, tokenizer, rollout, max_context_tokens=SHAPE.max_context_tokens)
    fleet = fleet_of([port], max_outstanding=256)
    worker = RolloutWorker(
        fleet,
        vocabulary=Vocabulary.of(read_model_shape(folder), tokenizer),
        scorer=ExactScorer(Observer(())),
        max_attempts=3,
        open_player=setup.opener(
            tokenizer,
            cache_sizes=partial(cache_sizes, fleet.engines),
            retried=lambda _cause: None,
            log_path=folder / "environment.log",
        ),
    )
    try:
        await _groups(worker, tokenizer, 2 * _NUM_OPEN, first=0)  # processes start, templates are compiled
        before = time.process_time(), _children_s()
        turns = await _groups(worker, tokenizer, num_episodes // _GROUP, first=2 * _NUM_OPEN)
        return time.process_time() - before[0], _children_s() - before[1], turns
    finally:
        await worker.close()
        await _close(fleet)


async def _close(fleet: Fleet) -> None:
    await fleet.close()


async def _groups(worker: RolloutWorker, tokenizer: Tokenizer, count: int, *, first: int) -> int:
    """Return the number of turns of so many groups."""
    messages = ({"role": "user", "content": "123+456="},)
    (token_ids,) = tokenizer.encode([tokenizer.render_chat(messages)])
    sampling = Sampling(num_rollouts=_GROUP, temperature=1.0, top_p=1.0, top_k=None, max_response_tokens=200)
    task = RolloutTask(sampling=sampling, seed=1)
    places = asyncio.Semaphore(_NUM_OPEN)

    async def answer(number: int) -> int:
        prompt = Prompt(
            uid=str(number),
            position=number,
            epoch=0,
            token_ids=token_ids,
            data_source="",
            ground_truth="579",
            extra_info={},
            messages=messages,
        )
        async with places:
            scored = (await worker.answer(prompt, task)).scored
        assert all(score.value == 1.0 for score in scored.scores), "an episode went wrong"
        return sum(rollout.episode.num_calls + 1 for rollout in scored.group.rollouts)

    return sum(await asyncio.gather(*(answer(first + number) for number in range(count))))


def _children_s() -> float:
    """Return the CPU seconds of the environments' processes."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        if "megarl.episodes.worker" in " ".join(process.cmdline()):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextmanager
def _engine(said: Sequence[list[int]], tokenizer: Tokenizer, num_calls: int) -> Iterator[int]:
    """Run a server in a process of its own that calls a tool so many times and then answers; yields its port."""
    (tool_id,) = tokenizer.encode([TOOL])[0].tolist()
    with serving(_serve, *said, tokenizer.eos_ids[0], tool_id, num_calls) as port:
        yield port


def _serve(call: list[int], answer: list[int], end_id: int, tool_id: int, num_calls: int, started: Connection) -> None:
    contents = [output_of([*token_ids, end_id]) for token_ids in (call, answer)]

    async def generate(request: web.Request) -> web.Response:
        lines = []
        for place, fields in enumerate(json.loads(await request.read())):
            asked = fields["input_ids"]
            output, meta = contents[asked.count(tool_id) >= num_calls]
            reply = {"output_ids": output, "meta_info": meta, "prompt_token_ids": asked}
            lines.append(Line(place=place, status_code=200, content=json.dumps(reply).encode()))
        return web.Response(body=b"".join(line.encode() for line in lines))

    async def info(_request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "0", "max_total_num_tokens": 1 << 20})

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/generate", generate)
        app.router.add_get("/server_info", info)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, LOOPBACK, 0).start()
        started.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


def output_of(token_ids: list[int]) -> tuple[list[int], dict[str, object]]:
    """Return the ids and the `meta_info` of a reply of version 0 that ended by itself."""
    arrays = {"logprobs": np.full(len(token_ids), -0.5, "<f4"), "token_ids": np.array(token_ids, "<i4")}
    entries = {name: b64encode(array.tobytes()).decode() for name, array in arrays.items()}
    spans = [{"version": "0", "start": 0, "end": len(token_ids)}]
    finish = {"type": "stop", "matched": token_ids[-1]}
    meta: dict[str, object] = {
        "finish_reason": finish,
        "weight_version": "0",
        "output_token_logprobs": entries,
        "weight_versions": spans,
    }
    return token_ids, meta
