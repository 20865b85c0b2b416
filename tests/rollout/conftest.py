"""One real engine per tensor-parallel size for the whole session: each takes half a minute to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rollout.engines import ServedModel, serve


@pytest.fixture(scope="session")
def qwen2_tp1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    served = serve(tmp_path_factory.mktemp("qwen2"), "qwen2", tensor=1, tied=False)
    yield served
    served.process.stop()


@pytest.fixture(scope="session")
def qwen3_tp2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    served = serve(tmp_path_factory.mktemp("qwen3"), "qwen3", tensor=2, tied=True)
    yield served
    served.process.stop()


@pytest.fixture(params=["qwen2_tp1", "qwen3_tp2"])
def served(request: pytest.FixtureRequest) -> ServedModel:
    """Each of the shared engines in turn."""
    model: ServedModel = request.getfixturevalue(request.param)
    return model
