from __future__ import annotations

import pytest

from megarl.config.checks import files as module
from megarl.config.checks.files import check_loggers, check_mirror
from megarl.config.recipe import MirrorConfig, MlflowConfig, ObserveConfig, TensorboardConfig, WandbConfig


def test_what_is_not_installed_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    everything = ObserveConfig(
        tensorboard=TensorboardConfig(),
        wandb=WandbConfig(project="sums"),
        mlflow=MlflowConfig(tracking_uri="http://127.0.0.1:5000"),
    )
    assert [str(problem) for problem in check_loggers(everything)] == [
        "observe.tensorboard: tensorboardX is not installed; run `pip install 'megarl[tensorboard]'` or remove the key",
        "observe.wandb: wandb is not installed; run `pip install 'megarl[wandb]'` or remove the key",
        "observe.mlflow: mlflow is not installed; run `pip install 'megarl[mlflow]'` or remove the key",
    ]


def test_what_is_installed_or_not_asked_for_is_no_problem() -> None:
    assert list(check_loggers(ObserveConfig(tensorboard=TensorboardConfig()))) == []


def test_a_store_whose_package_is_missing_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(check_mirror(MirrorConfig(url="s3://bucket/runs"))) == []
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    (problem,) = check_mirror(MirrorConfig(url="gs://bucket/runs"))
    assert str(problem) == "checkpoint.mirror.url: gcsfs is not installed; run `pip install 'megarl[gs]'`"
    (problem,) = check_mirror(MirrorConfig(url="s3://"))
    assert str(problem) == "checkpoint.mirror.url: s3:// names no place; write s3://PLACE"
