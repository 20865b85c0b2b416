from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from megarl.config.reward import (
    BySourceRewardConfig,
    ComposedRewardConfig,
    ExactRewardConfig,
    FunctionRewardConfig,
    RewardConfig,
)
from megarl.errors import RewardError
from megarl.observe.observer import Observer
from megarl.reward.build import build_scorer, check_reward
from megarl.reward.pool import WorkerPool
from megarl.reward.protocol import Answer, Request
from megarl.reward.remote_scorer import RemoteScorer
from megarl.reward.scorer import ExactScorer
from megarl.types import FinishReason, RolloutGroup, Score

MakeGroup = Callable[..., RolloutGroup]
MakeReward = Callable[..., FunctionRewardConfig]


def scores_of(config: RewardConfig, group: RolloutGroup) -> list[Score]:
    scorer = build_scorer(config)
    try:
        return list(asyncio.run(scorer.score(group)).scores)
    finally:
        scorer.close()


def error_of(config: FunctionRewardConfig, group: RolloutGroup) -> str:
    with pytest.raises(RewardError) as caught:
        scores_of(config, group)
    message = str(caught.value)
    assert "\n" not in message
    assert "data_source arithmetic, prompt train.parquet:17, rollout 0" in message
    return message


def test_the_recipe_chooses_the_scorer(make_reward: MakeReward) -> None:
    assert isinstance(build_scorer(ExactRewardConfig(kind="exact")), ExactScorer)
    assert isinstance(build_scorer(make_reward("def compute_score(**arguments): return 1")), RemoteScorer)


def test_the_exact_scorer_compares_without_the_white_space_around(make_group: MakeGroup) -> None:
    group = make_group("42", " 42\n", "42.", "4 2", "")
    scored = asyncio.run(ExactScorer(Observer(())).score(group))
    assert [score.value for score in scored.scores] == [1, 1, 0, 0, 0]
    assert scored.group is group


def test_an_aborted_rollout_is_never_scored(make_group: MakeGroup, make_reward: MakeReward) -> None:
    group = make_group("42", finish_reason=FinishReason.ABORT)
    with pytest.raises(AssertionError, match=r"train.parquet:17, rollout 0 was aborted"):
        asyncio.run(ExactScorer(Observer(())).score(group))
    with pytest.raises(AssertionError, match=r"was aborted"):
        scores_of(make_reward("def compute_score(**arguments): return 1"), group)


def test_a_function_gets_the_sample_and_its_scores_keep_the_order(
    make_group: MakeGroup, make_reward: MakeReward
) -> None:
    config = make_reward(
        """
        import time

        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            assert data_source == "arithmetic"
            time.sleep(extra_info["pause_s"] if solution_str == "42" else 0)
            return 1.0 if solution_str == ground_truth else -0.5
        """,
        workers=2,
    )
    scores = scores_of(config, make_group("42", "41", "42", "ü\ud800", extra_info={"pause_s": 0.2, "tags": [1, None]}))
    assert [score.value for score in scores] == [1, -0.5, 1, -0.5]


def test_a_function_may_do_without_extra_info_or_be_async(make_group: MakeGroup, make_reward: MakeReward) -> None:
    short = make_reward("def compute_score(solution_str, ground_truth, data_source): return len(solution_str)")
    assert [score.value for score in scores_of(short, make_group("12", "123"))] == [2, 3]
    slow = make_reward(
        """
        import asyncio

        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            await asyncio.sleep(0)
            return 7
        """
    )
    assert [score.value for score in scores_of(slow, make_group("12", "123"))] == [7, 7]


def test_a_function_gets_what_it_names(make_group: MakeGroup, make_reward: MakeReward) -> None:
    config = make_reward(
        """
        def compute_score(prompt, messages, response, token_ids, finish_reason, group):
            assert prompt == "What is 6 * 7?"
            assert [message["role"] for message in messages] == ["system", "user"]
            assert token_ids == [5] and finish_reason == "stop"
            return group.index(response)
        """
    )
    assert [score.value for score in scores_of(config, make_group("41", "42"))] == [0, 1]


