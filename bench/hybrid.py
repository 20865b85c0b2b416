"""Times of one training step with gated delta nets in three of four layers, against attention in all of them.

Both models have the same widths, and nearly as many parameters; the one of delta nets runs with and without kernels,
without them up to 32k tokens in a sequence: a step then takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from bench.figures import Figure
from bench.training import Timed, TrainWorkload, alone, clear_device, micro_batch, randomise, step, timed
from megarl.config.roles import ActorConfig
from megarl.train.build import build_chunks
from megarl.train.delta_net import GatedDeltaNet
from megarl.train.model import PolicyModel

_MODEL, _LAYERS = "qwen3.5-2b", 4
_LENGTHS = ((8, 4096), (1, 32768), (1, 131072))
_LONGEST_IN_TORCH = 32768
_WARMUPS, _REPEATS = 2, 3


def measure_hybrid() -> Iterator[Figure]:
    """Yield the time of a step for each length, by all kernels of this machine and in plain torch."""
    for num_sequences, tokens in _LENGTHS:
        label = f"{num_sequences} x {tokens // 1024}k"
        full = measure(num_sequences, tokens)
        for is_fused in (True, False) if tokens <= _LONGEST_IN_TORCH else (True,):
            hybrid = measure(num_sequences, tokens, is_fused=is_fused)
            way = "by kernels" if is_fused else "in torch"
            yield Figure(
                key=f"hybrid {label}, {way}",
                name=f"train step, {_LAYERS} layers of {_MODEL}, {label}, {way}, {hybrid.peak_bytes / 1e9:.0f} GB",
                value=1e3 * hybrid.seconds,
                unit="ms",
                against=f"attention in all layers, {1e3 * full.seconds:.1f} ms, {full.peak_bytes / 1e9:.0f} GB",
                ratio=full.seconds / hybrid.seconds,
            )


def measure(num_sequences: int, tokens: int, *, is_fused: bool | None = None) -> Timed:
    """Return the time of a step with delta nets, by kernels or in torch, or with attention in all layers."""
    workload = TrainWorkload(
        key="hybrid",
        name=_MODEL,
        model=_MODEL,
        num_layers=_LAYERS,
        num_sequences=num_sequences,
        sequence_tokens=tokens,
    )
    shape = replace(workload.shape, max_context_tokens=tokens)
    near = [layer for layer in shape.delta_layers if layer < _LAYERS and is_fused is not None]
    shape = replace(shape, delta_layers=tuple(near))
    with alone() as topology:
        (model,) = build_chunks(shape, topology, ActorConfig(pool="gpu"), device="cuda")
        assert isinstance(model, PolicyModel), type(model)
        for module in model.modules():
            if isinstance(module, GatedDeltaNet) and is_fused is not None:
                module.is_fused = is_fused
        randomise(model)
        batch = micro_batch(workload, topology)
        clear_device()
        return timed(partial(step, model, batch), warmups=_WARMUPS, repeats=_REPEATS)
