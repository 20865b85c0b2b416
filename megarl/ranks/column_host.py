"""The methods of a rank's process that read columns of tokens on its node: to select from them, to assign credit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import ray

from megarl.algo.advantage import Float64Array
from megarl.algo.token_credit import CreditTask, PartCredit
from megarl.cluster.worker_group import Fence
from megarl.ranks.remote_columns import RemotePart
from megarl.tokens import ColumnName, SampleColumn, by_sample


class ColumnHost:
    """The methods of a rank's process that read columns of tokens on its node."""

    def __init__(self) -> None:
        self._fence = Fence()
        self._credit: PartCredit | None = None

    def select(self, part: Sequence[ray.ObjectRef], sample_ids: Collection[int]) -> SampleColumn:
        """Return the column of these samples from a part that is on this node."""
        column: SampleColumn = ray.get(part[0])
        return column.only(sample_ids)

    def compute_credit(
        self,
        token: int,
        task: CreditTask,
        references: Mapping[ColumnName, Sequence[ray.ObjectRef]],
        sample_ids: frozenset[int],
    ) -> Float64Array:
        """Assign raw credit to these samples of a step; return a few numbers of each that has a score."""
        self._fence.enter(token)
        columns = {name: by_sample(ray.get(list(parts))) for name, parts in references.items()}
        self._credit = task.compute(
            {name: {i: arrays[i] for i in sorted(sample_ids)} for name, arrays in columns.items()}
        )
        return self._credit.rows

    def normalise_credit(self, token: int, scales: Float64Array) -> tuple[dict[ColumnName, RemotePart], Float64Array]:
        """Scale the credit; its columns stay on this node, and the size of each rollout's is returned."""
        self._fence.enter(token)
        assert self._credit is not None, "compute_credit comes first"
        credit, self._credit = self._credit, None
        columns, sizes = credit.normalise(scales)
        return {name: RemotePart.of(column) for name, column in columns.items()}, sizes
