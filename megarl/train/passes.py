"""Forward and backward through Megatron's pipeline schedules, micro-batch by micro-batch.

Hides the interface of the schedules (iterators per chunk, a loss closure per micro-batch); knows nothing of algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.train.model import DeviceMicroBatch

Output = TypeVar("Output")
Report = TypeVar("Report")
Loss = Callable[[int, Output], tuple[Tensor, Report]]
"""(index of the micro-batch, the model's output) -> its part of the loss, and a report."""

_ForwardStep = Callable[[Iterator[int], torch.nn.Module], tuple[object, object]]


def accumulate_gradients(
    chunks: Sequence[torch.nn.Module], micro_batches: Sequence[DeviceMicroBatch], *, loss: Loss[Output, Report]
) -> list[Report]:
    """Compute the gradients of the sum of all losses over ranks. Return the reports on the last stage, [] elsewhere."""

    def forward_step(indices: Iterator[int], model: torch.nn.Module) -> tuple[object, object]:
        index = next(indices)

        def loss_of(output: Output) -> tuple[Tensor, Tensor, Report]:
            value, report = loss(index, output)
            # Megatron sums the second one, a number of tokens; `optimizer` ignores the sum.
            return value, torch.zeros((), dtype=torch.int), report

        return model(micro_batches[index]), loss_of

    reports: list[Report] = _run(forward_step, chunks, micro_batches, is_forward_only=False)
    return reports


def forward(chunks: Sequence[torch.nn.Module], micro_batches: Sequence[DeviceMicroBatch]) -> list[Output]:
    """Return the model's outputs in order, without gradients, on the last stage; [] elsewhere."""

    def forward_step(indices: Iterator[int], model: torch.nn.Module) -> tuple[object, object]:
        return model(micro_batches[next(indices)]), _keep

    with torch.no_grad():
        outputs: list[Output] = _run(forward_step, chunks, micro_batches, is_forward_only=True)
    return outputs


def _keep(output: Output) -> tuple[Tensor, Tensor, Output]:
    """Stand in for a loss: without one Megatron reads the device of the output if there are experts."""
    return torch.zeros(()), torch.zeros((), dtype=torch.int), output


def _run(
    forward_step: _ForwardStep,
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[DeviceMicroBatch],
    *,
    is_forward_only: bool,
) -> list[Report]:
    num_micro_batches = len(micro_batches)
    reports: list[Report] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(range(num_micro_batches)) for _ in chunks],
        model=list(chunks),
        num_microbatches=num_micro_batches,
        seq_length=micro_batches[0].num_pack_tokens,
        micro_batch_size=1,
        forward_only=is_forward_only,
    )
    return reports
