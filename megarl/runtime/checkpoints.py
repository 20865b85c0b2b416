"""When a run saves, and what: the driver's half of a checkpoint. The ranks write tensors, this writes the rest."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

from megarl import __version__
from megarl.checkpoint.folder import CHECKPOINTS_FOLDER, begin, below, checkpoint_folder, commit, prune
from megarl.checkpoint.identity import digest_of
from megarl.checkpoint.manifest import CRITIC_FOLDER, FORMAT, FileDigest, Manifest, digest_file
from megarl.checkpoint.state import STATE_FILE, RunState, write_state
from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.data.stream import PromptStream
from megarl.errors import CheckpointError, PreemptedError
from megarl.observe.observer import Observer
from megarl.runtime.preemption import Preemption
from megarl.runtime.ranks import ActorRanks, CriticRanks
from megarl.stages import Algorithm
from megarl.weights.canonical import canonical_tensors

_SPARE_BYTES = 64 << 20
"""For what is not a tensor, and for a disk that is never quite full."""


class Saver(Protocol):
    async def after_step(self, step: int, *, is_last: bool) -> None:
        """Save if it is time to. Raises PreemptedError when the run was asked to leave: this is where it can."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCritic:
    ranks: CriticRanks
    shape: ModelShape
    source_folder: Path
    """Has its configuration and tokenizer."""


class RunSaver:
    """A save that fails is told to people, and training goes on; only the last one of a run must succeed."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        shape: ModelShape,
        actor: ActorRanks,
        critic: SavedCritic | None,
        algorithm: Algorithm,
        prompts: PromptStream,
        data_digest: str,
        preemption: Preemption,
        observer: Observer,
    ) -> None:
        self._recipe = recipe
        self._config = recipe.checkpoint
        self._parent = recipe.run_folder.absolute() / CHECKPOINTS_FOLDER
        shapes = [shape] if critic is None else [shape, critic.shape]
        wants_optimizer = self._config.contents == "everything"
        self._num_bytes = sum(_estimate_bytes(item, wants_optimizer=wants_optimizer) for item in shapes) + _SPARE_BYTES
        self._actor = actor
        self._critic = critic
        self._algorithm = algorithm
        self._prompts = prompts
        self._data_digest = data_digest
        self._preemption = preemption
        self._observer = observer

    async def after_step(self, step: int, *, is_last: bool) -> None:
        is_leaving = self._preemption.is_requested and not is_last
        if is_leaving or self._is_due(step, is_last=is_last):
            with self._observer.phase("save"):
                outcome = await self._try_to_save(step, must_succeed=is_last)
        else:
            outcome = "not saved"
        if is_leaving:
            raise PreemptedError(f"stopped by SIGTERM after step {step}: {outcome}; everything it started is gone")

    def _is_due(self, step: int, *, is_last: bool) -> bool:
        every_steps = self._config.save_every_steps
        return self._config.save_at_end if is_last else every_steps is not None and step % every_steps == 0

    async def _try_to_save(self, step: int, *, must_succeed: bool) -> str:
        try:
            await self._save(step)
        except (CheckpointError, OSError) as error:
            if must_succeed:
                raise CheckpointError(f"the run is done, but its last step was not saved: {error}") from error
            self._observer.warned(f"step {step} was not saved, training goes on: {error}")
            return f"not saved: {error}"
        return "saved"

    async def _save(self, step: int) -> None:
        # The stream stands where this step left it: nothing is admitted before the step is released.
        prompt_cursor = self._prompts.cursor
        folder = checkpoint_folder(self._parent, step)
        partial = await asyncio.to_thread(begin, folder, num_bytes=self._num_bytes)
        files, trainer = await self._actor.save(partial, self._recipe.model.path.absolute(), self._config.contents)
        critic = None
        if self._critic is not None:
            inner, critic = await self._critic.ranks.save(
                partial / CRITIC_FOLDER, self._critic.source_folder.absolute(), self._config.contents
            )
            files |= below(CRITIC_FOLDER, inner)
        state = RunState(
            trainer=trainer,
            critic=critic,
            kl_coef=self._algorithm.kl_coef,
            prompt_cursor=prompt_cursor,
            seed=self._recipe.run.seed,
            data_digest=self._data_digest,
        )
        write_state(partial, state)
        files[STATE_FILE] = digest_file(partial / STATE_FILE)
        await asyncio.to_thread(commit, partial, folder, self._manifest(step, files))
        await asyncio.to_thread(prune, self._parent, keep_last=self._config.keep_last)
        self._observer.checkpoint_saved(folder)

    def _manifest(self, step: int, files: dict[str, FileDigest]) -> Manifest:
        return Manifest(
            format=FORMAT,
            megarl_version=__version__,
            step=step,
            contents=self._config.contents,
            recipe=self._recipe.model_dump(mode="json"),
            recipe_digest=digest_of(self._recipe),
            files=dict(sorted(files.items())),
        )


def _estimate_bytes(shape: ModelShape, *, wants_optimizer: bool) -> int:
    """Of one checkpoint on disk."""
    specs = canonical_tensors(shape).values()
    model_bytes = sum(spec.num_bytes for spec in specs)
    num_kept_in_fp32 = 2 if shape.dtype == "float32" else 3
    optimizer_bytes = sum(4 * num_kept_in_fp32 * prod(spec.shape) for spec in specs) if wants_optimizer else 0
    return model_bytes + optimizer_bytes
