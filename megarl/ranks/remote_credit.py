"""Credit that ranks assign from columns of tokens on their nodes; the driver sees a few numbers of each rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from megarl.algo.advantage import Float64Array
from megarl.algo.token_credit import CreditTask
from megarl.ranks.calls import ModelCalls
from megarl.ranks.ranks import RankGroup
from megarl.ranks.remote_columns import ColumnHost, RemoteColumn, RemotePart
from megarl.tokens import ColumnName, RolloutSums


async def assign_credit(
    ranks: RankGroup[ModelCalls],
    task: CreditTask,
    own: RemoteColumn,
    columns: Mapping[ColumnName, RemoteColumn],
) -> tuple[RolloutSums, dict[ColumnName, RemoteColumn]]:
    """Have the ranks that computed `own` assign the credit of its rollouts; return the credit's sums and columns."""
    tasks: dict[int, CreditTask] = {}
    samples: dict[int, frozenset[int]] = {}
    assigned: frozenset[int] = frozenset()
    for part in own.parts:  # rows of one sample may be in several
        samples[part.rank] = part.sample_ids - assigned
        tasks[part.rank] = task.among(samples[part.rank])
        assigned |= part.sample_ids
    started = [
        ranks.workers[rank].compute_credit.remote(
            tasks[rank], {name: column.references(ids) for name, column in columns.items()}, ids
        )
        for rank, ids in samples.items()
    ]
    parts: list[Float64Array] = await ranks.gather(ColumnHost.compute_credit.__name__, started, ranks=list(tasks))
    order = {sample_id: index for index, sample_id in enumerate(task.sample_ids)}
    indices = [[order[sample_id] for sample_id in of_rank.sample_ids] for of_rank in tasks.values()]
    back = np.argsort(np.concatenate(indices))  # the parts end to end are in the order of the ranks
    rows = np.concatenate(parts)[back]
    scales = task.scales(rows)
    if scales is None:
        return task.sums(rows), {}
    started = [
        ranks.workers[rank].normalise_credit.remote(scales[of_rank])
        for rank, of_rank in zip(tasks, indices, strict=True)
    ]
    normalised: list[tuple[dict[ColumnName, RemotePart], Float64Array]]
    normalised = await ranks.gather(ColumnHost.normalise_credit.__name__, started, ranks=list(tasks))
    by_rank = {rank: credit for rank, (credit, _) in zip(tasks, normalised, strict=True)}
    credit = {
        name: ranks.remote_column({rank: of_rank[name] for rank, of_rank in by_rank.items()})
        for name in normalised[0][0]
    }
    sizes = np.concatenate([sizes for _, sizes in normalised])[back]
    return replace(task.sums(rows), advantages=sizes), credit
