"""The Python interface: recipes from code, the user's functions, doctests; and the examples as they are printed."""

from __future__ import annotations

import doctest
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import megarl
from megarl import api
from megarl.algo.advantage import Outcomes
from megarl.algo.estimators import choose_estimator
from megarl.cli.display import NotebookDisplay
from megarl.config.algorithm import FunctionLossConfig, GrpoConfig
from megarl.config.environment import ClassEnvironmentConfig
from megarl.config.recipe import Recipe
from megarl.episodes.build import check_environment
from megarl.errors import ConfigError, DataError, MachineError
from megarl.observe.events import Event, Record, RunStarted
from megarl.system.user_code import load_code
from megarl.tools.quickstart.arithmetic import make_arithmetic
from megarl.tools.quickstart.calculator import make_calculator
from tests.engine.template import EngineTemplate
from tests.observe.samples import evaluated, make_recipe, step_finished
from tests.repository import ROOT
from tests.run.runs import forked

EXAMPLES = ROOT / "examples"
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def test_a_recipe_is_the_same_from_a_file_a_mapping_and_code() -> None:
    from_file = megarl.load(QUICKSTART, set={"run.steps": 3})
    assert from_file.run.steps == 3
    assert megarl.load(from_file) == from_file
    assert megarl.load(from_file.model_dump()) == from_file
    assert megarl.Recipe is Recipe


def test_mistakes_are_told_as_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match=r"train\.learning_rate: unknown key; did you mean train\.optimizer"):
        megarl.load(QUICKSTART, set={"train.learning_rate": 1e-4})


