"""Policies that are trained side by side, in real engines and ranks: each ends with the bits of one that is alone."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from megarl.observe.events import CheckpointSaved, EngineChanged, Restarted, RunStarted
from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.engine.template import EngineTemplate
from tests.run.runs import Run, await_event, kill, run, started

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(set(solution_str)) % 2)}
"""
COMMON = (
    "model.lora={rank: 8, alpha: 16}",
    "roles.rollout.canary_every=1",
    "checkpoint={save_every_steps: 1, keep_last: 4}",
    "data.eval=[]",
    "evaluation=null",
)


@pytest.fixture(scope="module")
def own(folder: Path) -> dict[str, dict[str, object]]:
    """The keys that each of two policies sets for itself."""
    make_arithmetic(folder / "other", num_train=64, num_sft=16, num_eval=16)
    (folder / "distinct.py").write_text(REWARD)
    return {
        "sums": {"run": {"steps": 3}},
        "distinct": {
            "run": {"seed": 7, "steps": 4},
            "data": {"train": [str(folder / "other" / "train.parquet")]},
            "reward": {"kind": "function", "path": str(folder / "distinct.py"), "workers": 1},
            "algorithm": {"kind": "rloo"},
            "sampling": {"rollouts_per_prompt": 6},
            "train": {"prompts_per_step": 4, "optimizer": {"learning_rate": 3e-3}},
        },
    }


@pytest.fixture(scope="module")
def alone(folder: Path, own: dict[str, dict[str, object]], engine_template: EngineTemplate) -> dict[str, Run]:
    done = {}
    for name, keys in own.items():
        words = [
            f"{section}.{key}={json.dumps(value)}" for section, each in keys.items() for key, value in _items(each)
        ]
        words = [word for word in words if not word.startswith(("reward.", "algorithm."))]
        words += [f"{key}={json.dumps(keys[key])}" for key in ("reward", "algorithm") if key in keys]
        done[name] = run(folder, f"alone_{name}", *COMMON, *words, engines=engine_template)
        assert done[name].exit_code == 0, done[name].output
    return done


def _items(section: object) -> list[tuple[str, object]]:
    assert isinstance(section, dict)
    return list(section.items())


def _check_equal(name: str, folder: Path, alone: dict[str, Run], output: str) -> dict[str, Run]:
    side_by_side = {}
    for policy, expected in alone.items():
        each = Run(folder=folder / "runs" / name / "policies" / policy, exit_code=0, output=output)
        last = len(expected.steps)
        assert each.tensors(last) == expected.tensors(last), policy
        before = [event.summary for event in expected.steps]
        after = [event.summary for event in each.steps][-last:]
        assert [(one.rollouts, one.update) for one in after] == [(one.rollouts, one.update) for one in before]
        side_by_side[policy] = each
    return side_by_side


@pytest.mark.fault("an engine is killed under several policies", "it gets all of them again; the same bits")
@pytest.mark.slow
def test_policies_side_by_side_end_with_the_bits_of_each_alone(
    folder: Path, own: dict[str, dict[str, object]], alone: dict[str, Run], engine_template: EngineTemplate
) -> None:
    once = str(folder / "killed_in_publish")
    lost = {"point": "received", "of": "publish distinct", "step": 2, "kind": "kill", "once": once}
    words = (*COMMON, f"policies={json.dumps(own)}")
    done = run(folder, "many", *words, faults=[lost], engines=engine_template)
    assert done.exit_code == 0, done.output
    side_by_side = _check_equal("many", folder, alone, done.output)
    assert "distinct: step 4/4" in done.output
    for each in side_by_side.values():
        states = [event.state for event in each.events if isinstance(event, EngineChanged)]
        assert "dead" in states, "each run shows what became of the engine"
        assert states[-1] != "dead"
    assert Path(once).exists()
    again = run(folder, "many", *words, engines=engine_template)
    assert again.exit_code == 0, again.output
    assert len(_check_equal("many", folder, alone, again.output)) == len(own)


@pytest.mark.fault(
    "kill -9 or SIGTERM of a driver with several policies, then kill -9 of a rank",
    "each goes on from its own checkpoint; the same bits",
)
@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_policies_go_on_from_checkpoints_of_their_own(
    folder: Path,
    own: dict[str, dict[str, object]],
    alone: dict[str, Run],
    engine_template: EngineTemplate,
    ending: signal.Signals,
) -> None:
    name, words = f"ended_by_{ending.name}", (*COMMON, f"policies={json.dumps(own)}")
    runs = {policy: folder / "runs" / name / "policies" / policy for policy in own}
    with started(folder, name, *words, engines=engine_template) as process:
        await_event(runs["distinct"], process, CheckpointSaved, count=2)
        if ending is signal.SIGKILL:
            kill(process)
        else:
            process.send_signal(ending)
            process.wait(timeout=1200)
    lost = folder / f"{name}.lost"
    faults = [{"point": "optimizer", "of": "actor", "rank": 0, "step": 4, "kind": "kill", "once": str(lost)}]
    resumed = run(folder, name, *words, faults=faults, engines=engine_template)
    assert resumed.exit_code == 0, resumed.output
    assert lost.exists()
    ended = {policy: Run(folder=each, exit_code=0, output=resumed.output) for policy, each in runs.items()}
    for policy, each in ended.items():
        last = len(alone[policy].steps)
        assert each.tensors(last) == alone[policy].tensors(last), policy
    starts = [event.resumed_step for event in ended["distinct"].events if isinstance(event, RunStarted)]
    assert starts[0] == 0
    assert starts[-1] >= 2
    assert any(isinstance(event, Restarted) and event.role == "trainers" for event in ended["distinct"].events)