COUNTS_ALIKE = """
def compute_score(samples):
    texts = [sample["solution_str"] for sample in samples]
    assert all(sample["group"] == texts for sample in samples)
    return [{"score": texts.count(text), "length": len(text)} if text else None for text in texts]
"""


def test_a_function_may_score_a_whole_group(make_group: MakeGroup, make_reward: MakeReward) -> None:
    config = make_reward(COUNTS_ALIKE).model_copy(update={"scores_groups": True, "on_error": "mask"})
    assert check_reward(config) == []
    scores = scores_of(config, make_group("41", "42", "", "41"))
    assert [(score.value, score.is_masked) for score in scores] == [(2, False), (1, False), (0, True), (2, False)]
    assert scores[0].components == {"length": 2.0}


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        ("1.0", "returned a float for 2 samples; return a list of one result per sample"),
        ("[1.0]", "returned 1 results for 2 samples"),
        ("[1.0, float('nan')]", "rollout 1: returned nan for score"),
    ],
)
def test_a_group_needs_one_score_per_rollout(
    result: str, complaint: str, make_group: MakeGroup, make_reward: MakeReward
) -> None:
    config = make_reward(f"def compute_score(samples): return {result}").model_copy(update={"scores_groups": True})
    with pytest.raises(RewardError, match=complaint):
        scores_of(config, make_group("1", "2"))


def test_numbers_of_a_dict_become_components(make_group: MakeGroup, make_reward: MakeReward) -> None:
    config = make_reward(
        """
        import numpy as np

        def compute_score(**sample):
            return {"score": np.float32(0.5), "format": 1, "is_right": True, "answer": "text is left out", "none": None}
        """
    )
    (score,) = scores_of(config, make_group("42"))
    assert score == Score(value=0.5, components={"format": 1.0, "is_right": 1.0})


def test_rewards_of_tokens_come_beside_the_score(make_group: MakeGroup, make_reward: MakeReward) -> None:
    reward = make_reward(
        """
        def compute_score(data_source, solution_str, ground_truth, extra_info, token_ids):
            return {"score": 1.0, "tokens": [0.5 * place for place in range(len(token_ids))]}
        """
    )
    group = make_group("one", "three")
    scores = scores_of(reward, group)
    for rollout, found in zip(group.rollouts, scores, strict=True):
        assert found == Score(
            value=1.0, components={}, tokens=tuple(0.5 * place for place in range(rollout.num_tokens))
        )


@pytest.mark.parametrize(
    ("prediction", "expected"), [("' 42 '", "42"), ("42", "42"), ("np.float32(0.5)", "0.5"), ("None", None)]
)
def test_a_prediction_is_text_and_no_component(
    prediction: str, expected: str | None, make_group: MakeGroup, make_reward: MakeReward
) -> None:
    config = make_reward(
        f"""
        import numpy as np

        def compute_score(**sample):
            return {{"score": 1.0, "prediction": {prediction}}}
        """
    )
    (score,) = scores_of(config, make_group("so: 42"))
    assert score == Score(value=1.0, components={}, prediction=expected)


@pytest.mark.fault("None, NaN, infinite or wrong rewards", "an error that names file and sample")
@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        ("None", "returned a NoneType for score"),
        ("float('nan')", "returned nan for score; it must be finite"),
        ("{'score': 1, 'style': float('-inf')}", "returned -inf for style"),
        ("'1.0'", "returned a str for score"),
        ("{'acc': 1}", "returned a dict without score; it has acc"),
        ("{'score': None}", "returned a NoneType for score"),
        ("[1.0]", "returned a list for score"),
        ("{'score': 1, 'tokens': 'all'}", "returned a str for tokens; it must be a list of finite numbers"),
        ("{'score': 1, 'tokens': [0.5, float('nan')]}", "returned a list for tokens; it must be a list of finite"),
        ("{'score': 1, 'prediction': [1]}", "returned a list for prediction; it must be text, or None"),
    ],
)
def test_a_result_that_is_no_finite_number_is_an_error(
    result: str, complaint: str, make_group: MakeGroup, make_reward: MakeReward
) -> None:
    config = make_reward(f"def compute_score(data_source, solution_str, ground_truth): return {result}")
    assert complaint in error_of(config, make_group("42"))


