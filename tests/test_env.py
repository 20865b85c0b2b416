from __future__ import annotations

import pytest

from megarl.env import ONE_CARD, visible_gpus


def test_a_process_sees_the_gpus_it_is_given() -> None:
    assert visible_gpus(["2", "3"])["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "NCCL_HOSTID" not in visible_gpus(["2"])


def test_on_one_card_every_process_sees_the_first_gpu_and_is_a_host_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONE_CARD.name, "1")
    first, second = visible_gpus(["2"]), visible_gpus(["3"])
    assert first["CUDA_VISIBLE_DEVICES"] == second["CUDA_VISIBLE_DEVICES"] == "0"
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
