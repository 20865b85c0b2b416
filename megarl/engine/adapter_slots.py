"""The slots of adapters inside an SGLang TP process: the memory on its device that layers compute an adapter with.

SGLang gives an adapter a slot when a request first needs it, and copies there what it has loaded into host memory. Here
the slot is given at once and the values are received in it, those of one version. An adapter must be pinned for that:
of another one SGLang may take the slot away, and fill it again with what it has loaded, which is nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, Self, cast

import torch

from megarl.errors import WeightSyncError
from megarl.weights.layouts.lora import LOCAL_A, LOCAL_B


class _Loaded(Protocol):
    lora_name: str
    pinned: bool


class _Pool(Protocol):
    """By the name of a linear layer in its block, and the number of the layer: all slots."""

    uid_to_buffer_id: Mapping[str, int]
    A_buffer: Mapping[str, Sequence[torch.Tensor]]  # [slots, rows of all A, columns]
    B_buffer: Mapping[str, Sequence[torch.Tensor]]  # [slots, rows, rank]

    def prepare_lora_batch(
        self,
        *,
        cur_uids: set[str],
        lora_adapters: Mapping[str, object],
        lora_modules: Sequence[Mapping[str, object]],
        lora_refs: Mapping[str, _Loaded],
        lora_embed_tokens_module: None,
        lora_lm_head_module: None,
    ) -> None: ...


class _Manager(Protocol):
    """The fields of SGLang's `LoRAManager` that are used."""

    loras: Mapping[str, object]
    lora_refs: Mapping[str, _Loaded]
    memory_pool: _Pool
    lora_modules: Sequence[Mapping[str, object]]


class AdapterSlots:
    def __init__(self, manager: _Manager) -> None:
        self._manager = manager

    @classmethod
    def of_caller(cls) -> Self:
        """Return the slots of the scheduler that this is called from: SGLang gives loaders the model alone."""
        frame = sys._getframe()
        while (caller := frame.f_back) is not None:
            worker = getattr(caller.f_locals.get("self"), "tp_worker", None)
            manager = getattr(getattr(worker, "model_runner", None), "lora_manager", None)
            if manager is not None:
                return cls(cast(_Manager, manager))
            frame = caller
        raise WeightSyncError("this engine was started without adapters")

    def take(self, name: str, *, is_received: bool = False) -> int:
        """Return the slot of a loaded adapter; with `is_received` all its values are received there now."""
        loaded = [(uid, ref) for uid, ref in self._manager.lora_refs.items() if ref.lora_name == name]
        if not loaded:
            raise WeightSyncError(f"adapter {name} is not loaded")
        ((uid, ref),) = loaded
        if not ref.pinned:
            raise WeightSyncError(f"adapter {name} is not pinned: it could lose its slot")
        modules = self._manager.lora_modules
        self._manager.memory_pool.prepare_lora_batch(
            cur_uids={uid},
            lora_adapters=self._manager.loras,
            # SGLang would write zeros for each module, which takes milliseconds while requests wait.
            lora_modules=[{} for _ in modules] if is_received else modules,
            lora_refs=self._manager.lora_refs,
            lora_embed_tokens_module=None,
            lora_lm_head_module=None,
        )
        return self._manager.memory_pool.uid_to_buffer_id[uid]

    def tensors(self, slot: int) -> dict[str, torch.Tensor]:
        """Return the adapter in a slot, by the names of the engine's layout."""
        pool, tensors = self._manager.memory_pool, dict[str, torch.Tensor]()
        for number, layers in enumerate(self._manager.lora_modules):
            for name in layers:
                # SGLang's rule: some names of layers are parts of others.
                module = max((each for each in pool.A_buffer if each in name), key=len)
                tensors[f"{name}{LOCAL_A}"] = pool.A_buffer[module][number][slot]
                tensors[f"{name}{LOCAL_B}"] = pool.B_buffer[module][number][slot]
        return tensors
