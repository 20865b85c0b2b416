from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.reward import ExactRewardConfig, FunctionRewardConfig
from megarl.errors import ConfigError, RewardError
from megarl.reward.build import UserScorer, check_reward
from megarl.types import ScoredGroup
from tests.reward.conftest import MakeGroup

MakeReward = Callable[..., FunctionRewardConfig]


def test_a_good_reward_has_no_problem(make_reward: MakeReward) -> None:
    assert check_reward(ExactRewardConfig(kind="exact")) == []
    config = make_reward("def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1")
    assert check_reward(config) == []


def test_a_reward_may_import_the_file_beside_it(tmp_path: Path, make_reward: MakeReward) -> None:
    (tmp_path / "my_parsing.py").write_text("ANSWER = 42")
    config = make_reward("from my_parsing import ANSWER\ndef compute_score(**sample): return ANSWER")
    assert check_reward(config) == []


def test_a_missing_file_is_a_problem(tmp_path: Path) -> None:
    config = FunctionRewardConfig(kind="function", path=tmp_path / "nothing.py")
    (problem,) = check_reward(config)
    assert problem.key == "reward.path"
    assert "nothing.py is not a file" in problem.message


@pytest.mark.parametrize(
    ("source", "key", "complaint"),
    [
        ("def compute_scores(**sample): return 1", "reward.name", "did you mean compute_scores?"),
        ("x = 1", "reward.name", "has no function compute_score"),
        ("compute_score = 3", "reward.name", "is a int, not a function"),
        ("def compute_score(a, b, c): return 1", "reward.name", "compute_score(a, b, c)"),
        ("def compute_score(solution_str, truth): return 1", "reward.name", "by these names, data_source"),
        ("def compute_score(): return 1", "reward.name", "may be, by these names"),
        ("import nowhere_to_be_found", "reward.path", "my_reward.py:1"),
        ("x = 1\ndef compute_score(:\n", "reward.path", "my_reward.py:2"),
        ("raise SystemExit(0)", "reward.path", "raised SystemExit"),
        ("import os\nos._exit(9)", "reward.path", "ended the process: it exited with status 9"),
    ],
)
def test_a_broken_file_is_a_problem_with_its_key(
    source: str, key: str, complaint: str, make_reward: MakeReward
) -> None:
    (problem,) = check_reward(make_reward(source))
    assert problem.key == key
    assert complaint in problem.message
    assert "\n" not in problem.message


def test_a_function_of_groups_takes_one_list(make_reward: MakeReward) -> None:
    config = make_reward("def compute_score(samples, other): return []").model_copy(update={"scores_groups": True})
    (problem,) = check_reward(config)
    assert problem.key == "reward.name"
    assert problem.message.endswith("must take one list, the samples of a group")


def test_an_import_that_hangs_is_a_problem(make_reward: MakeReward) -> None:
    (problem,) = check_reward(make_reward("import time\ntime.sleep(600)"), timeout_s=0.5)
    assert (problem.key, problem.message) == ("reward.path", "importing it took longer than 0.5 s")


OWN_SCORER = """
from megarl.types import Score, ScoredGroup

class Scorer:
    async def score(self, group):
        {body}
"""


def test_an_own_scorer_scores_and_what_it_may_not_do_is_a_sentence(tmp_path: Path, make_group: MakeGroup) -> None:
    def scored(body: str) -> ScoredGroup:
        path = tmp_path / f"own_{len(list(tmp_path.glob('*.py')))}.py"
        path.write_text(OWN_SCORER.format(body=body))
        return asyncio.run(UserScorer(f"{path}:Scorer").score(make_group("4")))

    good = "return ScoredGroup(group=group, scores=tuple(Score(value=0.5, components={}) for _ in group.rollouts))"
    assert [score.value for score in scored(good).scores] == [0.5]
    with pytest.raises(RewardError, match="returned a list, not a ScoredGroup"):
        scored("return [0.5]")
    with pytest.raises(RewardError, match=r"own_2\.py:Scorer: prompt .*: .*ValueError: no"):
        scored("raise ValueError('no')")
    for number in ("1e308", "float('nan')", "10**400"):
        with pytest.raises(RewardError, match="is not finite"):
            scored(good.replace("0.5", number))
    with pytest.raises(ConfigError, match="gives a int without a method score"):
        UserScorer("builtins:int")
