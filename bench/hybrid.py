"""Times of one training step with gated delta nets in three of four layers, against attention in all of them.

Both models have the same widths, and nearly as many parameters; the one of delta nets runs with and without kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from bench.figures import Figure
from bench.training import Timed, TrainWorkload, alone, clear_device, micro_batch, randomise, step, timed
from megarl.config.roles import ActorConfig
from megarl.train.build import build_chunks
from megarl.train.delta_kernels import is_usable
from megarl.train.delta_net import GatedDeltaNet
from megarl.train.model import PolicyModel

_MODEL, _LAYERS = "qwen3.5-2b", 4
_LENGTHS = ((8, 4096), (1, 32768), (1, 131072))
_WARMUPS, _REPEATS = 2, 3


def measure_hybrid() -> Iterator[Figure]:
    """Yield the time of a step for each length, by kernels where they are installed and in plain torch."""
    for num_sequences, tokens in _LENGTHS:
        label = f"{num_sequences} x {tokens // 1024}k"
        full = _measure(num_sequences, tokens, has_delta_nets=False)
        for how in ("kernels", "plain torch") if is_usable() else ("plain torch",):
            hybrid = _measure(num_sequences, tokens, has_delta_nets=True, has_kernels=how == "kernels")
            yield Figure(
                key=f"hybrid {label}, {how}",
                name=f"train step, {_LAYERS} layers of {_MODEL}, {label}, {how}, {hybrid.peak_bytes / 1e9:.0f} GB",
                value=1e3 * hybrid.seconds,
                unit="ms",
                against=f"attention in all layers, {1e3 * full.seconds:.1f} ms, {full.peak_bytes / 1e9:.0f} GB",
                ratio=full.seconds / hybrid.seconds,
            )


def _measure(num_sequences: int, tokens: int, *, has_delta_nets: bool, has_kernels: bool = False) -> Timed:
    workload = TrainWorkload(
        key="hybrid",
        name=_MODEL,
        model=_MODEL,
        num_layers=_LAYERS,
        num_sequences=num_sequences,
        sequence_tokens=tokens,
    )
    shape = replace(workload.shape, max_context_tokens=tokens)
    near = [layer for layer in shape.delta_layers if layer < _LAYERS and has_delta_nets]
    shape = replace(shape, delta_layers=tuple(near))
    with alone() as topology:
        (model,) = build_chunks(shape, topology, ActorConfig(pool="gpu"), device="cuda")
        assert isinstance(model, PolicyModel), type(model)
        for module in model.modules():
            if isinstance(module, GatedDeltaNet):
                module.has_kernels = has_kernels
        randomise(model)
        batch = micro_batch(workload, topology)
        clear_device()
        return timed(partial(step, model, batch), warmups=_WARMUPS, repeats=_REPEATS)
