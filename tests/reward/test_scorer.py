from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from pydantic import TypeAdapter

from megarl.config.reward import (
    BySourceRewardConfig,
    ComposedRewardConfig,
    ExactRewardConfig,
    FunctionRewardConfig,
    RewardConfig,
)
from megarl.errors import RewardError, ScoreError
from megarl.observe.observer import Observer
from megarl.reward.build import build_scorer, check_reward
from megarl.reward.pool import WorkerPool, score_of
from megarl.reward.protocol import Answer, Request, check_result, is_answer
from megarl.reward.remote_scorer import RemoteScorer
from megarl.types import FinishReason, RolloutGroup, Score
from tests import hostile

MakeGroup = Callable[..., RolloutGroup]
MakeReward = Callable[..., FunctionRewardConfig]
ScoreTexts = Callable[..., list[Score]]


def scores_of(config: RewardConfig, group: RolloutGroup) -> list[Score]:
    scorer = build_scorer(config)
    try:
        return list(asyncio.run(scorer.score(group)).scores)
    finally:
        scorer.close()


@pytest.fixture
def score(make_group: MakeGroup, make_reward: MakeReward) -> ScoreTexts:
    """Write a reward function; return its scores of some responses."""

    def score(source: str, *texts: str, **keys: object) -> list[Score]:
        config = make_reward(source).model_copy(update=keys)
        return scores_of(config, make_group(*(texts or ("42",)), extra_info={"tags": [1, None]}))

    return score


@pytest.fixture
def error(score: ScoreTexts) -> Callable[..., str]:
    """Write a reward function; return the one line that the run ends with."""

    def error(source: str, *texts: str, **keys: object) -> str:
        with pytest.raises(RewardError) as caught:
            score(source, *texts, **keys)
        message = str(caught.value)
        assert "\n" not in message
        assert "data_source arithmetic, prompt train.parquet:17, rollout " in message
        return message

    return error


def values(scores: Sequence[Score]) -> list[float]:
    return [score.value for score in scores]


def test_the_exact_scorer_compares_without_the_white_space_around(make_group: MakeGroup) -> None:
    group = make_group("42", " 42\n", "42.", "4 2", "")
    scored = asyncio.run(build_scorer(ExactRewardConfig(kind="exact")).score(group))
    assert values(scored.scores) == [1, 1, 0, 0, 0]
    assert scored.group is group


def test_an_aborted_rollout_is_never_scored(make_group: MakeGroup, make_reward: MakeReward) -> None:
    group = make_group("42", finish_reason=FinishReason.ABORT)
    function = make_reward("def compute_score(**arguments): return 1")
    for config in (ExactRewardConfig(kind="exact"), function):
        with pytest.raises(AssertionError, match=r"train.parquet:17, rollout 0 was aborted"):
            scores_of(config, group)


def test_a_function_gets_the_sample_and_its_scores_keep_the_order(score: ScoreTexts) -> None:
    source = """
        import time

        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            assert data_source == "arithmetic" and extra_info == {"tags": [1, None]}
            time.sleep(0.2 if solution_str == "42" else 0)
            return 1.0 if solution_str == ground_truth else -0.5
        """
    assert values(score(source, "42", "41", "42", "ü\ud800", workers=2)) == [1, -0.5, 1, -0.5]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def compute_score(solution_str, ground_truth, data_source): return len(solution_str)", [2, 3]),
        ("async def compute_score(data_source, solution_str, ground_truth, extra_info): return 7", [7, 7]),
        (
            """
            def compute_score(prompt, messages, response, token_ids, finish_reason, group):
                assert prompt == "What is 6 * 7?"
                assert [message["role"] for message in messages] == ["system", "user"]
                assert token_ids == [5] and finish_reason == "stop"
                return group.index(response)
            """,
            [0, 1],
        ),
    ],
)
def test_a_function_gets_what_it_names_and_may_be_async(source: str, expected: list[float], score: ScoreTexts) -> None:
    assert values(score(source, "12", "123")) == expected


COUNTS_ALIKE = """
def compute_score(samples):
    texts = [sample["solution_str"] for sample in samples]
    assert all(sample["group"] == texts for sample in samples)
    return [{"score": texts.count(text), "length": len(text)} if text else None for text in texts]
"""


def test_a_function_may_score_a_whole_group(score: ScoreTexts) -> None:
    scores = score(COUNTS_ALIKE, "41", "42", "", "41", scores_groups=True, on_error="mask")
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
def test_a_group_needs_one_score_per_rollout(result: str, complaint: str, error: Callable[..., str]) -> None:
    assert complaint in error(f"def compute_score(samples): return {result}", "1", "2", scores_groups=True)


@pytest.mark.parametrize(
    ("result", "weights", "expected"),
    [
        (
            {"score": np.float32(0.5), "format": 1, "is_right": True, "answer": "text is left out", "none": None},
            None,
            Score(value=0.5, components={"format": 1.0, "is_right": 1.0}),
        ),
        ({"score": 1, "tokens": [0.5, 1]}, None, Score(value=1.0, components={}, tokens=(0.5, 1.0))),
        ({"score": 1, "prediction": " 42 "}, None, Score(value=1.0, components={}, prediction="42")),
        ({"score": 1, "prediction": 42}, None, Score(value=1.0, components={}, prediction="42")),
        ({"score": 1, "prediction": np.float32(0.5)}, None, Score(value=1.0, components={}, prediction="0.5")),
        ({"score": 1, "prediction": None}, None, Score(value=1.0, components={})),
        (
            {"right": 1, "form": 0.5, "tokens": 7},
            {"right": 1.0, "form": 0.2},
            Score(value=1.1, components={"right": 1.0, "form": 0.5, "tokens": 7.0}),
        ),
    ],
)
def test_a_result_becomes_score_components_and_prediction(
    result: object, weights: dict[str, float] | None, expected: Score
) -> None:
    assert score_of(check_result(result, weights)) == expected


