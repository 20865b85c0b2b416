"""The state of a run in a checkpoint, and the choice of the checkpoint that a run resumes from.

The choice verifies sizes, and all bytes but those of weights, which ranks verify.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue, TypeAdapter, ValidationError

from megarl.checkpoint.folder import list_checkpoints
from megarl.checkpoint.manifest import Manifest, read_manifest, sync, verify
from megarl.config.document import leaves
from megarl.config.recipe import Recipe
from megarl.errors import CheckpointError, FinishedError, first_line
from megarl.results import MonitorState
from megarl.system.faults import reach, step_in
from megarl.types import Prompt, ScoredGroup

STATE_FILE = "state.json"

_IDENTITY: Mapping[str, tuple[str, ...] | None] = {
    "run": ("seed",),
    "data": ("is_shuffled", "max_prompt_tokens", "overlong_prompts"),
    "algorithm": None,
    "sampling": None,
    "reward": None,
    "train": ("prompts_per_step", "prompts_per_update", "max_staleness", "optimizer"),
}
"""Keys that decide what is trained on and how, by section; None stands for the whole section.

Layout, length, paths and output are left out. Prompts are compared by content where they are read.
"""

_MODELS = ("model.path", "roles.critic.path", "roles.reference.path")
"""Folders of weights. A checkpoint has its own weights: another folder here would be recorded and never read."""
_DRAFT = "roles.rollout.draft.path"
"""The same where a drafter trains it."""
_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """State of the actor, the critic or the drafter; the same on every rank."""

    num_steps: int
    """Steps taken: the position in the learning-rate schedule."""
    num_updates: int
    """Step count of the optimizer, and for the actor the version of the weights."""
    num_skipped_in_a_row: int = 0
    """Updates with non-finite numbers since the last applied update."""
    monitor: MonitorState | None = None
    """Set for the actor only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Counts of the prompts drawn from the stream: trained on, dropped, carried or pending."""

    num_trained: int = 0
    num_dropped: int = 0
    """Groups that the algorithm filtered out."""
    pending: tuple[int, ...] = ()
    """Stream positions of prompts without a group; a resumed run begins with them."""
    num_carried: int = 0
    """Groups that are scored and not yet trained on; they are part of the checkpoint."""

    @property
    def num_drawn(self) -> int:
        return self.num_trained + self.num_dropped + len(self.pending) + self.num_carried


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best evaluation so far."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    trainer: TrainerState
    """State of the actor."""
    prompt_cursor: int
    """Number of prompts drawn from the stream; with the seed it determines epoch and order."""
    ledger: Ledger
    best: Best | None = None
    """None without `checkpoint.keep_best`."""
    critic: TrainerState | None = None
    drafter: TrainerState | None = None
    kl_coef: float | None = None
    """KL coefficient of the next step."""
    versions: tuple[int, ...] = ()
    """Versions published before the trainer's own, as far back as carried groups may reach; the latest comes last."""
    seed: int
    data_digest: str
    """Digest of all prompts, in the order of the files."""
    tools_digest: str | None = None
    """Digest of the tools that prompts name; None without any."""


_STATE: TypeAdapter[RunState] = TypeAdapter(RunState)


def write_state(folder: Path, state: RunState) -> None:
    path = folder / STATE_FILE
    path.write_bytes(_STATE.dump_json(state, indent=1) + b"\n")
    sync(path)
    reach("state_written", step=step_in(folder))


