"""verl's keys of turns, tools and agent loops, as the recipe's `environment`."""

from __future__ import annotations

from megarl.tools.import_verl.rules import KeyVerdict
from megarl.tools.import_verl.translation import Translation

_TURNS = "actor_rollout_ref.rollout.multi_turn."
_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
_OWN_FILE = "environment.py"
_RESULT_CHARACTERS = 256
"""verl's limit of a tool's result where none is given."""
_FORMATS = {"hermes": "hermes", "llama3_json": "llama"}


def put_environment(keys: Translation) -> None:
    """Put a class of tools where the run has turns; its `score` has to be written by hand."""
    loop = keys.given.get(_LOOP)
    if not keys.given.get(f"{_TURNS}enable") and loop in (None, "single_turn_agent"):
        keys.report(_LOOP, KeyVerdict.NO_EFFECT, "one response per prompt, as without environment")
        return
    for key in (f"{_TURNS}enable", _LOOP):
        keys.mapped(key, "environment")
    if loop not in (None, "tool_agent", "single_turn_agent"):
        keys.report(_LOOP, KeyVerdict.NOT_SUPPORTED, "write your own loop as environment.kind function or chat")
    keys.put("environment.kind", "class")
    path = keys.path(f"{_TURNS}function_tool_path", "environment.path")
    path = path or keys.path("data.function_tool_path", "environment.path")
    keys.put("environment.path", path or _OWN_FILE)
    keys.notes.append(
        f"environment.path {path or _OWN_FILE}: make the tools methods of a class with score(self, transcript)"
    )
    turns = keys.take(f"{_TURNS}max_assistant_turns", "environment.max_turns")
    if isinstance(turns, int):
        keys.put("environment.max_turns", turns)
    else:
        keys.notes.append("environment.max_turns: verl sets no limit; the default is 8")
    calls = keys.take(f"{_TURNS}max_user_turns", "environment.max_calls")
    if isinstance(calls, int):
        keys.put("environment.max_calls", calls)
    length = keys.take(f"{_TURNS}max_tool_response_length", "environment.max_result_tokens", default=_RESULT_CHARACTERS)
    keys.put("environment.max_result_tokens", length)
    keys.notes.append(f"environment.max_result_tokens {length}: verl counts characters, megarl tokens")
    written = str(keys.given.get(f"{_TURNS}format", "hermes"))
    if written in _FORMATS:
        keys.put("environment.call_format", _FORMATS[written])
        keys.mapped(f"{_TURNS}format", "environment.call_format")
    else:
        known = ", ".join(_FORMATS)
        keys.report(f"{_TURNS}format", KeyVerdict.NOT_SUPPORTED, f"calls are read as {known}: environment.call_format")