def test_a_function_of_a_module_is_named_and_a_local_one_travels(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path).run
    assert api._reference(make_arithmetic, "reward", recipe).endswith("quickstart/arithmetic.py:make_arithmetic")
    factor = 3
    held = api._reference(lambda number: factor * number, "estimator", recipe)
    code = (
        "import sys; from megarl.system.user_code import load_code;"
        f"sys.exit(load_code({held!r}, key='algorithm.estimator')(14))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 42


def test_files_that_are_unpickled_are_their_owners_alone(tmp_path: Path) -> None:
    """Who could write them could run code as the next one who starts the run."""
    recipe = make_recipe(tmp_path).run
    reference = api._reference(lambda: 1, "estimator", recipe)
    file = Path(reference.rpartition(":")[0])
    assert [path.stat().st_mode & 0o777 for path in (file, file.parent)] == [0o600, 0o700]
    api._reference(lambda: 2, "estimator", recipe)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    file.parent.chmod(0o777)
    with pytest.raises(MachineError, match="others may write there"):
        api._reference(lambda: 1, "estimator", recipe)


def test_own_code_goes_to_its_keys(tmp_path: Path) -> None:
    recipe = megarl.load(QUICKSTART, set={"run.folder": tmp_path})
    own = {"loss": "mine.py:loss", "keeps": "mine.py:keeps", "scorer": "pack.mod:Scorer"}
    changed = megarl.load(recipe, set=api.code_keys(own, recipe.run))
    assert isinstance(changed.algorithm, GrpoConfig)
    assert changed.algorithm.loss == FunctionLossConfig(kind="function", code="mine.py:loss")
    assert changed.algorithm.loss.code == f"{Path('mine.py').absolute()}:loss"
    assert changed.algorithm.filter is not None
    assert changed.reward.kind == "scorer"
    with pytest.raises(ConfigError, match="give a reward or a scorer, not both"):
        api.code_keys({"reward": "a.py:f", "scorer": "a.py:g"}, recipe.run)


SCRIPT_WITH_AN_ENVIRONMENT = """
from __future__ import annotations

import sys
from typing import Literal

from megarl import api
from megarl.config.recipe import RunConfig

GREETING = "hello"


class Greeter:
    def __init__(self, ground_truth):
        self.truth = ground_truth

    def greet(self, name: Literal["ann", "bob"]) -> str:
        \"\"\"Greet somebody.\"\"\"
        return f"{GREETING} {name}"

    def score(self, transcript):
        return 1.0


keys = api.code_keys({"environment": Greeter}, RunConfig(name="greeted", steps=1, folder=sys.argv[1]))
print(keys["environment.path"], keys["environment.name"])
"""


@pytest.mark.patient
def test_an_environment_of_a_script_travels_with_its_types(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT_WITH_AN_ENVIRONMENT)
    words = [sys.executable, str(script), str(tmp_path)]
    path, name = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stdout.split()
    good = ROOT / "tests" / "config" / "good.yaml"
    keys = {"environment.kind": "class", "environment.path": path, "environment.name": name}
    config = megarl.load(good, set={**keys, "environment.max_turns": 2}).environment
    assert isinstance(config, ClassEnvironmentConfig)
    assert (config.max_turns, check_environment(config)) == (2, [])
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import sys; from pathlib import Path; from megarl.system.user_code import load_code;"
        "from megarl.episodes.worker import tool_methods;"
        f"cls = load_code({f'{path}:{name}'!r}, key='environment');"
        "print(cls('42').greet('ann'), tool_methods(cls)['greet'].schema.parameters['properties']['name']['enum'])"
    )
    done = subprocess.run([sys.executable, str(worker)], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "hello ann ['ann', 'bob']\n", done.stderr


def test_an_environment_keeps_the_other_keys_of_its_section(tmp_path: Path) -> None:
    recipe = megarl.load(ROOT / "recipes" / "quickstart_tools.yaml", set={"run.folder": tmp_path})
    changed = megarl.load(recipe, set=api.code_keys({"environment": "mine.py:Own"}, recipe.run)).environment
    assert isinstance(changed, ClassEnvironmentConfig)
    assert (changed.path, changed.name, changed.max_turns) == (Path("mine.py"), "Own", 3)


OUTCOMES = Outcomes(
    rewards=np.array([1.0, 0.0]), groups=np.array([0, 0]), loss_masks=(np.array([True, False]), np.array([True]))
)


def own_estimator(tmp_path: Path, body: str) -> GrpoConfig:
    path = tmp_path / "mine.py"
    path.write_text(f"def advantages(outcomes):\n    return {body}\n")
    return GrpoConfig(kind="grpo", estimator=f"{path}:advantages")


def test_an_own_estimator_assigns_the_credit(tmp_path: Path) -> None:
    first, second = choose_estimator(own_estimator(tmp_path, "outcomes.rewards - 0.25"))(OUTCOMES).advantages
    assert (first.tolist(), second.tolist()) == ([0.75, 0.0], [-0.25])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[1.0]", "returned 1 advantages for 2 rollouts"),
        ("None", "returned a NoneType"),
        ("[[1, 2, 3], 1]", "rollout 0"),
        ("[float('nan'), 1]", "rollout 0"),
    ],
)
def test_what_an_own_estimator_may_not_return_is_a_sentence(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        choose_estimator(own_estimator(tmp_path, body))(OUTCOMES)


def test_code_that_is_missing_or_broken_is_a_sentence_with_its_key(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import json\nraise ValueError('no')\n")
    with pytest.raises(ConfigError, match=r"algorithm\.estimator: .* raised ValueError: no \(.*broken\.py:2"):
        load_code(f"{path}:f", key="algorithm.estimator")
    with pytest.raises(ConfigError, match="json has no load_; did you mean load"):
        load_code("json:load_", key="sampling.generator")


def test_doctests_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert doctest.testmod(api).failed == 0


class FakeOutput:
    def __init__(self) -> None:
        self.text = ""

    def update(self, shown: object) -> None:
        assert isinstance(shown, dict)
        self.text = shown["text/plain"]


def test_a_notebook_shows_one_output_that_changes() -> None:
    output = FakeOutput()
    display = NotebookDisplay(output)
    started = RunStarted(
        name="sample",
        folder="runs/sample",
        algorithm="grpo",
        steps=4,
        megarl_version="0",
        metrics_url=None,
        resumed_step=0,
        recipe={},
    )
    events: Sequence[Event] = (started, step_finished(1), evaluated(1, 0.5), step_finished(2))
    for number, event in enumerate(events):
        display.record(Record(sequence=number, time=datetime.now(UTC), event=event))
    lines = output.text.splitlines()
    assert lines[0].startswith("run sample: grpo, 4 steps")
    assert lines[-2].startswith("step 2/4")
    assert "reward 0.500" in lines[-1]
    assert output.text.count("step 1/4") == 0


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    make_arithmetic(folder / "data" / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    make_calculator(folder / "data" / "calculator", num_train=64, num_sft=16, num_eval=16)
    return folder


def run_example(project: Path, name: str) -> str:
    return run_words(project, sys.executable, str(EXAMPLES / name))


def run_words(project: Path, *words: str) -> str:
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_train_stays_a_function_when_its_namesake_is_imported() -> None:
    assert import_module("megarl.train.stats").__name__ == "megarl.train.stats"
    assert megarl.train.__module__ == "megarl.api"


ALL_STAGES = """
import megarl
from megarl.types import Score, ScoredGroup
from own_algorithm import RECIPES, centred_rewards, keeps, plain_ratio_loss
from own_stages import CountingGenerator


class LetterScorer:
    async def score(self, group):
        values = [float(sum(map(ord, rollout.text)) % 7) for rollout in group.rollouts]
        return ScoredGroup(group=group, scores=tuple(Score(value=value, components={}) for value in values))


if __name__ == "__main__":
    keys = {"run.name": "all_stages", "run.steps": 1, "model.path": "data/arithmetic/model", "data.eval": []}
    keys |= {"train.prompts_per_step": 4, "algorithm.filter": {"max_dropped_groups": 4096}, "evaluation": None}
    stages = {"scorer": LetterScorer, "generator": CountingGenerator, "keeps": keeps, "loss": plain_ratio_loss}
    result = megarl.train(RECIPES / "quickstart.yaml", set=keys, estimator=centred_rewards, **stages)
    print("rewards:", *result.history.reward.values)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
def test_a_run_with_an_own_reward_is_trained_read_and_returned_when_it_is_finished(project: Path) -> None:
    assert "step 2: reward " in run_example(project, "own_reward.py")
    assert "rollouts were kept" in run_example(project, "read_run.py")
    assert "the run is finished" in run_example(project, "own_reward.py")
    megarl = str(Path(sys.executable).with_name("megarl"))
    assert "pass@2" in run_words(project, megarl, "evaluate", "runs/own_reward", "-n", "2", "--max-prompts", "4")


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
def test_one_run_takes_all_stages_of_the_examples(project: Path, engine_template: EngineTemplate) -> None:
    script, output = project / "all_stages.py", project / "all_stages.out"
    script.write_text(ALL_STAGES)
    path = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    with forked(
        partial(run_beside_examples, script),
        [str(script)],
        folder=project,
        output=output,
        environment={"PYTHONPATH": path},
        engines=engine_template,
    ) as process:
        process.wait(timeout=1500)
    assert process.returncode == 0, output.read_text()
    rewards = output.read_text().splitlines()[-1].split()
    assert rewards[0] == "rewards:"
    assert 0 < float(rewards[1]) < 7


def run_beside_examples(script: Path) -> None:
    """Run a script in a process that is forked, whose path is not that of a new one."""
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize(
    ("example", "printed"),
    [
        ("own_algorithm.py", "'step': 1"),
        ("own_stages.py", "mean share of the majority"),
        ("own_environment.py", "mean reward: ("),
    ],
)
def test_an_example_runs_as_it_is_printed(project: Path, example: str, printed: str) -> None:
    assert printed in run_example(project, example)


def test_the_planning_example_runs_as_it_is_printed(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    runpy.run_path(str(EXAMPLES / "plan_gpus.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith("h100: fits")
