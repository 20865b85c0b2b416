"""Released SGLang whose replies have log-probabilities as arrays: `python -m megarl.rollout.server <its arguments>`.

SGLang returns a JSON list of three items per output token, half of the cost of a reply on both sides. A hook of its
plugin registry replaces it by two arrays in base64 where a request asks for flat log-probabilities. A server without
the hook ignores the wish for output tokens, and the client reads both.

A second hook lets a paused scheduler on a CPU wait: SGLang's loop polls without a pause then, and takes a core of the
machine that trains for each rank of an engine. (On a GPU the workers are spawned, without the hooks.)
"""

from __future__ import annotations

import runpy
import sys
import time
from base64 import b64encode
from collections.abc import Callable
from typing import Protocol

import numpy as np

from megarl.env import ONE_CARD, own_host, update_environment

if ONE_CARD.read():
    # SGLang imports the main module in each process that it spawns.
    update_environment(own_host())

_PAUSED_LOOP = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
"""Called in each turn of the loop of a paused scheduler."""
_PAUSED_POLL_S = 0.005
_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager.add_logprob_to_meta_info"


class _Request(Protocol):
    stream: bool


class _State(Protocol):
    """The fields of SGLang's request state that are used."""

    obj: _Request
    input_token_logprobs_val: list[float]
    output_token_logprobs_val: list[float]
    output_token_logprobs_idx: list[int]


def register() -> None:
    """Register the hook; the server applies it when it loads its plugins, before it starts."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - only in the server
    except ImportError:
        return  # an older release, whose replies have lists
    HookRegistry.register(_TARGET, add_flat_logprobs, HookType.AROUND)
    HookRegistry.register(_PAUSED_LOOP, wait_while_paused, HookType.AROUND)


def wait_while_paused(record: Callable[[object], None], scheduler: object) -> None:
    """Give the core away for a moment."""
    record(scheduler)
    time.sleep(_PAUSED_POLL_S)


def add_flat_logprobs(
    add: Callable[..., None],
    manager: object,
    meta_info: dict[str, object],
    state: _State,
    top_logprobs_num: int,
    token_ids_logprob: list[int] | None,
    return_text_in_logprobs: bool,
) -> None:
    """Write the log-probabilities of the output into `meta_info`, once, when the response is complete."""
    request = state.obj
    is_plain = not top_logprobs_num and token_ids_logprob is None and not return_text_in_logprobs
    is_asked = getattr(request, "return_flat_raw_top_logprobs_b64", False)  # not in every release
    is_flat = is_asked and not request.stream and not state.input_token_logprobs_val
    if not is_plain or not is_flat:
        add(manager, meta_info, state, top_logprobs_num, token_ids_logprob, return_text_in_logprobs)
    elif meta_info["finish_reason"] is not None:
        meta_info["output_token_logprobs"] = {
            "logprobs": _encode(np.array(state.output_token_logprobs_val, dtype="<f4")),
            "token_ids": _encode(np.array(state.output_token_logprobs_idx, dtype="<i4")),
        }


def _encode(array: np.ndarray[tuple[int], np.dtype[np.generic]]) -> str:
    return b64encode(array.tobytes()).decode()


def run() -> None:
    """Run SGLang's own server with the hook."""
    register()
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    run()
