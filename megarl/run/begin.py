"""Where each policy of a run begins, and what it is observed with; one policy alone is the run itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from megarl.checkpoint.mirror import claim_mirror, refuse_occupied
from megarl.checkpoint.resume import ResumePoint
from megarl.config.recipe import Recipe
from megarl.errors import CheckpointError, FinishedError
from megarl.observe.events import Noted, Record, Sink
from megarl.observe.observer import Observer
from megarl.observe.observing import observing
from megarl.run.inputs import Inputs
from megarl.run.resume import ResumeChoice, checked_resume_point, choose, is_of_run


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """A policy of a run, and what it is trained on."""

    name: str
    recipe: Recipe
    inputs: Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunPolicy(PolicyInputs):
    point: ResumePoint | None
    """The checkpoint that the policy goes on from."""
    notes: tuple[str, ...]
    """To be said when it is observed."""
    is_continued: bool
    choose: Callable[[Collection[Path], Callable[[str], None]], ResumePoint | None]
    """Returns another checkpoint, where ranks find some damaged; it says what it notes by its second argument."""
    mirror_claim: str | None
    """Returned by `claim_mirror`; None where the mirror could not be reached."""

    def observing(self, display: Sink, stack: ExitStack) -> Observer:
        """Open what the policy is observed with."""
        observer = stack.enter_context(
            observing(
                self.recipe,
                display=display,
                resumed_step=0 if self.point is None else self.point.step,
                is_continued=self.is_continued,
                tools_digest=self.inputs.tools_digest,
            )
        )
        for note in self.notes:
            observer.warned(note)
        return observer


def begin(
    policies: Mapping[str, PolicyInputs], choice: ResumeChoice, *, display: Sink, allows_data_change: bool
) -> list[BegunPolicy]:
    """Return where each policy begins that is not done; raise FinishedError if all of them are."""
    if len(policies) > 1 and isinstance(choice, Path):
        raise CheckpointError(f"{choice}: has one policy; several resume from their own newest (--resume auto)")
    begun, finished = list[BegunPolicy](), list[FinishedError]()
    for policy in policies.values():
        try:
            begun.append(_begin(policy, choice, display=display, allows_data_change=allows_data_change))
        except FinishedError as error:
            finished.append(error)
    if not begun:
        raise finished[-1]
    return begun


def _begin(policy: PolicyInputs, choice: ResumeChoice, *, display: Sink, allows_data_change: bool) -> BegunPolicy:
    recipe, inputs, notify = policy.recipe, policy.inputs, _notify_on(display)
    check = partial(checked_resume_point, model=recipe.model, inputs=inputs, allows_data_change=allows_data_change)
    decision = choose(recipe, choice, notify=notify)
    notes = [*decision.notes]
    point = decision.point and check(decision.point, warn=notes.append)
    is_continued = point is not None and is_of_run(point, recipe.run_folder)

    def choose_earlier(damaged: Collection[Path], warn: Callable[[str], None]) -> ResumePoint | None:
        earlier = choose(recipe, choice, damaged=damaged, notify=notify).point
        return earlier and check(earlier, warn=warn)

    return BegunPolicy(
        name=policy.name,
        recipe=recipe,
        inputs=inputs,
        point=point,
        mirror_claim=_claim(recipe, is_continued=is_continued, warn=notes.append),
        notes=tuple(notes),
        is_continued=is_continued,
        choose=choose_earlier,
    )


def _claim(recipe: Recipe, *, is_continued: bool, warn: Callable[[str], None]) -> str | None:
    """Make this driver the owner of the run's mirror; refuse one with checkpoints of another run."""
    mirror, folder = recipe.checkpoint.mirror, recipe.run_folder
    if mirror is None:
        return None
    if not is_continued:
        refuse_occupied(mirror, folder.name)
    claim, problem = claim_mirror(mirror, folder)
    if problem:
        warn(f"checkpoint.mirror {mirror.url} cannot be claimed now, and is when it can be reached: {problem}")
    return claim


def _notify_on(display: Sink) -> Callable[[str], None]:
    """Return what shows a line before the run has an observer: fetching a checkpoint takes long."""
    return lambda text: display.record(Record(sequence=0, time=datetime.now(UTC), event=Noted(text=text)))
