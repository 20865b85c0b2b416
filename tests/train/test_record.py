"""Ranks record the same values of a sample, however the model is split over them."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.weights.recordings import Recording, hook_points
from tests.train import jobs
from tests.train.cluster import Cluster
from tests.train.conftest import Models
from tests.train.samples import make_samples
from tests.train.splits import SPLITS, packed, setup_of


def test_recordings_do_not_depend_on_the_split(cluster: Cluster, models: Models, tmp_path: Path) -> None:
    model = models.get("llama", tied=True)
    (sample,) = make_samples(1, vocab=model.shape.vocab, seed=3)
    num_tokens = len(sample.prompt_ids) + len(sample.rollout.token_ids) - 1
    recordings = []
    for name in ("TP1", "TP2-SP", "PP2-VPP2"):
        folder = tmp_path / name
        folder.mkdir()
        world, actor = SPLITS[name]
        batch = packed([sample], world=world, actor=actor)
        records = cluster.run(world, jobs.record, setup_of(model, actor), batch, folder)
        assert [record.logprobs is not None for record in records].count(True) == 1
        recordings.append(Recording(sorted(folder.iterdir()), num_tokens=num_tokens))
    whole, *others = recordings
    for point in hook_points(model.shape)[:-2]:
        for found in others:
            torch.testing.assert_close(found.whole(point.name), whole.whole(point.name), rtol=0, atol=1e-5)
