"""What has to be settled before any test module is imported, and what several packages' tests share.

One real engine per tensor-parallel size for the whole session, which takes half a minute to start, and one set of rank
processes for each file. Imports are inside the fixtures: a test that needs none of them does not wait for torch.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from megarl.env import LOCAL_RAY_ENVIRONMENT, RAY_ENVIRONMENT

if TYPE_CHECKING:
    from tests.engine.engines import ServedModel
    from tests.engine.template import EngineTemplate
    from tests.train.cluster import Cluster

pytest_plugins = ["tests.faults.matrix", "tests.packages", "tests.schedule", "pytester"]

# Images of containers forbid it; then each process of a test compiles all that it imports, torch and SGLang included.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Ray reads its environment when it is imported, and collecting the tests imports it before any of them starts one.
os.environ.update({**RAY_ENVIRONMENT, **LOCAL_RAY_ENVIRONMENT})

# A property is about values: how long an example takes says something about the machine. Thirty examples find what a
# hundred do, run after run; a property with rare cases asks for more.
settings.register_profile("unhurried", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in arguments}))
    return True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if wanting_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in wanting_gpu:
                item.add_marker(pytest.mark.skip(reason="NOT TESTED: torch sees no CUDA device here"))


YARN: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
"""Stretched angles: engine, trainer and transformers agree about them."""


@pytest.fixture(scope="session")
def engine_template() -> EngineTemplate:
    from tests.engine.template import EngineTemplate
    from tests.processes import template_address
    from tests.schedule import WATCH

    return EngineTemplate(template_address("tests.engine.template"), WATCH.refuse)


@pytest.fixture(scope="session")
def real_engines(engine_template: EngineTemplate) -> Iterator[None]:
    """Let the tests that ask for this start engines, forked from a template; see tests/schedule.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.engine.process.start_guarded", engine_template.start_guarded)
        yield


@pytest.fixture(scope="session")
def real_ranks() -> None:
    """Let the tests that ask for this start Megatron ranks."""


@pytest.fixture(scope="session")
def real_ray() -> None:
    """Let the tests that ask for this start a Ray and join it in their own process."""


@pytest.fixture(scope="session")
def whole_run() -> None:
    """Let the tests that ask for this start `megarl train`."""


@pytest.fixture(scope="session")
def qwen2_tp1(real_engines: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    from tests.engine.engines import serve

    served = serve(tmp_path_factory.mktemp("qwen2"), "qwen2", tensor=1, tied=False)
    yield served
    served.process.stop()


@pytest.fixture(scope="session")
def qwen3_tp2(real_engines: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    from tests.engine.engines import serve

    served = serve(tmp_path_factory.mktemp("qwen3"), "qwen3", tensor=2, tied=True, rope=YARN)
    yield served
    served.process.stop()


@pytest.fixture(params=["qwen2_tp1", "qwen3_tp2"])
def served(request: pytest.FixtureRequest, qwen2_tp1: ServedModel, qwen3_tp2: ServedModel) -> ServedModel:
    """Return each of the shared engines in turn."""
    return {"qwen2_tp1": qwen2_tp1, "qwen3_tp2": qwen3_tp2}[request.param]


# Not for the whole session: each process group that was ever made has threads, which wake up a hundred times a second.
@pytest.fixture(scope="module")
def cluster(real_ranks: None) -> Iterator[Cluster]:
    from tests.train.cluster import Cluster

    cluster = Cluster()
    yield cluster
    cluster.stop()
