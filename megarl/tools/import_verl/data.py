"""Translate the data of a verl run: prompts and their evaluation, demonstrations, and turns with tools."""

from __future__ import annotations

from megarl.config.document import Tree
from megarl.tools.import_verl.rules import KeyVerdict
from megarl.tools.import_verl.translation import ROLLOUT, Translation

_VALIDATION = f"{ROLLOUT}val_kwargs."
_TURNS = f"{ROLLOUT}multi_turn."
_LOOP = f"{ROLLOUT}agent.default_agent_loop"
_PROMPTS = "~/data/rlhf/gsm8k/"
_DEMONSTRATIONS = "~/data/gsm8k/train.parquet"
_MAX_LENGTH = 1024
_BATCH = 256
"""verl's own defaults."""
_OWN_FILE = "environment.py"
_RESULT_CHARACTERS = 256
"""verl's limit of a tool's result where none is given."""
_FORMATS = {"hermes": "hermes", "llama3_json": "llama"}


def put_prompts(keys: Translation) -> None:
    keys.put("data.train", keys.paths("data.train_files", "data.train", default=f"{_PROMPTS}train.parquet"))
    if keys.written.get("data.val_files"):
        keys.put("data.eval", keys.paths("data.val_files", "data.eval and evaluation"))
        _evaluation(keys)
    if keys.take("data.filter_overlong_prompts", "data.overlong_prompts"):
        keys.put("data.overlong_prompts", "drop")
    truncation = keys.given.get("data.truncation", "error")
    if truncation == "error":
        keys.report("data.truncation", KeyVerdict.NO_EFFECT, "a prompt that is too long is refused, as with error")
    else:
        keys.report("data.truncation", KeyVerdict.NOT_SUPPORTED, "prompts are never cut: data.overlong_prompts: drop")


def _evaluation(keys: Translation) -> None:
    every = keys.take("trainer.test_freq", "evaluation.every_steps")
    keys.put("evaluation", {"every_steps": every} if isinstance(every, int) and every > 0 else {})
    if keys.take("trainer.val_before_train", "evaluation.runs_before_training", default=True) is False:
        keys.put("evaluation.runs_before_training", False)
    num_prompts = keys.take("data.val_max_samples", "evaluation.max_prompts")
    if isinstance(num_prompts, int) and num_prompts > 0:
        keys.put("evaluation.max_prompts", num_prompts)
    is_sampled = keys.take(f"{_VALIDATION}do_sample", "evaluation.sampled", default=False)
    temperature = keys.take(f"{_VALIDATION}temperature", "evaluation.sampled.temperature", default=0)
    if not is_sampled or temperature == 0:
        # Greedy answers to one prompt are all equal.
        return
    sampled: dict[str, Tree] = {"temperature": temperature}
    for name, ours, default in (("n", "rollouts_per_prompt", 1), ("top_p", "top_p", 1.0), ("top_k", "top_k", -1)):
        value = keys.take(f"{_VALIDATION}{name}", f"evaluation.sampled.{ours}", default=default)
        if value != -1:
            sampled[ours] = value
    keys.put("evaluation.is_greedy", False)
    keys.put("evaluation.sampled", sampled)


def put_demonstrations(keys: Translation) -> None:
    keys.put("data.train", keys.paths("data.train_files", "data.train", default=_DEMONSTRATIONS))
    _columns(keys)
    _lengths(keys)
    if "data.train_batch_size" not in keys.given:
        keys.put("train.prompts_per_step", _BATCH)
    if keys.written.get("data.val_files"):
        target = "data.eval_demonstrations"
        keys.put(target, keys.paths("data.val_files", f"{target} and evaluation"))
        every = keys.take("trainer.test_freq", "evaluation.every_steps")
        keys.put("evaluation", {"every_steps": every} if isinstance(every, int) and every > 0 else {})
        limit = keys.take("data.val_max_samples", "evaluation.max_prompts")
        if isinstance(limit, int) and limit > 0:
            keys.put("evaluation.max_prompts", limit)
        if isinstance(every, str):
            text = f"{every}: set evaluation.every_steps; the loss is measured before the first and after the last step"
            keys.report("trainer.test_freq", KeyVerdict.NOT_SUPPORTED, text)


def _columns(keys: Translation) -> None:
    """Put the columns: two with prompt and response, perhaps inside a struct, or one with messages."""
    messages = [
        keys.take(key, "data.prompt_key", default=None)
        for key in ("data.messages_key", "data.multiturn.messages_key", "data.multiturn.enable")
    ]
    if "data.prompt_key" not in keys.given and "data.response_key" not in keys.given:
        keys.put("data.prompt_key", next((name for name in messages if isinstance(name, str)), "messages"))
        return
    for name in ("prompt", "response"):
        column = keys.take(f"data.{name}_key", f"data.{name}_key", default=name)
        inner = keys.take(f"data.{name}_dict_keys", f"data.{name}_key")
        field = inner[0] if isinstance(inner, list) and inner else None
        keys.put(f"data.{name}_key", f"{column}.{field}" if field is not None else column)


def _lengths(keys: Translation) -> None:
    """Put the lengths; where there is only one for the whole sequence, prompt and answers get half of it each."""
    whole = keys.number("data.max_length", _MAX_LENGTH)
    lengths: dict[str, int] = {}
    for name, target in (("prompt", "data.max_prompt_tokens"), ("response", "sampling.max_response_tokens")):
        lengths[target] = keys.number(f"data.max_{name}_length", whole // 2)
        keys.put(target, lengths[target])
    if "data.max_length" in keys.given:
        keys.mapped("data.max_length", "data.max_prompt_tokens and sampling.max_response_tokens")
        keys.notes.append("data.max_length: prompt and answers have a limit each, half of it; change them as needed")
    context = sum(lengths.values())
    sequences = keys.take("data.micro_batch_size_per_gpu", "train.tokens_per_micro_batch")
    budget = keys.take("data.max_token_len_per_gpu", "train.tokens_per_micro_batch")
    keys.put("train.tokens_per_micro_batch", max(context, _tokens(budget, sequences, context)))
    truncation: Tree = keys.given.get("data.truncation", "error")
    if truncation != "error":
        keys.report("data.truncation", KeyVerdict.NOT_SUPPORTED, "rows are never cut: data.overlong_prompts: drop")
    else:
        keys.report("data.truncation", KeyVerdict.NO_EFFECT, "a row that is too long is refused, as with error")


def _tokens(budget: Tree, sequences: Tree, context: int) -> int:
    if isinstance(budget, int) and budget > 0:
        return budget
    return context * (sequences if isinstance(sequences, int) and sequences > 0 else 4)


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
