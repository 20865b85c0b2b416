"""Times of training on one GPU: forward and backward of the policy, and its scores, next to ceilings and peers.

Weights and inputs are random, because a GPU computes zeros faster than real data.
"""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor

from bench.figures import Figure
from megarl.config.roles import ActorConfig, OptimizerConfig
from megarl.errors import MachineError
from megarl.families import PUBLIC_MODELS
from megarl.families.shape import ModelShape
from megarl.system.network import LOOPBACK
from megarl.train.build import build_chunks
from megarl.train.logprob import token_scores, vocab_shard
from megarl.train.model import DeviceMicroBatch, PolicyModel, to_device
from megarl.train.offload import build_optimizer
from megarl.train.topology import Topology, initialize, shut_down
from megarl.types import MicroBatch

PEAK_TFLOPS = 990.0
"""Dense bfloat16 rate of an H100 or H200, from the datasheet."""

_NUM_WARMUPS = 3
_NUM_REPEATS = 7
STD = 0.02
_PHASE_MODEL = "qwen2.5-1.5b"
_NUM_PHASE_REPEATS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWorkload:
    """Packed sequences of one length, and a public model cut to some layers."""

    key: str
    name: str
    model: str
    num_layers: int
    num_sequences: int
    sequence_tokens: int

    @property
    def shape(self) -> ModelShape:
        return replace(PUBLIC_MODELS[self.model], num_layers=self.num_layers)

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.sequence_tokens

    @property
    def num_flops(self) -> float:
        """Operations of forward and backward: three products per matrix, and the causal half of attention."""
        shape = self.shape
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        layer = shape.hidden * (2 * query + 2 * kv + 3 * shape.ffn_hidden)
        weights = shape.num_layers * layer + shape.vocab * shape.hidden
        attention = shape.num_layers * query * self.sequence_tokens
        return 6.0 * self.num_tokens * (weights + attention)


