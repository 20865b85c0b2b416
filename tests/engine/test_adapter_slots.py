"""The slots of adapters, with a stand-in for SGLang's manager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from megarl.engine.adapter_slots import AdapterSlots
from megarl.errors import WeightSyncError


@dataclass
class Loaded:
    lora_name: str
    pinned: bool = True


@dataclass
class Pool:
    """Three slots for adapters of rank 2."""

    uid_to_buffer_id: dict[str, int] = field(default_factory=dict)
    A_buffer: dict[str, list[torch.Tensor]] = field(
        default_factory=lambda: {"up_proj": [], "gate_up_proj": [torch.zeros(0), torch.zeros(3, 4, 4)]}
    )
    B_buffer: dict[str, list[torch.Tensor]] = field(
        default_factory=lambda: {"up_proj": [], "gate_up_proj": [torch.zeros(0), torch.zeros(3, 6, 2)]}
    )


@dataclass
class Manager:
    """It gives slots in order, as SGLang does to adapters without values."""

    lora_refs: Mapping[str, Loaded] = field(
        default_factory=lambda: {"x7": Loaded("policy@7"), "x8": Loaded("policy@8"), "y": Loaded("loose", pinned=False)}
    )
    lora_modules: Sequence[Mapping[str, object]] = ({}, {"model.layers.1.mlp.gate_up_proj": None})
    memory_pool: Pool = field(default_factory=Pool)

    def fetch_new_loras(self, new_loras: set[str]) -> None:
        for uid in new_loras:
            self.memory_pool.uid_to_buffer_id.setdefault(uid, 1 + len(self.memory_pool.uid_to_buffer_id))


@dataclass
class Runner:
    lora_manager: Manager | None


@dataclass
class Worker:
    model_runner: Runner


@dataclass
class Scheduler:
    tp_worker: Worker

    def process(self) -> AdapterSlots:
        """Call the loader as SGLang does: some functions lie between."""
        return (lambda: AdapterSlots.of_caller())()


def test_an_adapter_keeps_the_slot_that_it_was_given() -> None:
    slots = Scheduler(Worker(Runner(Manager()))).process()
    assert [slots.take(name) for name in ("policy@8", "policy@7", "policy@8")] == [1, 2, 1]


def test_what_is_written_into_a_slot_is_what_its_layers_compute_with() -> None:
    manager, name = Manager(), "model.layers.1.mlp.gate_up_proj"
    tensors = AdapterSlots(cast(Any, manager)).tensors(2)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        f"{name}.lora_a": (4, 4),
        f"{name}.lora_b": (6, 2),
    }
    tensors[f"{name}.lora_b"].fill_(3)
    assert manager.memory_pool.B_buffer["gate_up_proj"][1].sum(dim=(1, 2)).tolist() == [0, 0, 36]


@pytest.mark.parametrize(
    ("name", "message"), [("policy@9", "policy@9 is not loaded"), ("loose", "loose is not pinned")]
)
def test_an_adapter_that_could_lose_its_slot_gets_none(name: str, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        AdapterSlots(cast(Any, Manager())).take(name)


def test_an_engine_without_adapters_is_named() -> None:
    with pytest.raises(WeightSyncError, match="started without adapters"):
        Scheduler(Worker(Runner(None))).process()