def test_an_exception_comes_with_the_users_file_and_line(make_group: MakeGroup, make_reward: MakeReward) -> None:
    config = make_reward(
        """
        import json

        def compute_score(data_source, solution_str, ground_truth):
            return parse(solution_str)

        def parse(text):
            return json.loads(text)
        """
    )
    message = error_of(config, make_group("{"))
    assert "raised JSONDecodeError" in message
    assert f"({config.path}:8)" in message


def test_a_function_that_exits_is_an_error(make_group: MakeGroup, make_reward: MakeReward) -> None:
    soft = make_reward("import sys\ndef compute_score(**sample): sys.exit(3)")
    assert "raised SystemExit: 3" in error_of(soft, make_group("42"))
    hard = make_reward("import os\ndef compute_score(**sample): os._exit(3)")
    assert "ended its worker process: it exited with status 3" in error_of(hard, make_group("42"))
    killed = make_reward("import os\ndef compute_score(**sample): os.kill(os.getpid(), 11)")
    assert "it was ended by SIGSEGV" in error_of(killed, make_group("42"))


def test_a_late_score_is_an_error_that_names_the_deadline(make_group: MakeGroup, make_reward: MakeReward) -> None:
    config = make_reward("import time\ndef compute_score(**sample): time.sleep(600)", deadline_s=0.3)
    assert "gave no score within 0.3 s (reward.deadline_s)" in error_of(config, make_group("42"))


def test_what_the_function_prints_is_kept(tmp_path: Path, make_group: MakeGroup, make_reward: MakeReward) -> None:
    config = make_reward("def compute_score(**sample): print('looked at', sample['solution_str']); return 1")
    scorer = build_scorer(config, open_pool=partial(WorkerPool, log_path=tmp_path / "reward.log"))
    asyncio.run(scorer.score(make_group("42")))
    scorer.close()
    assert (tmp_path / "reward.log").read_text() == "looked at 42\n"


def test_weighted_components_make_the_score(make_group: MakeGroup, make_reward: MakeReward) -> None:
    source = "def compute_score(**sample): return {'right': 1, 'form': 0.5, 'tokens': 7}"
    config = make_reward(source).model_copy(update={"weights": {"right": 1.0, "form": 0.2}})
    (score,) = scores_of(config, make_group("42"))
    assert score == Score(value=1.1, components={"right": 1.0, "form": 0.5, "tokens": 7.0})
    missing = config.model_copy(update={"weights": {"right": 1.0, "style": 1.0}})
    assert "returned a dict without style; it has right, form, tokens" in error_of(missing, make_group("42"))
    plain = make_reward("def compute_score(**sample): return 1").model_copy(update={"weights": {"right": 1.0}})
    message = error_of(plain, make_group("42"))
    assert "returned a int; reward.weights needs a dict with right" in message
    assert f"({plain.path}:1)" in message


