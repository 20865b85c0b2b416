"""The verdict on each verl key: the most specific row of rules.tsv; known.txt has the names of verl 0.9.1.

Options of SGLang and Megatron that verl passes on are checked as a recipe's own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

from megarl.config.document import Tree
from megarl.config.kernels import ENGINE_ONLY
from megarl.config.native import KERNELS, Library, refusal


class KeyVerdict(StrEnum):
    MAPPED = "mapped"
    NO_EFFECT = "no effect"
    NOT_SUPPORTED = "not supported"
    UNKNOWN = "unknown"


class Treatment(StrEnum):
    RENAME = "rename"
    """The value is taken over as it is; the text is the recipe's key."""
    COMPUTE = "compute"
    """`translate` has code for it."""
    NONE = "none"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRule:
    pattern: str
    treatment: Treatment
    text: str
    lacks: str = ""
    """Pattern of the recipe's keys that an unsupported one would become, `-` if none could: no key matches it."""


_INNER: Mapping[str, Library] = {
    "megatron.override_transformer_config": "megatron",
    "megatron.override_ddp_config": "megatron_ddp",
    "optim.override_optimizer_config": "megatron_optimizer",
}
_PREFIXES: Mapping[str, tuple[Library, str]] = {
    "actor_rollout_ref.rollout.engine_kwargs.sglang.": ("sglang", "roles.rollout.sglang"),
    "engine.override_transformer_config.": ("megatron", "roles.actor.megatron"),
    **{
        f"{prefix}{inner}.": (library, f"roles.{role}.{library}")
        for prefix, role in (("actor_rollout_ref.actor.", "actor"), ("critic.", "critic"))
        for inner, library in _INNER.items()
    },
}
_OFF = (
    "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer",
    "moe_aux_loss_coeff",
    "moe_enable_deepep",
    "moe_router_bias_update_rate",
    "moe_shared_expert_overlap",
)
"""Options that megarl does not pass on, and that do nothing where they are false or 0."""
_LIKE_ACTOR = ("critic.", "actor_rollout_ref.ref.")


def rule_for(key: str) -> KeyRule | None:
    """Return None for a key that verl does not have. A key of the critic or the reference without a rule of its own
    has the actor's, where that one says that the key is not used."""
    own = next((rule for rule in all_rules() if fnmatchcase(key, rule.pattern)), None)
    prefix = next((prefix for prefix in _LIKE_ACTOR if key.startswith(prefix)), None)
    if own is not None or prefix is None:
        return own
    name = key.removeprefix(prefix)
    likely = (rule_for(f"actor_rollout_ref.{name}"), rule_for(f"actor_rollout_ref.actor.{name}"))
    return next((rule for rule in likely if rule and rule.treatment in (Treatment.NONE, Treatment.UNSUPPORTED)), None)


def nearest_known(key: str) -> str | None:
    matches = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.8)
    return matches[0] if matches else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOption:
    """An option of SGLang or Megatron; `text` is the recipe's key where it is mapped, else why it is not."""

    key: str
    verdict: KeyVerdict
    text: str


def engine_options(given: Mapping[str, Tree], *, has_critic: bool) -> Iterator[EngineOption]:
    """Return the given keys that are options of SGLang or Megatron, checked for GPUs, where verl runs."""
    for key, value in given.items():
        rule = rule_for(key)
        if rule is None or rule.treatment is not Treatment.COMPUTE:
            continue
        for prefix, (library, target) in _PREFIXES.items():
            if key.startswith(prefix) and (has_critic or not key.startswith("critic.")):
                name = key.removeprefix(prefix)
                recomputes = given.get(f"{prefix}recompute_granularity") is not None
                verdict, text = _option_verdict(library, name, value, recomputes=recomputes)
                yield EngineOption(
                    key=key, verdict=verdict, text=f"{target}.{name}" if verdict is KeyVerdict.MAPPED else text
                )


def _option_verdict(library: Library, name: str, value: Tree, *, recomputes: bool) -> tuple[KeyVerdict, str]:
    if value is None:
        return KeyVerdict.NO_EFFECT, "off, as in megarl"
    if name.startswith("recompute_") and not recomputes:
        return KeyVerdict.NO_EFFECT, "nothing is recomputed without recompute_granularity"
    complaint = refusal(library, name, value, device="cuda") or (ENGINE_ONLY.get(name) if value else None)
    if complaint is None:
        return KeyVerdict.MAPPED, ""
    if complaint == KERNELS:
        return KeyVerdict.NO_EFFECT, "megarl chooses this kernel"
    if not value and name in _OFF:
        return KeyVerdict.NO_EFFECT, "off, as in megarl"
    return KeyVerdict.NOT_SUPPORTED, complaint


@cache
def known_keys() -> tuple[str, ...]:
    return tuple(_data("known.txt").split())


@cache
def all_rules() -> tuple[KeyRule, ...]:
    rows = [line.split("\t") for line in _data("rules.tsv").splitlines()]
    found = [
        KeyRule(pattern=pattern, treatment=Treatment(word), text=text, lacks="".join(lacks))
        for pattern, word, text, *lacks in rows
    ]
    return tuple(sorted(found, key=lambda rule: -len(rule.pattern.replace("*", ""))))


def _data(name: str) -> str:
    return (files("megarl.tools.import_verl") / name).read_text(encoding="utf-8")
