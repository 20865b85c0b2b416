"""Samples in a parquet file, for people to look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.types import TrainSample


def write_samples(path: Path, samples: Sequence[TrainSample]) -> None:
    """One row per sample: its tokens and text, and every number that was known of each token."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "prompt_ids": [sample.prompt_ids for sample in samples],
        "token_ids": [sample.rollout.token_ids for sample in samples],
        "text": [sample.rollout.text for sample in samples],
        "finish_reason": [sample.rollout.finish_reason.value for sample in samples],
        "loss_mask": [sample.rollout.loss_mask for sample in samples],
        "versions": [sample.rollout.versions for sample in samples],
        "rollout_logprobs": [sample.rollout.logprobs for sample in samples],
        "old_logprobs": [sample.old_logprobs for sample in samples],
        "reference_logprobs": [sample.reference_logprobs for sample in samples],
        "advantages": [sample.advantages for sample in samples],
        "values": [sample.values for sample in samples],
        "returns": [sample.returns for sample in samples],
    }
    pq.write_table(pa.table(columns), path)
