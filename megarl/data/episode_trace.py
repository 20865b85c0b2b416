"""One saved episode as a conversation: for people to read, as plain JSON, and in the trajectory format ATIF.

Reads `<run>/rollouts/step_N.parquet`. An episode is named `STEP/PROMPT/INDEX`, as the run page shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from megarl import __version__
from megarl.data.rollout_files import list_rollouts
from megarl.data.rollout_reading import read_list, read_rollout
from megarl.errors import DataError
from megarl.types import JsonValue, TurnKind

_ATIF = "ATIF-v1.6"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTurn:
    """A turn as text, with what was trained of it."""

    kind: TurnKind
    row: int
    """The history that it belongs to: an agent that rewrites its messages begins another one."""
    text: str
    num_tokens: int
    num_trained: int
    reward: float
    began_s: float
    """Seconds since the episode began."""
    seconds: float
    versions: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The engine's, of sampled tokens; empty for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTrace:
    episode: str
    data_source: str
    prompt: str
    prompt_ids: tuple[int, ...]
    images: tuple[str, ...]
    """Digests of the prompt's images, which are files in the run's store."""
    turns: tuple[TracedTurn, ...]
    ending: str
    score: float
    is_masked: bool
    components: Mapping[str, float]
    began: float | None
    """Seconds since 1970; None where the model had no turn."""

    @property
    def num_trained(self) -> int:
        return sum(turn.num_trained for turn in self.turns)

    @property
    def num_rows(self) -> int:
        return max((turn.row for turn in self.turns), default=0) + 1


def find_episode(run_folder: Path, name: str) -> EpisodeTrace:
    """Return a saved episode; a DataError says which there are."""
    step_text, _, rest = name.partition("/")
    uid, _, index_text = rest.rpartition("/")
    if not (step_text.isdigit() and uid and index_text.isdigit()):
        raise DataError(f"--episode {name}: write STEP/PROMPT/INDEX, such as 12/row-3/0; `megarl view` shows them")
    files = list_rollouts(run_folder)
    step, index = int(step_text), int(index_text)
    if step not in files:
        known = f"choose one of {', '.join(map(str, files))}" if files else "none were saved (observe.rollouts)"
        raise DataError(f"{run_folder}: no rollouts of step {step}; {known}")
    rows = read_list(files[step])
    for place, row in enumerate(rows):
        if row["prompt_uid"] == uid and row["index"] == index:
            return _trace(read_rollout(files[step], place), name)
    first = f"{step}/{rows[0]['prompt_uid']}/{rows[0]['index']}" if rows else "none"
    raise DataError(f"{files[step]}: no episode {name}; it has {len(rows)}, the first is {first}")


def _trace(saved: Mapping[str, Any], name: str) -> EpisodeTrace:
    starts = list(saved.get("row_starts") or ())
    began_s = 0.0
    turns = []
    for turn in saved.get("turns") or [_whole(saved)]:
        start, end, kind = turn["start"], turn["end"], TurnKind(turn["kind"])
        turns.append(
            TracedTurn(
                kind=kind,
                row=sum(first <= start for first in starts),
                text="".join(saved["pieces"][start:end]),
                num_tokens=end - start,
                num_trained=sum(map(bool, saved["loss_mask"][start:end])),
                reward=turn["reward"],
                began_s=began_s,
                seconds=turn["seconds"],
                versions=tuple(sorted(set(turn["versions"] or ()))),
                token_ids=tuple(saved["token_ids"][start:end]),
                logprobs=tuple(saved["rollout_logprobs"][start:end]) if kind is TurnKind.SAMPLED else (),
            )
        )
        began_s += turn["seconds"]
    return EpisodeTrace(
        episode=name,
        data_source=saved["data_source"],
        prompt=saved["prompt"],
        prompt_ids=tuple(saved["prompt_ids"]),
        images=tuple(saved.get("images") or ()),
        turns=tuple(turns),
        ending=saved["ending"] or saved["finish_reason"],
        score=saved["score"],
        is_masked=saved["is_masked"],
        components=saved["components"],
        began=saved["began"],
    )


def _whole(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a single response as a turn."""
    num_tokens = len(saved["pieces"])
    return {"start": 0, "end": num_tokens, "kind": "sampled", "reward": 0.0, "seconds": 0.0, "versions": None}


def as_json(trace: EpisodeTrace) -> dict[str, JsonValue]:
    return cast("dict[str, JsonValue]", {**asdict(trace), "num_trained": trace.num_trained})


def as_atif(trace: EpisodeTrace) -> dict[str, JsonValue]:
    """Return the episode in the Agent Trajectory Interchange Format: what a tool said belongs to the call before it."""
    steps: list[dict[str, JsonValue]] = [{"source": "user", "message": trace.prompt}]
    num_history = len(trace.prompt_ids)
    for turn in trace.turns:
        match turn.kind:
            case TurnKind.SAMPLED:
                steps.append(
                    {
                        "source": "agent",
                        "message": turn.text,
                        "metrics": {
                            "prompt_tokens": num_history,
                            "completion_tokens": turn.num_tokens,
                            "completion_token_ids": list(turn.token_ids),
                            "logprobs": list(turn.logprobs),
                        },
                        "extra": {"row": turn.row, "seconds": turn.seconds, "reward": turn.reward},
                        **_timestamp(trace, turn),
                    }
                )
            case TurnKind.GIVEN if steps[-1]["source"] == "agent" and "observation" not in steps[-1]:
                steps[-1]["observation"] = {"results": [{"content": turn.text}]}
            case TurnKind.GIVEN:
                steps.append({"source": "user", "message": turn.text})
            case TurnKind.CONTEXT:
                num_history = 0
                steps.append({"source": "user", "message": turn.text, "is_copied_context": True})
        num_history += turn.num_tokens
    sampled = [turn for turn in trace.turns if turn.kind is TurnKind.SAMPLED]
    return {
        "schema_version": _ATIF,
        "session_id": trace.episode,
        "agent": {"name": "megarl", "version": __version__},
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        "final_metrics": {
            "total_completion_tokens": sum(turn.num_tokens for turn in sampled),
            "total_steps": len(steps),
        },
        "extra": {
            "score": trace.score,
            "components": dict(trace.components),
            "ending": trace.ending,
            "tokens_trained": trace.num_trained,
            **({"images": list(trace.images)} if trace.images else {}),
        },
    }


def _timestamp(trace: EpisodeTrace, turn: TracedTurn) -> dict[str, JsonValue]:
    if trace.began is None:
        return {}
    return {"timestamp": datetime.fromtimestamp(trace.began + turn.began_s, UTC).isoformat()}
