"""Scores without training."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from megarl.cli.evaluate import evaluation_document, result_table
from megarl.cli.main import run
from megarl.config.checks.algorithm import check_algorithm
from megarl.config.document import read_document
from megarl.config.load import validated
from megarl.data.rollout_files import SampledRollout, rollouts_file, write_rollouts
from megarl.observe.event_file import EVENTS_FILE
from megarl.observe.event_log import EventLog
from megarl.results import EvalResult, Grade, Grades
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from megarl.types import JsonValue, PolicyVersion
from tests.data.test_rollout_files import decode, sampled
from tests.observe.samples import records, run_started
from tests.repository import ROOT


@pytest.mark.parametrize(
    "name", ["quickstart", "quickstart_ppo", "quickstart_async", "quickstart_dapo", "quickstart_distill"]
)
def test_any_recipe_becomes_one_that_only_evaluates(name: str) -> None:
    document = read_document(ROOT / "recipes" / f"{name}.yaml")
    changed = evaluation_document(
        document, model=Path("model"), data=[Path("other.parquet")], rollouts_per_prompt=4, max_prompts=10
    )
    recipe = validated(changed, source=name).recipe
    assert recipe.model.path == Path("model")
    assert recipe.data.eval == (Path("other.parquet"),)
    assert (recipe.roles.critic, recipe.roles.reference, recipe.roles.teacher) == (None, None, {})
    assert check_algorithm(recipe) == []
    assert recipe.evaluation is not None
    assert (recipe.evaluation.max_prompts, recipe.evaluation.runs_before_training) == (10, True)
    assert set(recipe.pools) == {recipe.roles.actor.pool, recipe.roles.used_pools["rollout"]}


def test_the_table_has_a_row_per_task_and_metric() -> None:
    def grade(accuracy: float, num_prompts: int) -> Grade:
        return Grade(
            num_prompts=num_prompts,
            rollouts_per_prompt=1,
            score_mean=accuracy,
            accuracy=accuracy,
            majority=accuracy,
            pass_at={},
        )

    grades = Grades(overall=grade(0.5, 10), by_source={"gsm8k": grade(0.75, 4), "math": grade(1 / 3, 6)})
    result = EvalResult(version=PolicyVersion(0), greedy=grades, sampled=None)
    out = StringIO()
    Console(file=out, width=100).print(result_table(result, model=Path("model")))
    rows = [[word for word in line.split() if word not in "┃│"] for line in out.getvalue().splitlines()]
    assert ["gsm8k", "accuracy", "0.7500", "0.2500", "4"] in rows
    assert ["all", "score", "0.5000", "10"] in rows


def test_a_model_without_a_recipe_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert run(["evaluate", str(tmp_path)]) == 2
    assert "name a recipe with --recipe" in capsys.readouterr().err


LENGTH = """
def compute_score(prompt, response, extra_info, ground_truth):
    assert prompt == "1+1=" and ground_truth == "2" and extra_info["level"] == 3
    return None if response == "?" else len(response) / 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that has stored the rollouts of two steps."""
    rows = [{"prompt": "1+1=", "ground_truth": "2", "extra_info": {"level": 3}}] * 2
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    data: dict[str, JsonValue] = {
        "train": [str(tmp_path / "train.parquet")],
        "max_prompt_tokens": 16,
        "ground_truth_key": "ground_truth",
    }
    path = tmp_path / "run"
    path.mkdir()
    log = EventLog(path / EVENTS_FILE)
    for record in records([replace(run_started(), recipe={"data": data})]):
        log.record(record)
    log.close()
    store(path, 1, [sampled("2"), sampled("22", position=1, reward=0.0)])
    store(path, 2, [sampled("2222", reward=0.0), sampled("?", position=1)])
    (tmp_path / "reward.py").write_text(LENGTH)
    return path


def store(path: Path, step: int, rollouts: Iterable[SampledRollout]) -> None:
    write_rollouts(rollouts_file(path, step), list(rollouts), decode=decode)


@pytest.mark.patient
def test_stored_rollouts_get_new_scores_beside_the_old_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rescore", str(folder), "--reward", str(folder.parent / "reward.py")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["step 1: 2 rollouts", "step 2: 2 rollouts"]
    (all_of_them,) = [line for line in lines if line.startswith("│ all")]
    # Stored 1, 0, 0 and new .5, 1, 2; one rollout has no new score.
    assert [cell.strip() for cell in all_of_them.strip("│").split("│")] == [
        *("all", "4", "0.3333", "1.1667", "3", "-0.756", "1")
    ]
    assert lines[-4:] == [
        "step 2, prompt train.parquet:1, rollout 0: 1 -> no score: ?",
        "step 2, prompt train.parquet:0, rollout 0: 0 -> 2: 2222",
        "step 1, prompt train.parquet:1, rollout 0: 0 -> 1: 22",
        "step 1, prompt train.parquet:0, rollout 0: 1 -> 0.5: 2",
    ]


def test_one_step_alone_may_be_scored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rescore", str(folder), "--reward", str(folder.parent / "reward.py"), "--step", "1"]) == 0
    assert "step 2" not in capsys.readouterr().out


def test_what_cannot_be_scored_again_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def complaint(*words: str) -> str:
        assert run(["rescore", *words]) != 0
        return capsys.readouterr().err.strip().splitlines()[-1].strip()

    good = str(folder.parent / "reward.py")
    assert complaint(str(folder), "--reward", good, "--step", "7").endswith(
        "no rollouts of step 7 are stored; choose one of 1, 2"
    )
    assert (
        complaint(str(folder), "--reward", "nowhere.py")
        == "reward.path: nowhere.py is not a file; name your Python file"
    )
    assert "no rollouts are stored here" in complaint(str(folder.parent), "--reward", good)
    store(folder, 3, [sampled("2", position=9)])
    assert complaint(str(folder), "--reward", good).endswith(
        "prompt train.parquet:9 of a stored rollout is not in data.train any more"
    )


class Engine(BaseHTTPRequestHandler):
    """An SGLang server that finds the first of two labels three times as likely as the second."""

    def do_GET(self) -> None:
        self._reply({"model_path": "judge", "is_generation": True})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first, second = body["token_ids_logprob"]
        labels = [[-0.5, first, None], [-0.5 - math.log(3), second, None]]
        meta = {"id": body["rid"], "prompt_tokens": len(body["input_ids"]), "output_token_ids_logprobs": [labels]}
        self._reply({"output_ids": [1], "meta_info": meta})

    def _reply(self, content: object) -> None:
        encoded = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, format: str, *_arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def engine_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_judge_whose_engines_run_scores_again(
    folder: Path, engine_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    top = folder.parent
    write_tiny_model(top / "model", TinyShape(), seed=1)
    recipe: dict[str, Any] = {
        "run": {"name": "other", "steps": 1, "device": "cpu"},
        "model": {"path": str(top / "model")},
        "data": {"train": [str(top / "train.parquet")], "max_prompt_tokens": 16, "ground_truth_key": "ground_truth"},
        "pools": {"train": {"gpus_per_node": 1}, "rollout": {"gpus_per_node": 1}},
        "roles": {
            "actor": {"pool": "train"},
            "rollout": {"pool": "rollout"},
            "judge": {"strict": {"endpoints": [{"url": engine_url}], "model": str(top / "model")}},
        },
        "algorithm": {"kind": "grpo"},
        "sampling": {"max_response_tokens": 8},
        "train": {"prompts_per_step": 2, "tokens_per_micro_batch": 64},
        "reward": {
            "kind": "engine_judge",
            "template": "{response}?",
            "answers": {"right": 1.0, "wrong": 0.0},
            "is_expected": True,
        },
    }
    (top / "other.yaml").write_text(json.dumps(recipe))
    assert run(["rescore", str(folder), "--reward", str(top / "other.yaml"), "--step", "1"]) == 0
    assert "step 1, prompt train.parquet:1, rollout 0: 0 -> 0.75: 22" in capsys.readouterr().out
    recipe["pools"]["judges"] = {"gpus_per_node": 1}
    recipe["roles"]["judge"]["strict"] = {"pool": "judges", "model": str(top / "model")}
    (top / "other.yaml").write_text(json.dumps(recipe))
    assert run(["rescore", str(folder), "--reward", str(top / "other.yaml")]) != 0
    assert "which only a run starts; name engines that run already in its endpoints" in capsys.readouterr().err
