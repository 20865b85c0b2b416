"""Run folders as a run leaves them, for the tests of the page."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from megarl.config.section import IMAGES_FOLDER
from megarl.data.images import ImageStore
from megarl.data.rollout_files import SampledRollout, rollouts_file, write_rollouts
from megarl.observe.event_file import EVENTS_FILE
from megarl.observe.event_log import EventLog
from megarl.observe.events import Event, PhaseEnded, PhaseStarted, Record, RunFinished, RunStatus
from megarl.observe.summary import Phase
from megarl.types import Ending, Episode, ImagePlace, Turn, TurnKind
from tests.data.test_rollout_files import decode, sampled
from tests.observe.samples import BEGAN, evaluated, run_started, step_finished

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script>"
"""What a model might write."""


def phase(name: Phase, seconds: float) -> list[Event]:
    return [PhaseStarted(phase=name), PhaseEnded(phase=name, seconds=seconds)]


def events_of(num_steps: int) -> list[Event]:
    events: list[Event] = [run_started(steps=num_steps), *phase("start", 1.0), evaluated(0, 0.25)]
    for step in range(1, num_steps + 1):
        events += [*phase("generate", 1.0), *phase("update", 1.0), *phase("publish", 1.0)]
        events.append(step_finished(step, reward=0.5 + step / (4 * num_steps)))
    return [*events, evaluated(num_steps, 0.75)]


def write_events(folder: Path, events: list[Event]) -> None:
    """One a second; continues what is there."""
    log = EventLog(folder / EVENTS_FILE)
    for event in events:
        number = log.next_sequence
        log.record(Record(sequence=number, time=BEGAN + timedelta(seconds=number), event=event))
        log.next_sequence += 1
    log.close()


def make_run(folder: Path, *, num_steps: int = 4, rollouts_per_step: int = 8, is_finished: bool = True) -> Path:
    end: list[Event] = [RunFinished(status=RunStatus.DONE)] if is_finished else []
    write_events(folder, [*events_of(num_steps), *end])
    for step in range(1, num_steps + 1):
        rows = [
            sampled(
                f"{step} {number} {HOSTILE if number == 0 else 'words'}",
                position=number,
                reward=float(number % 2),
                gap=number / 10,
            )
            for number in range(rollouts_per_step)
        ]
        write_rollouts(rollouts_file(folder, step), rows, decode=decode)
    return folder


IMAGES = (Image.new("RGB", (96, 48), "white"), Image.linear_gradient("L").resize((64, 64)).convert("RGB"))


def make_seen(folder: Path) -> Path:
    """Return a run of one step whose prompts have two images; of the second prompt one is lost."""
    make_run(folder, num_steps=1)
    ImageDraw.Draw(IMAGES[0]).rectangle((8, 8, 28, 28), fill="navy")
    store = ImageStore(folder / IMAGES_FOLDER)
    digests = [store.put(np.asarray(image)) for image in IMAGES]
    rows = []
    for number, second in enumerate((digests[1], "0" * 32)):
        one = sampled("2", position=number)
        places = [ImagePlace(digest=digests[0], start=1, num_rows=1, num_columns=2)]
        places.append(ImagePlace(digest=second, start=4, num_rows=2, num_columns=2))
        prompt_ids = np.frombuffer(b"1##+####=", np.uint8).astype(np.int32)
        rows.append(replace(one, sample=replace(one.sample, prompt_ids=prompt_ids, images=tuple(places))))
    write_rollouts(rollouts_file(folder, 1), rows, decode=decode)
    return folder


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 31, "b": 11}}\n</tool_call><|im_end|>'
GIVEN = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
ANSWER = "42<|im_end|>"


def an_episode(number: int, *, began: float) -> SampledRollout:
    """Return an episode of a call, its result and an answer, whose tool takes longer from one to the next."""
    one = sampled(CALL + GIVEN + ANSWER, position=number, reward=float(number % 2))
    ends = [len(CALL), len(CALL) + len(GIVEN), len(CALL) + len(GIVEN) + len(ANSWER)]
    turns = (
        Turn(start=0, end=ends[0], kind=TurnKind.SAMPLED, seconds=1.5, versions=(2, 2), reward=0.25),
        Turn(start=ends[0], end=ends[1], kind=TurnKind.GIVEN, seconds=0.5 * (number % 4)),
        Turn(start=ends[1], end=ends[2], kind=TurnKind.SAMPLED, seconds=1.0, versions=(2, 3)),
    )
    mask = np.ones(ends[-1], np.bool_)
    mask[ends[0] : ends[1]] = False
    versions = np.where(mask, 2, -1).astype(np.int32)
    versions[ends[1] + 4 :] = 3
    advantages = np.where(mask, 0.5 if number % 2 else -0.5, 0).astype(np.float32)
    episode = Episode(turns=turns, ending=Ending.ANSWERED, began=began)
    rollout = replace(one.sample.rollout, episode=episode, loss_mask=mask, versions=versions)
    return replace(one, sample=replace(one.sample, rollout=rollout, advantages=advantages))


def make_episodes(folder: Path, *, num_episodes: int = 12) -> Path:
    """Return a run of one step with episodes that begin half a second after each other."""
    make_run(folder, num_steps=1)
    began = BEGAN.timestamp() + 4
    rows = [an_episode(number, began=began + number / 2) for number in range(num_episodes)]
    write_rollouts(rollouts_file(folder, 1), rows, decode=decode)
    return folder