@pytest.mark.parametrize(
    ("result", "weights", "complaint"),
    [
        (None, None, "returned a NoneType for score"),
        (math.nan, None, "returned nan for score; it must be finite"),
        ({"score": 1, "style": -math.inf}, None, "returned -inf for style"),
        ("1.0", None, "returned a str for score"),
        ({"acc": 1}, None, "returned a dict without score; it has acc"),
        ({"score": None}, None, "returned a NoneType for score"),
        ([1.0], None, "returned a list for score"),
        ({"score": 1, "tokens": "all"}, None, "returned a str for tokens; it must be a list of finite numbers"),
        ({"score": 1, "tokens": [0.5, math.nan]}, None, "returned a list for tokens; it must be a list of finite"),
        ({"score": 1, "prediction": [1]}, None, "returned a list for prediction; it must be text, or None"),
        ({"right": 1}, {"right": 1.0, "style": 1.0}, "returned a dict without style; it has right"),
        (1, {"right": 1.0}, "returned a int; reward.weights needs a dict with right"),
        (1e308, None, "returned 1e.308 for score; it must be finite in 32 bits"),
        (10**400, None, "returned a number of more than 300 digits for score"),
        ({"a": 1e308, "b": 1e308}, {"a": 1.0, "b": 1.0}, "returned 1e.308 for a; it must be finite in 32 bits"),
        ({"a": 9e18, "b": 9e18}, {"a": 1.0, "b": 1.0}, "weighted sum is too large"),
        ({"score": 1, "tokens": [10**400]}, None, "returned a list for tokens"),
        ({"score": 1, **{f"n{number}": 1 for number in range(300)}}, None, "at most 256 are recorded"),
    ],
)
def test_a_result_that_is_no_finite_number_is_an_error(
    result: object, weights: dict[str, float] | None, complaint: str
) -> None:
    with pytest.raises(ScoreError, match=complaint):
        score_of(check_result(result, weights))


@settings(max_examples=200)
@given(hostile.values())
def test_any_result_is_an_answer_that_is_accepted_or_an_error(value: object) -> None:
    named = {"score": 1.0, "prediction": value, "tokens": value, "a": value}
    for result, weights in ((value, None), (named, None), (named, {"a": 2.0})):
        answer = check_result(result, weights)
        assert is_answer(json.loads(json.dumps(answer)))
        json.dumps(answer, ensure_ascii=False).encode(errors="strict" if "error" not in answer else "replace")


@pytest.mark.fault("None, NaN, infinite or wrong rewards", "an error that names file and sample")
def test_an_error_in_a_result_comes_with_the_functions_file_and_line(error: Callable[..., str]) -> None:
    source = "def compute_score(data_source, solution_str, ground_truth): return {'right': float('nan')}"
    message = error(source, weights={"right": 1.0})
    assert "returned nan for right; it must be finite" in message
    assert "my_reward.py:1)" in message


def test_weights_make_the_score(score: ScoreTexts) -> None:
    source = "def compute_score(**sample): return {'right': 1, 'form': 0.5, 'prediction': 7, 'tokens': [1, 2]}"
    (found,) = score(source, weights={"right": 1.0, "form": 0.2})
    assert found == Score(value=1.1, components={"right": 1.0, "form": 0.5}, prediction="7", tokens=(1.0, 2.0))


def test_an_exception_comes_with_the_users_file_and_line(error: Callable[..., str]) -> None:
    source = """
        import json

        def compute_score(data_source, solution_str, ground_truth):
            return parse(solution_str)

        def parse(text):
            return json.loads(text)
        """
    message = error(source, "{")
    assert "raised JSONDecodeError" in message
    assert "my_reward.py:8)" in message


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ("sys.exit(3)", "raised SystemExit: 3"),
        ("os._exit(3)", "ended its worker process: it exited with status 3"),
        ("os.kill(os.getpid(), 11)", "it was ended by SIGSEGV"),
    ],
)
def test_a_function_that_exits_is_an_error(call: str, complaint: str, error: Callable[..., str]) -> None:
    assert complaint in error(f"import os, sys\ndef compute_score(**sample): {call}")


def test_what_the_function_prints_is_kept(tmp_path: Path, make_group: MakeGroup, make_reward: MakeReward) -> None:
    config = make_reward("def compute_score(**sample): print('looked at', sample['solution_str']); return 1")
    scorer = build_scorer(config, open_pool=partial(WorkerPool, log_path=tmp_path / "reward.log"))
    asyncio.run(scorer.score(make_group("42")))
    scorer.close()
    assert (tmp_path / "reward.log").read_text() == "looked at 42\n"


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
    keys: dict[str, object], expected: Score, score: ScoreTexts, caplog: pytest.LogCaptureFixture
) -> None:
    scores = score(FAILS_ON_WORD, "1", "word", "3", **keys)
    assert values(scores[::2]) == [1, 3]
    assert scores[1] == expected
    assert "rollout 1: raised ValueError: could not convert string to float: 'word'" in caplog.text


@pytest.mark.patient
def test_a_reward_that_only_fails_stops_the_run_even_so(error: Callable[..., str]) -> None:
    message = error(FAILS_ON_WORD, *["word"] * 300, on_error="mask")
    assert message.startswith("257 rollouts in a row have no score; the last: ")


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


@pytest.mark.patient
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
    first, second = values(scores_of(config, make_group(right, "nothing", ground_truth=truth)))
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
