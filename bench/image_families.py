"""The cost of a model that sees images in a run of text alone, against the text model of the same shape and weights.

Three are alive at once and take turns, in CPU seconds of their processes: the text model, the same once more, whose
ratio to the first shows how exact the figure is, and the model that sees. A turn is an update of a trainer rank, or
rollouts of a real engine.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import psutil

from bench.one_engine import TIMEOUT_S, Server, generator_of, random_prompts
from megarl.config.algorithm import GrpoConfig
from megarl.config.roles import ActorConfig, OptimizerConfig, RolloutRoleConfig
from megarl.data.packing import Packing
from megarl.data.shares import make_shares
from megarl.engine.client import EngineClient, EngineKeys
from megarl.engine.fleet import Fleet
from megarl.engine.process import EngineProcess, EngineSpec
from megarl.system.network import LOOPBACK
from megarl.tokens import Content
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from megarl.train.rank_spec import ImageFiles, RankSpec
from megarl.types import FinishReason, Rollout, TrainBatch, TrainSample

GOAL = 1.02
"""Most that a family which sees images may cost a run of text."""

# As wide as small released models: what a family adds to a layer is a number of operators, which width does not change.
_TEXT = TinyShape(
    num_layers=2,
    hidden=1024,
    ffn_hidden=3072,
    num_heads=8,
    num_kv_heads=2,
    max_context_tokens=1024,
    vocab=4096,
    weight_std=0.02,
)
_CONTENDERS = {"text": _TEXT, "same": _TEXT, "seeing": replace(_TEXT, max_image_pixels=28 * 28 * 16)}
_NUM_WARMUPS = 3
_NUM_PROMPTS = 2
_PROMPT_TOKENS = 32
_RESPONSE_TOKENS = 24
"""A turn is short: the machine is then the same for all."""
_FIRST_TOKEN = 1000
"""Above all tokens with a meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """CPU seconds of the same work, of turns that follow each other."""

    name: str
    text_s: list[float]
    same_s: list[float]
    seeing_s: list[float]

    @property
    def ratio(self) -> float:
        """That of the faster quarters: what else a machine does makes a turn slower, and never faster."""
        return _fast(self.seeing_s) / _fast(self.text_s)

    def __str__(self) -> str:
        control = _fast(self.same_s) / _fast(self.text_s)
        pairs = median(one / other for one, other in zip(self.seeing_s, self.text_s, strict=True))
        told = f"{self.name}: {self.ratio:.3f} of the text family's {_fast(self.text_s):.2f} s of CPU"
        return f"{told} (median of pairs {pairs:.3f}, itself again {control:.3f}; {len(self.text_s)} turns)"


def _fast(seconds: list[float]) -> float:
    return quantiles(seconds, n=4)[0]


def measure_families(*, repeats: int) -> Iterator[Overhead]:
    """Yield what an update and rollouts of text cost."""
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
        folder = Path(name)
        for each, shape in _CONTENDERS.items():
            write_tiny_model(folder / each, shape, seed=1)
        yield _measure_updates(folder, repeats=repeats)
        yield asyncio.run(_measure_rollouts(folder, repeats=repeats))


def _taking_turns(name: str, turns: Mapping[str, Callable[[], float]], *, repeats: int) -> Overhead:
    """Call each in turn, in another order each time."""
    spent: dict[str, list[float]] = {each: [] for each in turns}
    orders = list(permutations(turns))
    for number in range(_NUM_WARMUPS + repeats):
        for each in orders[number % len(orders)]:
            spent[each].append(turns[each]())
    text, same, seeing = (times[_NUM_WARMUPS:] for times in spent.values())
    return Overhead(name=name, text_s=text, same_s=same, seeing_s=seeing)


def _measure_updates(folder: Path, *, repeats: int) -> Overhead:
    with ExitStack() as stack:
        turns = {name: stack.enter_context(_trainer(folder, name)) for name in _CONTENDERS}
        return _taking_turns("update", turns, repeats=repeats)


