"""The scores that teachers on engines compute for each rollout, and the choice of a prompt's teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.roles import RolesConfig
from megarl.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """The scores that teachers compute for every rollout."""

    num_top: int
    """K, the likeliest tokens at each place."""
    vocab: int
    """The size of the policy's vocabulary: the likeliest tokens are below it."""
    sources: tuple[tuple[str, tuple[str, ...]], ...]
    """The sources of each teacher, which is given by its key below `roles`."""

    @property
    def width(self) -> int:
        """Columns per token: its log-probability, those of the K likeliest tokens, and their ids."""
        return 1 + 2 * self.num_top


def teaching_of(algorithm: AlgorithmConfig, roles: RolesConfig, vocab: int) -> Teaching | None:
    """Return the scores that a recipe needs; None without a teacher on engines. `vocab` is that of the policy."""
    distillation = algorithm.distillation
    sources = tuple((role, each.sources) for role, each in roles.teachers.items() if each.kind == "engines")
    if distillation is None or not sources:
        return None
    return Teaching(num_top=distillation.top_k, vocab=vocab, sources=sources)


def teacher_of(source: str, sources: Mapping[str, Sequence[str]]) -> str:
    """Return the teacher of a prompt's source: the one that names it, else the one that names none."""
    for name, named in sources.items():
        if source in named:
            return name
    for name, named in sources.items():
        if not named:
            return name
    raise DataError(
        f"no teacher for prompts of source {source}: name it in the sources of one of roles.teacher, "
        "or leave the sources of one out"
    )