def read_state(folder: Path) -> RunState:
    path = folder / STATE_FILE
    try:
        return _STATE.validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{path}: cannot be read: {first_line(error)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A checkpoint whose files are complete; the ranks that load its weights compare them with their digests."""

    folder: Path
    manifest: Manifest
    state: RunState

    @property
    def step(self) -> int:
        return self.manifest.step

    def carried_groups(self, prompt_at: Callable[[int], Prompt]) -> list[ScoredGroup]:
        """Return the groups that were scored and not yet trained on, with the prompts of the resumed run."""
        from megarl.checkpoint.carried import read_groups  # noqa: PLC0415 - loads torch, which checking a run does not

        return read_groups(self.folder, self.state.ledger.num_carried, prompt_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    point: ResumePoint | None
    """None starts a new run."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about the choice."""


def decide(
    parent: Path, *, recipe: Mapping[str, JsonValue], num_steps: int, damaged: Collection[Path] = ()
) -> Decision:
    """Choose the newest checkpoint that is complete, if the run can continue from it.

    Folders in `damaged` are passed over. Where a checkpoint exists and the run cannot continue from it, a
    CheckpointError leaves the decision to the user: nothing is moved.
    """
    notes: list[str] = []
    for folder in list_checkpoints(parent):
        if folder in damaged:
            notes.append(f"skipped {folder}: damaged")
            continue
        try:
            manifest = read_manifest(folder)
            reason = obstacle(manifest, str(folder), recipe=recipe, num_steps=num_steps)
            if reason is None:
                return Decision(point=open_complete(folder), notes=tuple(notes))
        except CheckpointError as error:
            notes.append(f"skipped {folder}: {error}")
            continue
        raise reason
    if notes:
        raise CheckpointError(
            f"no checkpoint of this run verifies; --resume never starts anew and keeps them: {'; '.join(notes)}"
        )
    return Decision(point=None)


def open_named(folder: Path, *, recipe: Mapping[str, JsonValue], num_steps: int) -> Decision:
    """Choose the checkpoint that the user named; a changed recipe is allowed, and each change is noted."""
    manifest = read_manifest(folder)
    if manifest.contents != "everything":
        raise CheckpointError(f"{folder}: has only weights; start from them with model.path={folder / 'model'}")
    if manifest.step >= num_steps:
        raise CheckpointError(f"{folder}: is at step {manifest.step}, run.steps is {num_steps}; raise run.steps")
    notes = [f"{change}, unlike in {folder}" for change in list_changes(manifest.recipe, recipe)]
    notes += [
        f"{key} is not read: weights and optimizer are those of {folder}"
        for key in _MODELS[:2]
        if _changed_path(key, manifest.recipe, recipe)
    ]
    return Decision(point=open_complete(folder), notes=tuple(notes))


def obstacle(
    manifest: Manifest, folder: str, *, recipe: Mapping[str, JsonValue], num_steps: int
) -> CheckpointError | None:
    """Return why the run cannot continue from an intact checkpoint, in a folder or elsewhere; None if it can."""
    changes = list_changes(manifest.recipe, recipe)
    if changes:
        others = [f"and {len(changes) - _MAX_SHOWN} more"] if len(changes) > _MAX_SHOWN else []
        return CheckpointError(
            f"{folder} was made with another recipe: {', '.join([*changes[:_MAX_SHOWN], *others])}; go back to it, "
            f"go on from there nevertheless with --resume {folder}, give the new run another run.name, "
            "or start anew with --resume never, which moves the earlier run aside"
        )
    if manifest.step >= num_steps:
        return FinishedError(
            f"the run is finished: {folder} is at step {manifest.step} of {num_steps}; raise run.steps to train on, "
            "give a new run another run.name, or start anew with --resume never, which moves this one aside"
        )
    if manifest.contents != "everything":
        return CheckpointError(
            f"{folder} has only weights (checkpoint.contents), from which a run cannot resume; start another run from "
            f"them with model.path={folder}/model and another run.name, or start anew with --resume never"
        )
    return None


def list_changes(before: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> list[str]:
    """Return every key that matters to a continued run and differs, as `a.b is 2, was 1`."""
    before = _with_defaults(before)
    leaves_before, leaves_now = (
        {".".join(key): value for key, value in leaves(_identity(recipe))} for recipe in (before, now)
    )
    keys = list(dict.fromkeys((*leaves_now, *leaves_before)))
    changed = [key for key in keys if leaves_before.get(key) != leaves_now.get(key)]
    models = (*_MODELS, _DRAFT) if _find(before, "roles.drafter") and _find(now, "roles.drafter") else _MODELS
    changed += [key for key in models if _changed_path(key, before, now)]
    return [f"{key} is {_shown(now, key)}, was {_shown(before, key)}" for key in changed]


def _with_defaults(recipe: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Return the recipe with today's defaults for keys that it was written without."""
    try:
        return Recipe.model_validate(recipe).model_dump(mode="json")
    except ValidationError:
        return recipe


def _find(recipe: Mapping[str, JsonValue], key: str) -> JsonValue:
    value: JsonValue = dict(recipe)
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _shown(recipe: Mapping[str, JsonValue], key: str) -> str:
    value = _find(recipe, key)
    return "not set" if value is None else str(value)


def _changed_path(key: str, before: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> bool:
    first, second = _find(before, key), _find(now, key)
    if isinstance(first, str) and isinstance(second, str):
        return Path(first).resolve() != Path(second).resolve()
    return first != second


def open_complete(folder: Path) -> ResumePoint:
    """Return a checkpoint whose files have their sizes, and all but those of weights their digests."""
    manifest = verify(folder, wants_weights=False)
    return ResumePoint(folder=folder, manifest=manifest, state=read_state(folder))


def identity_digest(recipe: Mapping[str, JsonValue]) -> str:
    """Return the digest of the keys that must stay the same for a run to continue; `recipe` is a manifest's."""
    return hashlib.sha256(json.dumps(_identity(recipe), sort_keys=True).encode()).hexdigest()


def _identity(recipe: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    identity: dict[str, JsonValue] = {}
    for name, keys in _IDENTITY.items():
        section = recipe.get(name)
        if isinstance(section, dict):
            identity[name] = section if keys is None else {key: section[key] for key in keys if key in section}
    model = recipe.get("model")
    if isinstance(model, dict) and model.get("lora") is not None:
        identity["model"] = {"lora": model["lora"]}
    return identity
