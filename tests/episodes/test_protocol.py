"""The seam of an episode: transcripts, tool schemas, rows."""

from __future__ import annotations

import pickle

import numpy as np

from megarl.episodes.protocol import ToolSchema, Transcript, row_of
from megarl.errors import EnvironmentLostError, MachineError, RewardError, ScoreLostError
from megarl.types import Prompt


def test_a_transcript_tells_the_responses_from_the_prompt_and_from_observations() -> None:
    transcript = Transcript(
        prompt=({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "an example"}),
        messages=(
            {"role": "assistant", "content": "a call"},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "It is 4."},
        ),
        ending="answered",
    )
    assert transcript.texts == ("a call", "It is 4.")
    assert transcript.last_text == "It is 4."


def test_a_transcript_without_a_response_has_an_empty_last_text() -> None:
    assert Transcript(prompt=(), messages=(), ending="wall").last_text == ""


def test_a_schema_takes_the_form_that_templates_expect() -> None:
    schema = ToolSchema(name="add", description="Add.", parameters={"type": "object", "properties": {}})
    assert schema.as_function == {
        "type": "function",
        "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
    }


def test_a_row_has_the_names_that_rewards_use() -> None:
    prompt = Prompt(
        uid="u",
        position=0,
        epoch=0,
        token_ids=np.array([1], np.int32),
        data_source="sums",
        ground_truth="4",
        extra_info={"level": 1},
        messages=({"role": "user", "content": "2+2?"},),
    )
    row = row_of(prompt)
    assert (row["ground_truth"], row["prompt"], row["extra_info"]) == ("4", "2+2?", {"level": 1})


def test_lost_episodes_are_errors_that_cross_processes() -> None:
    for error in (EnvironmentLostError("gone"), ScoreLostError("none")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert issubclass(EnvironmentLostError, MachineError)
    assert issubclass(ScoreLostError, RewardError)
