from __future__ import annotations

from collections.abc import Sequence

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


UP, HEAD = "model.layers.0.mlp.up_proj.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("errors", "differing", "verdict", "sentence"),
    [
        (
            [0, 1e-6, 3e-6, 1e-6, 2e-6],
            (),
            Verdict.NOTHING,
            "nothing differs: every module agrees to 3.0e-06, and all weights are the same",
        ),
        # The first that is beyond its tolerance counts.
        (
            [0, 1e-6, 0.2, 0.9, 0.9],
            (),
            Verdict.COMPUTATION,
            "computation differs: model.norm is the first module that differs, by 2.0e-01 at prompt token 2 "
            "(before it at most 1.0e-06), with the same weights",
        ),
        # Its own weights are the reason where they differ.
        (
            [0, 0.3, 0.2, 0.9, 0.9],
            (UP, HEAD),
            Verdict.WEIGHTS,
            f"weights differ: {UP}; model.layers.0.mlp.up_proj is the first module that "
            "differs, by 3.0e-01 at prompt token 1 (before it at most 0.0e+00); 1 tensor(s) further on differ too",
        ),
        # A weight that shows only further on is the reason too.
        ([0, 0.9e-4, 1.1e-4, 0, 0], (UP,), Verdict.WEIGHTS, f"weights differ: {UP}; model.norm is the first "),
        # Weights behind the first difference are not its reason.
        (
            [0, 0.3, 0.2, 0.9, 0.9],
            (HEAD,),
            Verdict.COMPUTATION,
            "computation differs: model.layers.0.mlp.up_proj is the first module that differs, by 3.0e-01 at prompt "
            "token 1 (before it at most 0.0e+00), with the same weights; 1 tensor(s) further on differ too",
        ),
        # They differ too little to show.
        (
            [0, 1e-6, 0, 0, 0],
            [f"{name}.weight" for name in NAMES],
            Verdict.WEIGHTS,
            f"weights differ, too little to show: model.embed_tokens.weight, {UP}, "
            "model.norm.weight and 1 more; every module agrees to 1.0e-06",
        ),
    ],
)
def test_a_verdict_names_the_first_difference_and_its_reason(
    errors: list[float], differing: Sequence[str], verdict: Verdict, sentence: str
) -> None:
    diagnosis = found(errors, *differing)
    assert diagnosis.verdict is verdict
    assert diagnosis.sentence.startswith(sentence)
    assert (diagnosis.first is None) == (verdict is Verdict.NOTHING or "too little" in sentence)


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