FAILS_ON_WORD = """
def compute_score(data_source, solution_str, ground_truth):
    return {"score": float(solution_str), "length": len(solution_str)}
"""


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"on_error": "mask"}, Score(value=0.0, components={}, is_masked=True)),
        ({"on_error": "value", "error_value": -1.0}, Score(value=-1.0, components={})),
    ],
)
def test_an_error_may_mask_a_rollout_or_give_it_a_value(
    keys: dict[str, object],
    expected: Score,
    make_group: MakeGroup,
    make_reward: MakeReward,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_reward(FAILS_ON_WORD).model_copy(update=keys)
    scores = scores_of(config, make_group("1", "word", "3"))
    assert [score.value for score in scores[::2]] == [1, 3]
    assert scores[1] == expected
    assert "rollout 1: raised ValueError: could not convert string to float: 'word'" in caplog.text


def test_a_reward_that_only_fails_stops_the_run_even_so(make_group: MakeGroup, make_reward: MakeReward) -> None:
    config = make_reward(FAILS_ON_WORD).model_copy(update={"on_error": "mask"})
    with pytest.raises(RewardError, match=r"257 rollouts in a row have no score; the last: .*ValueError"):
        scores_of(config, make_group(*["word"] * 300))


def test_a_changed_file_is_never_masked(make_group: MakeGroup, make_reward: MakeReward) -> None:
    config = make_reward(FAILS_ON_WORD).model_copy(update={"on_error": "mask"})
    scorer = build_scorer(config)
    asyncio.run(scorer.score(make_group("1")))
    config.path.write_text("def compute_score(**sample): return 2")
    with pytest.raises(RewardError, match=r"prompt train.parquet:17, rollout 0: .*my_reward.py changed during the run"):
        asyncio.run(scorer.score(make_group("1")))
    scorer.close()


def test_each_data_source_has_its_scorer(make_group: MakeGroup) -> None:
    sources = {"arithmetic": {"kind": "gsm8k", "workers": 1}, "other": {"kind": "exact"}}
    config = BySourceRewardConfig.model_validate({"kind": "by_source", "sources": sources})
    scorer = build_scorer(config)
    group = make_group("#### 42", "42")
    scores = asyncio.run(scorer.score(group)).scores
    assert [(score.value, score.prediction) for score in scores] == [(1, "42"), (0, None)]
    elsewhere = replace(group, prompt=replace(group.prompt, data_source="other"))
    assert [score.value for score in asyncio.run(scorer.score(elsewhere)).scores] == [0, 1]
    unknown = replace(group, prompt=replace(group.prompt, data_source="new"))
    with pytest.raises(RewardError, match=r"no scorer for data_source new, .*; it has arithmetic, other"):
        asyncio.run(scorer.score(unknown))
    scorer.close()


COMPOSED: dict[str, Any] = {
    "kind": "composed",
    "parts": {
        "right": {"reward": {"kind": "exact"}, "weight": 2.0},
        "form": {"reward": {"kind": "regex", "pattern": r"4(\d)", "workers": 1}, "weight": 0.0, "gate_from": 0.0},
        "length": {"mean": 2.0, "std": 0.5, "clip": [-1.0, 1.0], "weight": 0.5},
    },
    "closed_score": -1.0,
}
MEASURES = """
def compute_score(solution_str):
    return {"score": len(solution_str) or None, "is_short": len(solution_str) < 3}
"""


def composed(measure: FunctionRewardConfig) -> ComposedRewardConfig:
    keys = copy.deepcopy(COMPOSED)
    keys["parts"]["length"]["reward"] = measure.model_dump() | {"on_error": "mask"}
    return ComposedRewardConfig.model_validate(keys)


def test_a_composed_score_is_the_weighted_sum_of_its_parts(make_group: MakeGroup, make_reward: MakeReward) -> None:
    config = composed(make_reward(MEASURES))
    assert check_reward(config) == []
    right, wrong, unknown = scores_of(config, make_group("42", "142", ""))
    assert right.value == 2.0 * 1 + 0.5 * 0
    assert right.components == {"right": 1.0, "form": 0.0, "length": 2.0, "length.is_short": 1.0}
    assert wrong.value == 2.0 * 0 + 0.5 * 1.0
    assert unknown.is_masked


def test_a_gate_closes_and_the_parts_are_still_known(make_group: MakeGroup, make_reward: MakeReward) -> None:
    config = composed(make_reward(MEASURES))
    gate = config.parts["form"].model_copy(update={"gate_from": 0.5})
    config = config.model_copy(update={"parts": config.parts | {"form": gate}})
    opened, closed = scores_of(config, make_group("42 2", "42", ground_truth="2"))
    assert (opened.components["form"], opened.value) == (1.0, 0.5)
    assert (closed.components["form"], closed.value) == (1.0, 0.0)
    (closed,) = scores_of(config, make_group("2", ground_truth="2"))
    assert (closed.components["right"], closed.value) == (1.0, -1.0)


REWARDS_TOKENS = """
def compute_score(solution_str):
    return {"score": 1, "tokens": [float(digit) for digit in solution_str][SLICE]}
"""


def rewarding_tokens(folder: Path, *slices: str) -> ComposedRewardConfig:
    """Write one function per slice of the tokens; return their sum, with the weights 1, 2, ... and an exact part."""
    parts: dict[str, Any] = {"right": {"reward": {"kind": "exact"}}}
    for number, kept in enumerate(slices, start=1):
        path = folder / f"part_{number}.py"
        path.write_text(REWARDS_TOKENS.replace("SLICE", kept))
        function = {"kind": "function", "path": str(path), "workers": 1}
        parts[f"part_{number}"] = {"reward": function, "weight": float(number), "mean": 5.0, "std": 10.0}
    return ComposedRewardConfig.model_validate({"kind": "composed", "parts": parts, "closed_score": -1.0})


def test_a_composed_score_keeps_the_weighted_rewards_of_tokens(tmp_path: Path, make_group: MakeGroup) -> None:
    short, long = scores_of(rewarding_tokens(tmp_path, ":", "::-1"), make_group("42", "142"))
    assert short.tokens == (4.0 + 2 * 2.0, 2.0 + 2 * 4.0)
    assert long.tokens == (1.0 + 2 * 2.0, 4.0 + 2 * 4.0, 2.0 + 2 * 1.0)


def test_a_closed_gate_leaves_no_rewards_of_tokens(tmp_path: Path, make_group: MakeGroup) -> None:
    config = rewarding_tokens(tmp_path, ":")
    gate = config.parts["right"].model_copy(update={"gate_from": 1.0})
    config = config.model_copy(update={"parts": config.parts | {"right": gate}})
    right, wrong = scores_of(config, make_group("42", "41"))
    assert right.tokens is not None
    assert (wrong.value, wrong.tokens) == (-1.0, None)


def test_parts_with_rewards_of_different_tokens_are_an_error(tmp_path: Path, make_group: MakeGroup) -> None:
    with pytest.raises(RewardError, match=r"different lengths \(part_1 \d+, part_2 \d+\)"):
        scores_of(rewarding_tokens(tmp_path, ":", "1:"), make_group("42"))


def test_a_source_may_have_a_composed_reward_and_its_problem_names_the_part(
    make_group: MakeGroup, make_reward: MakeReward
) -> None:
    config = composed(make_reward(MEASURES))
    keys = {"kind": "by_source", "sources": {"arithmetic": config.model_dump(exclude_unset=True)}}
    by_source = BySourceRewardConfig.model_validate(keys)
    (score,) = scores_of(by_source, make_group("42"))
    assert score.value == 2.0
    make_reward("x = 1")
    (problem,) = check_reward(by_source)
    assert problem.key == "reward.sources.arithmetic.parts.length.reward.name"


@pytest.mark.parametrize(
    ("keys", "right", "truth"),
    [
        ({"kind": "regex", "pattern": r"<(\d+)>"}, "<42>", "42"),
        ({"kind": "multiple_choice"}, "The answer is B", "B"),
        ({"kind": "gsm8k", "is_flexible": True}, "so 42", "42"),
        ({"kind": "math"}, r"\boxed{\frac{84}{2}}", "42"),
        ({"kind": "dapo_math"}, "Answer: 42", "42"),
        ({"kind": "code_tests", "sandbox": "none"}, "```python\nprint(42)\n```", '{"inputs": [""], "outputs": ["42"]}'),
    ],
)
def test_a_built_in_scorer_runs_in_workers_as_the_recipe_says(
    keys: dict[str, object], right: str, truth: str, make_group: MakeGroup
) -> None:
    config: RewardConfig = TypeAdapter(RewardConfig).validate_python({**keys, "workers": 1})
    assert check_reward(config) == []
    scorer = build_scorer(config)
    scored = asyncio.run(scorer.score(make_group(right, "nothing", ground_truth=truth)))
    scorer.close()
    first, second = (score.value for score in scored.scores)
    assert first == 1
    assert second < 1


def test_a_fault_of_the_machine_is_never_a_score(make_group: MakeGroup) -> None:
    class Broken:
        async def answers(self, requests: Sequence[Request]) -> list[Answer]:
            return [{"error": "raised SandboxError: no namespace", "is_machine_fault": True} for _ in requests]

        def close(self) -> None: ...

    config = FunctionRewardConfig(kind="function", path=Path("reward.py"), on_error="value", error_value=-1.0)
    scorer = RemoteScorer(Broken(), Observer(()), name="code_tests", config=config)
    (score,) = asyncio.run(scorer.score(make_group("a"))).scores
    assert score.is_masked
