"""The recipe's section about checkpoints: when to save, what to keep, and where a second copy goes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megarl.config.section import Section


class KeepBestConfig(Section):
    metric: str = "accuracy"
    """The evaluation's metric to compare."""
    mode: Literal["max", "min"] = "max"
    """Whether larger or smaller is better."""


class MirrorConfig(Section):
    """A copy of the checkpoints in an object store or on another disk, made in the background after each save. A run
    whose disk is lost resumes from it."""

    url: Annotated[str, Field(min_length=1)]
    """`s3://bucket/folder`, `gs://bucket/folder` or `file:///folder`; checkpoints are below it, in a folder with the
    run's name. Needs the extra `megarl[s3]` or `megarl[gs]`; keys and endpoint come from the store's own settings,
    such as AWS_ENDPOINT_URL."""
    stall_s: PositiveFloat = 300
    """A transfer in which nothing moves for so long is ended, and tried again later."""
    finish_s: NonNegativeFloat = 600
    """How long a run that is done waits for its last checkpoint to be copied, by a store that takes it."""


class CheckpointConfig(Section):
    """Checkpoints are in `<run>/checkpoints/step_N`; `model` in one is a Hugging Face folder. A stopped run resumes
    from the newest."""

    save_every_steps: PositiveInt | None = 50
    """Steps between two saves, which run in the background; null saves only at the end, at a new best, and when the run
    is asked to stop (SIGTERM)."""
    save_at_end: bool = True
    """Save the last step; a run whose last step cannot be saved ends with exit code 4."""
    keep_last: PositiveInt = 2
    """How many checkpoints to keep; older ones are removed once a new one is complete."""
    keep_best: KeepBestConfig | None = None
    """Save every step whose evaluation beats all before it, and keep that one in addition to the last ones."""
    contents: Literal["everything", "weights"] = "everything"
    """A run can resume only from `everything`: weights, optimizer and the state of the run."""
    grace_s: PositiveFloat = 120
    """Time to save after SIGTERM or SIGUSR1; past it, or after a second SIGTERM, the run ends at once."""
    mirror: MirrorConfig | None = None
    """A second place for the checkpoints; null has none."""
