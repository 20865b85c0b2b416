"""Cost of a step's tokens outside the engines: asking, reading, checking, decoding and buffering them.

Engines are replaced by a server that answers at once with replies of the real shape. CPU time of this process is
measured, not of the server. The comparison is with the way replies were read before: JSON lists of Python numbers,
checked one by one, and the tokenizer's own decoder.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from bench.instant_engine import instant_engine, reply_content
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.engine.client import EngineClient, EngineEndpoint, EngineKeys
from megarl.engine.fleet import Fleet
from megarl.engine.reply import Expectation, read_response
from megarl.env import NO_COLOR
from megarl.rollout.generator import FleetGenerator
from megarl.rollout.task import Sampling, Vocabulary
from megarl.run.buffer import Buffer
from megarl.system.network import LOOPBACK
from megarl.tokens import Content
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from megarl.types import (
    DEMONSTRATION,
    FinishReason,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    ScoredGroup,
    TokenArray,
)

_WIDTH = 110
VOCAB = TinyShape().vocab
_REQUEST_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The sizes of the measurement."""

    num_tokens: int = 8192
    """Tokens per response."""
    num_prompts: int = 32
    num_step_prompts: int = 1024
    """Prompts of the step that is measured with rollout workers."""
    num_rollouts: int = 16
    """Rollouts per prompt."""
    num_engines: int = 1000
    num_requests: int = 16_000
    """Requests that are under way at once; as many as `num_open` per engine are sent, the others wait."""
    num_open: int = 4
    delay_s: float = 10.0
    """Time of an answer in the measurement with many requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneFigure:
    name: str
    value: float
    unit: str
    goal: float | None = None
    """The largest value allowed."""
    before: float | None = None
    """The same work as it was done before."""

    @property
    def is_missed(self) -> bool:
        return self.goal is not None and self.value > self.goal


def measure_dataplane(load: Load, *, repeats: int = 5) -> list[PlaneFigure]:
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
        write_tiny_model(Path(folder), TinyShape(), seed=1)
        tokenizer = load_tokenizer(Path(folder), vocab=VOCAB)
        return [
            *_reading(load, repeats=repeats),
            _decoding(load, tokenizer, Path(folder), repeats=repeats),
            *_generating(load, tokenizer),
            _leasing(load),
            _buffering(1024),
            *_many_requests(load, tokenizer),
        ]


def _reading(load: Load, *, repeats: int) -> list[PlaneFigure]:
    expected = Expectation(
        vocab=VOCAB,
        max_response_tokens=load.num_tokens,
        eos_ids=frozenset({2}),
        version=PolicyVersion(0),
        newest_version=PolicyVersion(0),
    )
    flat, listed = (reply_content(load.num_tokens, vocab=VOCAB, is_flat=is_flat) for is_flat in (True, False))
    before = _best(lambda: read_as_before(listed, VOCAB), repeats)
    per_token = 1e6 / load.num_tokens
    return [
        PlaneFigure(
            name=f"read and check a reply of {load.num_tokens} tokens, {kind}",
            value=_best(lambda content=content: read_response(content, expected), repeats) * per_token,  # type: ignore[misc]
            unit="us/token",
            goal=goal,
            before=before * per_token,
        )
        for kind, content, goal in (("arrays", flat, 0.15), ("lists (a server without the hook)", listed, None))
    ]


def read_as_before(content: bytes, vocab: int) -> tuple[TokenArray, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """Read a reply as lists of Python numbers, with the checks that were made on them."""
    reply = json.loads(content)
    token_ids, entries = reply["output_ids"], reply["meta_info"]["output_token_logprobs"]
    assert not set(map(type, token_ids)) - {int}
    assert 0 <= min(token_ids) <= max(token_ids) < vocab
    assert len(entries) == len(token_ids)
    pairs = [entry[:2] for entry in entries if isinstance(entry, list)]
    values = [pair[0] for pair in pairs if pair]
    assert [pair[-1] for pair in pairs if pair] == token_ids
    assert not set(map(type, values)) - {float, int}
    logprobs = np.array(values, dtype=np.float64)
    assert np.isfinite(logprobs).all()
    assert frozenset({2}).isdisjoint(token_ids[:-1])
    return np.array(token_ids, dtype=np.int32), logprobs.astype(np.float32)


def _decoding(load: Load, tokenizer: Tokenizer, folder: Path, *, repeats: int) -> PlaneFigure:
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    token_ids = np.random.default_rng(0).integers(3, VOCAB, load.num_tokens, dtype=np.int32)
    per_token = 1e6 / load.num_tokens
    before = _best(lambda: inner.decode(token_ids.tolist(), skip_special_tokens=False), repeats)
    return PlaneFigure(
        name="decode its text (tokenizer of the quickstart)",
        value=_best(lambda: tokenizer.decode(token_ids), repeats) * per_token,
        unit="us/token",
        before=before * per_token,
    )


def _generating(load: Load, tokenizer: Tokenizer) -> list[PlaneFigure]:
    """Measure whole groups: HTTP, checks, arrays, text."""
    content = reply_content(load.num_tokens, vocab=VOCAB, is_flat=True)
    with instant_engine(content, num_ports=8) as ports:
        seconds, num_bytes = asyncio.run(_generate(load, tokenizer, ports))
    num_tokens = load.num_prompts * load.num_rollouts * load.num_tokens
    return [
        PlaneFigure(
            name=f"{load.num_prompts} x {load.num_rollouts} rollouts from HTTP to arrays and text, this process",
            value=seconds * 1e6 / num_tokens,
            unit="us/token",
            goal=0.25,
        ),
        # 1,024 x 16 rollouts of 8,192 tokens in 2 GB.
        PlaneFigure(
            name="memory of these groups", value=num_bytes / num_tokens, unit="bytes/token", goal=2e9 / (1 << 27)
        ),
    ]


async def _generate(load: Load, tokenizer: Tokenizer, ports: Sequence[int]) -> tuple[float, int]:
    """Return CPU seconds, and the bytes by which the groups make this process larger."""
    async with AsyncExitStack() as stack:
        fleet = fleet_of(ports, max_outstanding=16)
        stack.push_async_callback(fleet.close)
        generator = _generator(tokenizer, fleet, num_rollouts=load.num_rollouts, num_tokens=load.num_tokens)
        await generator.generate(prompt_at(-1))
        gc.collect()
        bytes_before = resident_bytes()
        began = time.process_time()
        groups = await asyncio.gather(*(generator.generate(prompt_at(place)) for place in range(load.num_prompts)))
        seconds = time.process_time() - began
        gc.collect()
        num_bytes = resident_bytes() - bytes_before
        assert len(groups) == load.num_prompts, "they are alive until here"
        return seconds, num_bytes


def resident_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * resource.getpagesize()


def _leasing(load: Load) -> PlaneFigure:
    """Measure a lease in a large fleet whose engines are all busy."""
    num_leases = 20_000

    async def lease() -> float:
        fleet = fleet_of([1] * load.num_engines, max_outstanding=128)
        async with AsyncExitStack() as stack:
            for _ in range(20 * load.num_engines):
                await stack.enter_async_context(fleet.lease())
            began = time.process_time()
            for place in range(num_leases):
                async with fleet.lease(prefixes=[str(place // 16)]):
                    pass
            seconds = time.process_time() - began
        await fleet.close()
        return seconds

    return PlaneFigure(
        name=f"lease one of {load.num_engines} engines", value=asyncio.run(lease()) * 1e6 / num_leases, unit="us"
    )


def _buffering(num_prompts: int) -> PlaneFigure:
    """Measure admitting and handing over all prompts of a step."""

    async def step() -> float:
        buffer = Buffer(prompts_per_step=num_prompts, max_staleness=0)

        async def produce() -> None:
            while True:
                ticket = await buffer.reserve()
                await asyncio.sleep(0)
                await buffer.put(ticket, _GROUP)

        producers = [asyncio.create_task(produce()) for _ in range(buffer.capacity)]
        began = time.process_time()
        await buffer.take_step()
        seconds = time.process_time() - began
        for producer in producers:
            producer.cancel()
        await asyncio.gather(*producers, return_exceptions=True)
        return seconds

    return PlaneFigure(
        name=f"buffer a step of {num_prompts} prompts", value=asyncio.run(step()) * 1e3, unit="ms", goal=200.0
    )


def _many_requests(load: Load, tokenizer: Tokenizer) -> list[PlaneFigure]:
    """Measure a large fleet that answers slowly: most requests wait here, the others have a connection each."""
    content = reply_content(16, vocab=VOCAB, is_flat=True)
    with instant_engine(content, num_ports=load.num_engines, delay_s=load.delay_s) as ports:
        cpu_s, wall_s, kilobytes = asyncio.run(_ask_many(load, tokenizer, ports))
    sizes = f"{load.num_requests} requests, {load.num_engines} engines, {load.num_open} sent to each"
    return [
        PlaneFigure(
            name=f"CPU of this process per request ({sizes})", value=cpu_s / load.num_requests * 1e6, unit="us"
        ),
        PlaneFigure(name="its share of a core meanwhile", value=100 * cpu_s / wall_s, unit="%"),
        PlaneFigure(name="its memory per request under way", value=kilobytes / load.num_requests, unit="KB"),
    ]


async def _ask_many(load: Load, tokenizer: Tokenizer, ports: Sequence[int]) -> tuple[float, float, float]:
    async with AsyncExitStack() as stack:
        fleet = fleet_of(ports, max_outstanding=load.num_open)
        stack.push_async_callback(fleet.close)
        generator = _generator(tokenizer, fleet, num_rollouts=16, num_tokens=16)
        gc.collect()
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cpu_began, began = time.process_time(), time.monotonic()
        await asyncio.gather(*(generator.generate(prompt_at(place)) for place in range(load.num_requests // 16)))
        cpu_s, wall_s = time.process_time() - cpu_began, time.monotonic() - began
        return cpu_s, wall_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb


def fleet_of(ports: Sequence[int], *, max_outstanding: int) -> Fleet:
    keys = EngineKeys(api="0" * 48, admin="1" * 48)
    endpoints = [
        EngineEndpoint(index=index, host=LOOPBACK, port=port, tensor=1, device="cpu", keys=keys)
        for index, port in enumerate(ports)
    ]
    clients = [EngineClient(endpoint, request_timeout_s=_REQUEST_TIMEOUT_S) for endpoint in endpoints]
    return Fleet(clients, max_outstanding=max_outstanding, publish_timeout_s=60)


def _generator(tokenizer: Tokenizer, fleet: Fleet, *, num_rollouts: int, num_tokens: int) -> FleetGenerator:
    sampling = sampling_of(num_rollouts=num_rollouts, num_tokens=num_tokens)
    vocabulary = Vocabulary(size=VOCAB, eos_ids=(2,), max_context_tokens=1 << 20, decode=tokenizer.decode_response)
    return FleetGenerator(fleet, sampling=sampling, vocabulary=vocabulary, seed=1, max_attempts=3)


def sampling_of(*, num_rollouts: int, num_tokens: int) -> Sampling:
    return Sampling(num_rollouts=num_rollouts, temperature=1.0, top_p=1.0, top_k=None, max_response_tokens=num_tokens)


def prompt_at(place: int) -> Prompt:
    return Prompt(
        uid=f"prompt-{place}",
        position=place,
        epoch=0,
        token_ids=np.arange(3, 67, dtype=np.int32),
        data_source="bench",
        ground_truth="",
        extra_info={},
    )


_GROUP = ScoredGroup(
    group=RolloutGroup(
        prompt=prompt_at(0),
        rollouts=(
            Rollout(
                content=Content(token_ids=np.array([3], np.int32), logprobs=np.zeros(1, np.float32), text=""),
                versions=np.array([DEMONSTRATION], np.int32),
                loss_mask=np.ones(1, np.bool_),
                finish_reason=FinishReason.STOP,
            ),
        ),
    ),
    scores=(Score(value=0.0, components={}),),
)


def _best(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return min(seconds)


def print_figures(figures: Sequence[PlaneFigure]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("figure", "measured", "before", "goal"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for figure in figures:
        before = "" if figure.before is None else f"{figure.before:.3g} ({figure.before / figure.value:.1f}x)"
        goal = "" if figure.goal is None else f"<= {figure.goal:g} {figure.unit}"
        table.add_row(figure.name, f"{figure.value:.3g} {figure.unit}", before, goal)
    Console(no_color=bool(NO_COLOR.read()), width=_WIDTH, highlight=False).print(table)


def as_json(figures: Sequence[PlaneFigure]) -> str:
    return json.dumps([asdict(figure) for figure in figures])
