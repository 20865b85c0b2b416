"""The seam of an episode: transcripts, tool schemas, rows."""

from __future__ import annotations

import pickle

from megarl.episodes.protocol import Transcript
from megarl.errors import EnvironmentLostError, MachineError, RewardError, ScoreLostError


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


def test_lost_episodes_are_errors_that_cross_processes() -> None:
    for error in (EnvironmentLostError("gone"), ScoreLostError("none")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert issubclass(EnvironmentLostError, MachineError)
    assert issubclass(ScoreLostError, RewardError)
