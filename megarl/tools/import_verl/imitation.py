"""Translate the keys of verl's SFT trainer: demonstrations, their columns, their lengths and their held-out loss."""

from __future__ import annotations

from megarl.config.document import Tree
from megarl.tools.import_verl.rules import KeyVerdict
from megarl.tools.import_verl.translation import Translation

_DEMONSTRATIONS = "~/data/gsm8k/train.parquet"
_MAX_LENGTH = 1024
_BATCH = 256


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