PEERS = ("transformers", "transformers compiled")
WORKLOADS = (
    TrainWorkload(
        key="step 7B", name="7B, 14 layers", model="qwen2.5-7b", num_layers=14, num_sequences=2, sequence_tokens=4096
    ),
    TrainWorkload(
        key="step 1.5B", name="1.5B", model="qwen2.5-1.5b", num_layers=28, num_sequences=4, sequence_tokens=4096
    ),
    TrainWorkload(
        key="step 135M", name="135M", model="smollm2-135m", num_layers=30, num_sequences=128, sequence_tokens=256
    ),
)
LONG_WORKLOAD = TrainWorkload(
    key="step 1.5B 16k", name="1.5B", model="qwen2.5-1.5b", num_layers=28, num_sequences=1, sequence_tokens=16384
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    seconds: float
    """Median time."""
    peak_bytes: int
    """Most memory allocated, including what was allocated before."""


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise MachineError("this benchmark needs a CUDA device, and torch finds none")


def measure_ceilings() -> dict[str, float]:
    """Return the device's rates: copies in GB/s, counting bytes read and written, and matrix products in TFLOP/s."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    copy = timed(lambda: target.copy_(source))
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = timed(lambda: left @ right)
    return {"copy_gb_s": 2 * 4 * (1 << 29) / copy.seconds / 1e9, "matmul_tflops": 2 * 8192**3 / product.seconds / 1e12}


def measure_step(workload: TrainWorkload, *, peers: Sequence[str]) -> Iterator[Figure]:
    """Yield the utilisation of the datasheet's peak, then time and memory against each peer."""
    ours = _measure_ours(workload)
    tflops = workload.num_flops / ours.seconds / 1e12
    label = f"train step, {workload.name}, {workload.num_sequences} x {workload.sequence_tokens}"
    yield Figure(
        key=workload.key,
        name=f"{label}: {1e3 * ours.seconds:.1f} ms",
        value=tflops,
        unit="TFLOP/s",
        against=f"{PEAK_TFLOPS:.0f} TFLOP/s",
        ratio=tflops / PEAK_TFLOPS,
    )
    for peer in peers:
        clear_device()
        theirs = _measure_transformers(workload, is_compiled=peer.endswith("compiled"))
        yield Figure(
            key=f"{workload.key}, {peer}",
            name=f"{label}: time",
            value=1e3 * ours.seconds,
            unit="ms",
            against=f"{peer}, {1e3 * theirs.seconds:.1f} ms",
            ratio=theirs.seconds / ours.seconds,
        )
        yield Figure(
            key=f"{workload.key}, {peer}, memory",
            name=f"{label}: peak memory",
            value=ours.peak_bytes / 1e9,
            unit="GB",
            against=f"{peer}, {theirs.peak_bytes / 1e9:.1f} GB",
            ratio=theirs.peak_bytes / ours.peak_bytes,
        )


def measure_scores(*, num_tokens: int = 16_384, vocab: int = 151_936, hidden: int = 3584) -> Iterator[Figure]:
    """Time log-probabilities and entropies from hidden states, forward and backward, and the same with all logits."""
    hidden_states = torch.randn(num_tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16) * STD).requires_grad_()
    targets = torch.randint(vocab, (num_tokens,), device="cuda")
    shard = vocab_shard(vocab=vocab, rows=vocab, rank=0, size=1, group=None)

    def backward(logprobs: Tensor, entropy: Tensor) -> None:
        hidden_states.grad = weight.grad = None
        (logprobs.mean() + 0.01 * entropy.mean()).backward()  # type: ignore[no-untyped-call]

    def ours() -> None:
        scores = token_scores(hidden_states, weight, targets, shard=shard, temperature=0.9)
        backward(scores.logprobs, scores.entropy)

    def naive() -> None:
        log_probs = ((hidden_states @ weight.t()).float() / 0.9).log_softmax(dim=-1)
        backward(log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(dim=-1))

    outcomes = {}
    for call in (ours, naive):
        hidden_states.grad = weight.grad = None
        clear_device()
        before = torch.cuda.memory_allocated()
        result = timed(call)
        outcomes[call] = replace(result, peak_bytes=result.peak_bytes - before)
    fast, slow = outcomes[ours], outcomes[naive]
    label = f"scores, {num_tokens} x {vocab} x {hidden}"
    # Three products of the hidden states and the matrix, and a fourth because logits are recomputed.
    floor_s = 8.0 * num_tokens * vocab * hidden / (1e12 * measure_ceilings()["matmul_tflops"])
    yield Figure(
        key="scores",
        name=f"{label}: time",
        value=1e3 * fast.seconds,
        unit="ms",
        against=f"all logits at once, {1e3 * slow.seconds:.1f} ms",
        ratio=slow.seconds / fast.seconds,
    )
    yield Figure(
        key="scores, products",
        name=f"{label}: time",
        value=1e3 * fast.seconds,
        unit="ms",
        against=f"its four matrix products at the measured ceiling, {1e3 * floor_s:.1f} ms",
        ratio=floor_s / fast.seconds,
    )
    yield Figure(
        key="scores, memory",
        name=f"{label}: memory",
        value=fast.peak_bytes / 1e9,
        unit="GB",
        against=f"all logits at once, {slow.peak_bytes / 1e9:.1f} GB",
        ratio=slow.peak_bytes / fast.peak_bytes,
    )


def measure_phases() -> Iterator[Figure]:
    """Time the offload and reload of weights, and an update of an optimizer in host memory, against pinned copies."""
    shape = PUBLIC_MODELS[_PHASE_MODEL]
    with alone() as topology:
        chunks = build_chunks(shape, topology, ActorConfig(pool="gpu"), device="cuda")
        optimizer = build_optimizer(chunks, OptimizerConfig(), ActorConfig(pool="gpu", offload="everything"))
        randomise(chunks[0])
        optimizer.adopt_weights()
        weight_bytes = sum(tensor.nbytes for tensor in optimizer.parameters().values())
        state_bytes = 3 * sum(shard.master.nbytes for shard in optimizer.shards().values())
        releases, reloads, updates = [], [], []
        for _ in range(_NUM_PHASE_REPEATS):
            optimizer.zero_grad()
            torch.cuda.synchronize()
            start = time.perf_counter()
            optimizer.step(1e-6)
            updated = time.perf_counter()
            optimizer.release()
            released = time.perf_counter()
            optimizer.reload()
            torch.cuda.synchronize()
            updates.append(updated - start)
            releases.append(released - updated)
            reloads.append(time.perf_counter() - released)
    # The first turn pins host memory and is left out.
    to_host, to_device = _pinned_rates()
    phases = (
        ("release", weight_bytes, median(releases[1:]), to_host),
        ("reload", weight_bytes, median(reloads[1:]), to_device),
        ("update", state_bytes, median(updates[1:]), min(to_host, to_device)),
    )
    for name, num_bytes, seconds, ceiling in phases:
        yield Figure(
            key=f"phase, {name}",
            name=f"{name} with {num_bytes / 1e9:.1f} GB of a 1.5B model in host memory: {1e3 * seconds:.0f} ms",
            value=num_bytes / seconds / 1e9,
            unit="GB/s",
            against=f"one pinned copy, {ceiling:.1f} GB/s",
            ratio=num_bytes / seconds / 1e9 / ceiling,
        )


