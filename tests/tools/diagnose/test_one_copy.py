from __future__ import annotations

from pathlib import Path

import pytest

from megarl.errors import ConfigError, MachineError
from megarl.tools.diagnose.one_copy import one_copy
from tests.planner.recipes import make_recipe


def test_one_copy_of_the_policy_and_one_engine_with_the_layout_of_the_recipe() -> None:
    small = one_copy(make_recipe("run.device=cpu"), name="diagnose", num_devices=10)
    roles = small.recipe.roles
    assert small.notes == ()
    assert small.recipe.data_parallel == 1
    assert (roles.actor.tensor, roles.actor.pipeline) == (4, 2)
    assert roles.rollout is not None
    assert roles.rollout.pool is not None
    assert small.recipe.pools[roles.rollout.pool].gpus == roles.rollout.tensor == 2
    assert small.recipe.run_folder == Path("runs/test/diagnose")


def test_a_layout_that_does_not_fit_becomes_one_device_each_and_that_is_said() -> None:
    recipe = make_recipe("run.device=cpu", "roles.actor.is_sequence_parallel=true")
    small = one_copy(recipe, name="diagnose", num_devices=9)
    roles = small.recipe.roles
    assert roles.rollout is not None
    assert [pool.gpus for pool in small.recipe.pools.values()] == [1, 1]
    assert (roles.actor.model_parallel, roles.actor.is_sequence_parallel, roles.rollout.tensor) == (1, False, 1)
    assert small.notes == (
        "tensor 4 * pipeline 2 of the trainer and tensor 2 of the engine need more than the 9 devices here: "
        "compared with 1 each",
    )


def test_on_gpus_the_modules_run_one_by_one_and_that_is_said() -> None:
    small = one_copy(make_recipe("roles.rollout.sglang={log_requests: true}"), name="diagnose", num_devices=16)
    assert small.recipe.roles.rollout is not None
    assert small.recipe.roles.rollout.sglang == {
        "log_requests": True,
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
    }
    assert small.notes == ("the engine runs without CUDA graphs",)


def test_a_single_device_is_not_enough() -> None:
    with pytest.raises(MachineError, match="a trainer and an engine need 2 devices, there is 1"):
        one_copy(make_recipe(), name="diagnose", num_devices=1)


def test_a_recipe_without_engines_has_nothing_to_compare() -> None:
    with pytest.raises(ConfigError, match=r"roles\.rollout: missing: there is no engine"):
        one_copy(make_recipe("roles.rollout=null"), name="diagnose", num_devices=8)
