"""Everything that can be wrong with machine, data and reward is found before a run moves or starts anything."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config.recipe import Recipe
from megarl.errors import CheckpointError, DataError, EngineError, MachineError
from megarl.run import preflight
from megarl.run.preflight import check_start
from megarl.tools.quickstart.arithmetic import ArithmeticFiles, make_arithmetic


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ArithmeticFiles:
    return make_arithmetic(tmp_path_factory.mktemp("inputs"), num_train=12, num_sft=1, num_eval=1)


def recipe_of(files: ArithmeticFiles, **sections: object) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "sample", "steps": 2, "device": "cpu"},
            "model": {"path": files.model},
            "data": {"train": [files.train], "max_prompt_tokens": 16},
            "pools": {"all": {"gpus_per_node": 1}},
            "roles": {"actor": {"pool": "all"}, "rollout": {"pool": "all"}},
            "algorithm": {"kind": "grpo"},
            "train": {"prompts_per_step": 2},
            **sections,
        }
    )


def test_a_good_start_returns_what_was_read(files: ArithmeticFiles) -> None:
    assert len(check_start(recipe_of(files), address=None).train.prompts) == 12


def test_prompts_that_are_too_long_are_counted(files: ArithmeticFiles) -> None:
    recipe = recipe_of(files, data={"train": [files.train], "max_prompt_tokens": 2})
    with pytest.raises(DataError, match=r"12 of 12 rows are longer than data\.max_prompt_tokens 2"):
        check_start(recipe, address=None)


def test_weights_of_another_configuration_are_found(files: ArithmeticFiles, tmp_path: Path) -> None:
    model = Path(shutil.copytree(files.model, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 4 * config["intermediate_size"]}))
    with pytest.raises(CheckpointError, match=r"has shape \[.*\], config\.json says \[.*\]; do these files belong"):
        check_start(recipe_of(files, model={"path": model}), address=None)
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.\d\.\S+ is in none of its 1 safetensors file"):
        check_start(recipe_of(files, model={"path": model}), address=None)
    (weights,) = model.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="is it complete"):
        check_start(recipe_of(files, model={"path": model}), address=None)


def test_a_null_in_a_late_row_is_named(files: ArithmeticFiles, tmp_path: Path) -> None:
    rows = pq.read_table(files.train).to_pylist()
    rows[7]["reward_model"]["ground_truth"] = None
    path = tmp_path / "null.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(DataError, match=r"null\.parquet row 7, column reward_model\.ground_truth: is null"):
        check_start(recipe_of(files, data={"train": [path], "max_prompt_tokens": 16}), address=None)


def test_a_reward_that_raises_is_found_with_its_row(files: ArithmeticFiles, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(data_source, solution_str, ground_truth):\n    return 1 / 0\n")
    recipe = recipe_of(files, reward={"kind": "function", "path": path, "workers": 1})
    with pytest.raises(DataError, match=r"prompt train\.parquet:0, .* raised ZeroDivisionError.*reward\.py:2"):
        check_start(recipe, address=None)


def test_a_misspelt_component_is_found(files: ArithmeticFiles, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth):\n    return {'score': 1, 'length': 2}\n"
    )
    recipe = recipe_of(
        files,
        reward={"kind": "function", "path": path, "workers": 1},
        algorithm={"kind": "gdpo", "weights": {"lenght": 1.0}},
    )
    with pytest.raises(DataError, match=r"algorithm\.weights\.lenght: .* has no component lenght; it has length"):
        check_start(recipe, address=None)


def test_a_data_source_without_a_scorer_is_found(files: ArithmeticFiles) -> None:
    recipe = recipe_of(files, reward={"kind": "by_source", "sources": {"other": {"kind": "exact"}}})
    with pytest.raises(DataError, match=r"reward\.sources has no scorer for data_source"):
        check_start(recipe, address=None)


def test_a_gpu_run_without_a_gpu_fails_at_once(
    files: ArithmeticFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_GPU_DEVICES", (tmp_path / "nvidia0",))
    recipe = recipe_of(files, run={"name": "sample", "steps": 2, "device": "cuda"})
    with pytest.raises(MachineError, match=r"this machine has no GPU: set run\.device: cpu"):
        check_start(recipe, address=None)
    check_start(recipe, address="10.0.0.1:6379")


def test_a_judge_that_nobody_serves_is_one_line_before_anything_starts(files: ArithmeticFiles) -> None:
    judge = {"endpoints": [{"url": "http://127.0.0.1:9"}], "model": files.model}
    roles = {"actor": {"pool": "all"}, "rollout": {"pool": "all"}, "judge": {"fair": judge}}
    reward = {"kind": "engine_judge", "template": "{response}?", "answers": {"yes": 1, "no": 0}}
    with pytest.raises(EngineError, match=r"the engines of roles\.judge\.fair\.endpoints must be running") as caught:
        check_start(recipe_of(files, roles=roles, reward=reward), address=None)
    assert "\n" not in str(caught.value)


def test_a_port_in_use_is_found(files: ArithmeticFiles) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(MachineError, match=rf"observe\.metrics_port: cannot listen on 127\.0\.0\.1:{port}"):
            check_start(recipe_of(files, observe={"metrics_port": port}), address=None)
