"""Two Ray nodes, engines without a model and a tokenizer, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cluster.local_ray import LocalRay
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from tests.rollout.planes import NUM_ENGINES, two_nodes
from tests.run.seeded_engine import SeededEngines, seeded_engines


@pytest.fixture(scope="module")
def nodes(real_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRay]:
    with two_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, TinyShape(), seed=1)
    return folder


@pytest.fixture(scope="module")
def engines() -> Iterator[SeededEngines]:
    with seeded_engines(NUM_ENGINES) as engines:
        yield engines
