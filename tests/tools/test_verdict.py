from __future__ import annotations

import numpy as np
import pytest

from megarl.tools.diagnose.verdict import Conversation, Diagnosis, HookPointError, Verdict, reach_verdict
from megarl.weights.recordings import LOGPROBS, HookPoint

NAMES = ("model.embed_tokens", "model.layers.0.mlp.up_proj", "model.norm", "lm_head")
POINTS = (*(HookPoint(name=name, weights=(f"{name}.weight",)) for name in NAMES), HookPoint(name=LOGPROBS, weights=()))


def found(errors: list[float], *differing: str, is_before_temperature: bool = False) -> Diagnosis:
    conversation = Conversation(
        prompt_ids=np.arange(4, dtype=np.int32),
        response_ids=np.arange(3, dtype=np.int32),
        engine_logprobs=np.zeros(3, np.float32),
        trainer_logprobs=np.zeros(3, np.float32),
        temperature=0.5,
    )
    site_errors = [
        HookPointError(point=point, error=error, token=index, tolerance=1e-4)
        for index, (point, error) in enumerate(zip(POINTS, errors, strict=True))
    ]
    return reach_verdict(site_errors, differing, conversation, is_before_temperature=is_before_temperature)


def test_nothing_differs() -> None:
    diagnosis = found([0, 1e-6, 3e-6, 1e-6, 2e-6])
    assert diagnosis.verdict is Verdict.NOTHING
    assert diagnosis.first is None
    assert diagnosis.sentence == "nothing differs: every module agrees to 3.0e-06, and all weights are the same"


def test_the_first_beyond_its_tolerance_counts() -> None:
    diagnosis = found([0, 1e-6, 0.2, 0.9, 0.9])
    assert diagnosis.verdict is Verdict.COMPUTATION
    assert diagnosis.sentence == (
        "computation differs: model.norm is the first module that differs, by 2.0e-01 at prompt token 2 "
        "(before it at most 1.0e-06), with the same weights"
    )


def test_its_own_weights_are_the_reason_where_they_differ() -> None:
    diagnosis = found([0, 0.3, 0.2, 0.9, 0.9], "model.layers.0.mlp.up_proj.weight", "lm_head.weight")
    assert diagnosis.verdict is Verdict.WEIGHTS
    assert diagnosis.sentence == (
        "weights differ: model.layers.0.mlp.up_proj.weight; model.layers.0.mlp.up_proj is the first module that "
        "differs, by 3.0e-01 at prompt token 1 (before it at most 0.0e+00); 1 tensor(s) further on differ too"
    )


def test_a_weight_that_shows_only_further_on_is_the_reason_too() -> None:
    diagnosis = found([0, 0.9e-4, 1.1e-4, 0, 0], "model.layers.0.mlp.up_proj.weight")
    assert diagnosis.verdict is Verdict.WEIGHTS
    assert diagnosis.sentence.startswith("weights differ: model.layers.0.mlp.up_proj.weight; model.norm is the first")


def test_weights_behind_the_first_difference_are_not_its_reason() -> None:
    diagnosis = found([0, 0.3, 0.2, 0.9, 0.9], "lm_head.weight")
    assert diagnosis.verdict is Verdict.COMPUTATION
    assert diagnosis.sentence.endswith("with the same weights; 1 tensor(s) further on differ too")


def test_weights_that_differ_too_little_to_show() -> None:
    diagnosis = found([0, 1e-6, 0, 0, 0], *(f"{name}.weight" for name in NAMES))
    assert diagnosis.verdict is Verdict.WEIGHTS
    assert diagnosis.sentence == (
        "weights differ, too little to show: model.embed_tokens.weight, model.layers.0.mlp.up_proj.weight, "
        "model.norm.weight and 1 more; every module agrees to 1.0e-06"
    )


@pytest.mark.parametrize(
    ("is_before_temperature", "hint"), [(False, ""), (True, "; the engine's are of logits before the temperature")]
)
def test_log_probabilities_alone_differ_by_definition(is_before_temperature: bool, hint: str) -> None:
    diagnosis = found([0, 0, 0, 1e-6, 0.5], is_before_temperature=is_before_temperature)
    assert diagnosis.verdict is Verdict.DEFINITION
    assert diagnosis.sentence == (
        "only the log-probabilities differ, by 5.0e-01 at sampled token 4: "
        f"those of the engine's own logits agree to 1.0e-06{hint}"
    )


def test_what_is_not_a_number_does_not_agree() -> None:
    diagnosis = found([0, float("nan"), 0, 0, 0])
    assert diagnosis.first is diagnosis.errors[1]
