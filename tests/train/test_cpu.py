from __future__ import annotations

import torch

from tests.train import jobs
from tests.train.cluster import Cluster


def test_what_megatron_wants_on_a_gpu_is_on_the_cpu_and_only_inside_the_mode(cluster: Cluster) -> None:
    (answer,) = cluster.run(1, jobs.ask_for_cuda)
    assert answer == ("cpu", "cpu", "torch.cuda.FloatTensor", True)


def test_importing_the_stand_in_changes_nothing() -> None:
    import megarl.train.cpu  # noqa: F401

    assert torch.ones(1).type() == "torch.FloatTensor"
    assert torch.cuda.current_device.__module__ == "torch.cuda"
