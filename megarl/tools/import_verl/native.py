"""Options of SGLang and Megatron that a verl run passes on: which of them a recipe may pass on as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megarl.config.document import Tree
from megarl.config.native.options import refusal
from megarl.config.native.owned import Library
from megarl.tools.import_verl.rules import KeyVerdict, Treatment, rule_for

_INNER: Mapping[str, Library] = {
    "megatron.override_transformer_config": "megatron",
    "megatron.override_ddp_config": "megatron_ddp",
    "optim.override_optimizer_config": "megatron_optimizer",
}
_PREFIXES: Mapping[str, tuple[Library, str]] = {
    "actor_rollout_ref.rollout.engine_kwargs.sglang.": ("sglang", "roles.rollout.sglang"),
    **{
        f"{prefix}{inner}.": (library, f"roles.{role}.{library}")
        for prefix, role in (("actor_rollout_ref.actor.", "actor"), ("critic.", "critic"))
        for inner, library in _INNER.items()
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOn:
    """One option; `text` is the recipe's key where it is mapped, else why it is not."""

    key: str
    verdict: KeyVerdict
    text: str


def passed_on(given: Mapping[str, Tree], *, has_critic: bool) -> Iterator[PassedOn]:
    """Every key of the file that is an option of an engine. verl runs on GPUs."""
    for key, value in given.items():
        rule = rule_for(key)
        if rule is None or rule.treatment is not Treatment.COMPUTE:
            continue
        for prefix, (library, target) in _PREFIXES.items():
            if key.startswith(prefix) and (has_critic or not key.startswith("critic.")):
                name = key.removeprefix(prefix)
                recomputes = given.get(f"{prefix}recompute_granularity") is not None
                verdict, text = _judge(library, name, value, recomputes=recomputes)
                yield PassedOn(
                    key=key, verdict=verdict, text=f"{target}.{name}" if verdict is KeyVerdict.MAPPED else text
                )


def _judge(library: Library, name: str, value: Tree, *, recomputes: bool) -> tuple[KeyVerdict, str]:
    if value is None:
        return KeyVerdict.NO_EFFECT, "off, as in megarl"
    if name.startswith("recompute_") and not recomputes:
        return KeyVerdict.NO_EFFECT, "nothing is recomputed without recompute_granularity"
    complaint = refusal(library, name, value, device="cuda")
    return (KeyVerdict.MAPPED, "") if complaint is None else (KeyVerdict.NOT_SUPPORTED, complaint)