def _pinned_rates() -> tuple[float, float]:
    """Return the rates to the host and to the device, in GB/s."""
    num_bytes = 1 << 30
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    down = timed(lambda: host.copy_(device, non_blocking=True))
    up = timed(lambda: device.copy_(host, non_blocking=True))
    return num_bytes / down.seconds / 1e9, num_bytes / up.seconds / 1e9


def _measure_ours(workload: TrainWorkload) -> Timed:
    with alone() as topology:
        (model,) = build_chunks(workload.shape, topology, ActorConfig(pool="gpu"), device="cuda")
        randomise(model)
        batch = micro_batch(workload, topology)
        clear_device()
        assert isinstance(model, PolicyModel), type(model)
        return timed(partial(step, model, batch))


def step(model: PolicyModel, batch: DeviceMicroBatch) -> None:
    model.zero_grad(set_to_none=True)
    scores = model(batch)
    (-scores.logprobs.mean()).backward()


def _measure_transformers(workload: TrainWorkload, *, is_compiled: bool) -> Timed:
    from transformers import AutoModelForCausalLM, Qwen2Config

    shape = workload.shape
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn_hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_context_tokens,
        rope_theta=shape.rope_theta,
        tie_word_embeddings=shape.has_tied_embeddings,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    randomise(model)
    run = torch.compile(model) if is_compiled else model
    ids = torch.randint(shape.vocab, (workload.num_sequences, workload.sequence_tokens), device="cuda")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        run(input_ids=ids, labels=ids).loss.backward()

    clear_device()
    return timed(step)


@contextmanager
def alone() -> Iterator[Topology]:
    """Yield the topology of a single rank."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    topology = initialize(
        ActorConfig(pool="gpu"),
        rank=0,
        world=1,
        master_address=LOOPBACK,
        master_port=port,
        device="cuda",
        seed=1,
        timeout_s=60,
    )
    try:
        yield topology
    finally:
        shut_down()


def micro_batch(
    workload: TrainWorkload, topology: Topology, *, lengths: Sequence[int] | None = None
) -> DeviceMicroBatch:
    """Return random tokens; `lengths` of the sequences, if not all have the workload's, add up to the same number."""
    num_tokens = workload.num_tokens
    random = np.random.default_rng(0)
    token_ids = random.integers(workload.shape.vocab, size=num_tokens, dtype=np.int32)
    lengths = lengths or [workload.sequence_tokens] * workload.num_sequences
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    batch = MicroBatch(
        token_ids=token_ids,
        sequence_starts=starts,
        last_ids=token_ids[starts[:-1]],
        loss_mask=np.ones(num_tokens, dtype=np.bool_),
        advantages=np.ones(num_tokens, dtype=np.float32),
        rollout_logprobs=np.zeros(num_tokens, dtype=np.float32),
        old_logprobs=None,
        reference_logprobs=None,
        values=None,
        returns=None,
        sample_ids=np.arange(len(lengths), dtype=np.int32),
        response_starts=starts[:-1],
        response_ends=starts[1:],
    )
    return to_device(batch, topology, temperature=1.0)


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, STD)


def timed(call: Callable[[], object], *, warmups: int = _NUM_WARMUPS, repeats: int = _NUM_REPEATS) -> Timed:
    for _ in range(warmups):
        call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return Timed(seconds=median(times), peak_bytes=torch.cuda.max_memory_allocated())


def clear_device() -> None:
    gc.collect()
    torch.cuda.empty_cache()