@contextmanager
def _trainer(folder: Path, name: str) -> Iterator[Callable[[], float]]:
    """Yield a call that updates once in a process of its own and returns its CPU seconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_train, args=(theirs, folder, name), daemon=True)
    process.start()

    def update() -> float:
        ours.send(True)
        seconds: float = ours.recv()
        return seconds

    try:
        yield update
    finally:
        ours.send(False)
        process.join(TIMEOUT_S)


def _train(pipe: Connection, folder: Path, name: str) -> None:
    from megarl.train.actor import ActorRank

    shape = _CONTENDERS[name].as_model()
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    actor = ActorConfig(pool="cpu")
    spec = RankSpec(
        rank=0,
        world=1,
        master_address=LOOPBACK,
        master_port=port,
        device="cpu",
        split=actor,
        shape=shape,
        seed=1,
        timeout_s=TIMEOUT_S,
        images=None if shape.vision is None else ImageFiles(model=folder / name, store=folder / "images"),
    )
    rank = ActorRank(spec, algorithm=GrpoConfig(kind="grpo"), optimizer=OptimizerConfig(), total_steps=1000)
    rank.load(folder / name)
    batch = _batch()
    while pipe.recv():
        before = _own_cpu_seconds()
        rank.update(batch)
        pipe.send(_own_cpu_seconds() - before)
    rank.close()


def _own_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _batch() -> TrainBatch:
    random = np.random.default_rng(1)

    def tokens(num: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return random.integers(_FIRST_TOKEN, _TEXT.vocab, num, dtype=np.int32)

    samples = [
        TrainSample(
            prompt_ids=tokens(_PROMPT_TOKENS),
            rollout=Rollout(
                content=Content(
                    token_ids=tokens(_RESPONSE_TOKENS),
                    logprobs=np.full(_RESPONSE_TOKENS, -8.0, np.float32),
                    text="",
                ),
                versions=np.zeros(_RESPONSE_TOKENS, np.int32),
                loss_mask=np.ones(_RESPONSE_TOKENS, np.bool_),
                finish_reason=FinishReason.STOP,
            ),
            advantages=random.standard_normal(_RESPONSE_TOKENS).astype(np.float32),
        )
        for _ in range(_NUM_PROMPTS)
    ]
    packing = Packing(
        data_parallel=1, tokens_per_micro_batch=512, samples_per_update=None, pad_multiple=1, micro_batch_multiple=1
    )
    (share,) = make_shares(samples, packing, temperature=1.0)
    return share.fill()


async def _measure_rollouts(folder: Path, *, repeats: int) -> Overhead:
    loop = asyncio.get_running_loop()

    def turn(engine: _Engine) -> float:
        return asyncio.run_coroutine_threadsafe(engine.generate(), loop).result()

    async with AsyncExitStack() as stack:
        starts = (stack.enter_async_context(_engine(folder, name)) for name in _CONTENDERS)
        engines = dict(zip(_CONTENDERS, await asyncio.gather(*starts), strict=True))
        turns = {name: partial(turn, engine) for name, engine in engines.items()}
        overhead = await asyncio.to_thread(_taking_turns, "rollouts", turns, repeats=repeats)
    text, *others = (engine.generated for engine in engines.values())
    assert others == [text, text], "engines with the same weights answered differently"
    return overhead


@dataclass(slots=True, kw_only=True)
class _Engine:
    server: Server
    pids: list[int]
    generated: list[list[int]]

    async def generate(self) -> float:
        """Answer all prompts and return the CPU seconds of the engine's processes."""
        generator = generator_of(self.server, num_rollouts=1, max_response_tokens=_RESPONSE_TOKENS)
        prompts = random_prompts(_NUM_PROMPTS, _PROMPT_TOKENS, vocab=_TEXT.vocab)
        before = self._cpu_seconds()
        groups = await asyncio.gather(*(generator.generate(prompt) for prompt in prompts))
        self.generated = [each.token_ids.tolist() for group in groups for each in group.rollouts]
        return self._cpu_seconds() - before

    def _cpu_seconds(self) -> float:
        """CPU time of all threads, nanoseconds in the files: the times of processes are in hundredths of a second."""
        files = (path for pid in self.pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
        return sum(int(path.read_text().split()[0]) for path in files) / 1e9


@asynccontextmanager
async def _engine(folder: Path, name: str) -> AsyncIterator[_Engine]:
    shape = _CONTENDERS[name].as_model()
    role = RolloutRoleConfig(pool="pool", max_running_requests=_NUM_PROMPTS)
    spec = EngineSpec(
        index=0,
        model_folder=folder / name,
        config=role,
        device="cpu",
        seed=1,
        run_folder=folder / f"run_{name}",
        keys=EngineKeys.fresh(),
        images=None if shape.vision is None else folder / "images",
    )
    process = EngineProcess(spec)
    process.start()
    try:
        await process.wait_ready()
        fleet = Fleet(
            [EngineClient(process.endpoint, request_timeout_s=TIMEOUT_S)],
            max_outstanding=role.outstanding_requests,
            publish_timeout_s=TIMEOUT_S,
        )
        try:
            pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            server = Server(fleet=fleet, shape=shape, device="cpu", role=role)
            yield _Engine(server=server, pids=pids, generated=[])
        finally:
            await fleet.close()
    finally:
        await asyncio.to_thread(process.stop)
