"""The state of one translation: keys of a YAML file or a shell script, the recipe so far, a verdict on each key.

The verdict is the most specific row of rules.tsv; known.txt has the names of verl 0.9.1. Options of SGLang and Megatron
that verl passes on are checked as a recipe's own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path

from megarl.config.document import Document, Tree, override, override_value, read_document
from megarl.config.kernels import ENGINE_ONLY
from megarl.config.native import KERNELS, Library, refusal
from megarl.errors import ConfigError, Problem
from megarl.tools.import_verl.shell import KEY_WORD, Script, ShellSyntaxError

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
ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
_NAMED = re.compile(r"^[A-Za-z_]\w*=")
_GROUP = re.compile(r"^\+{0,2}([A-Za-z_][\w@./]*)=(\S+)$")
_OPTION = re.compile(r"^--(nproc[-_]per[-_]node|nnodes|config-name|config-path|config-dir)(?:=(.*))?$")
_OPTION_KEYS = {"nproc": "trainer.n_gpus_per_node", "nnodes": "trainer.nnodes"}
"""The keys that options of torchrun stand for, by how they begin."""
_OWN_CONFIGS = re.compile(
    r"^(?:(?:fully_async|one_step_off)_)?(?:ppo|sft|dapo)(?:_megatron)?_trainer(?:_engine)?(?:\.yaml)?$"
)
"""Configurations of verl itself: its defaults."""
_INTERPOLATION = re.compile(r"^\$\{(?:oc\.(?:select|env):)?([\w.]+)(?:,(.*))?\}$")
_MAX_INTERPOLATIONS = 5
_OUTSIDE = re.compile(r"\$(?P<name>\w+)|\$\{(?P<braced>\w+)[^}]*\}|\$\{[^}]*\}|\$\([^)]*\)|`[^`]*`")
"""A variable that a script does not set, or the output of a command."""
_HYDRA_SECTIONS = ("hydra", "defaults")
_CALLED = re.compile(r"^\s*(?:(?:bash|sh|source|\.)\s+)?([\w./-]+\.sh)\b", re.MULTILINE)
_SBATCH = re.compile(r"^#SBATCH\s+--(nodes|gpus-per-node|gres)[= ](?:gpu:)?(?:\w+:)?(\d+)\b", re.MULTILINE)
_SLURM = {
    "nodes": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gres": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}
"""The variables that Slurm sets from options of a job."""


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


@cache
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


def engine_options(given: Mapping[str, Tree], *, has_critic: bool) -> Iterator[tuple[str, KeyVerdict, str]]:
    """Yield the given keys that are options of SGLang or Megatron, checked for GPUs, where verl runs.

    The text is the recipe's key where it is mapped, else why it is not.
    """
    for key, value in given.items():
        rule = rule_for(key)
        if rule is None or rule.treatment is not Treatment.COMPUTE:
            continue
        for prefix, (library, target) in _PREFIXES.items():
            if key.startswith(prefix) and (has_critic or not key.startswith("critic.")):
                name = key.removeprefix(prefix)
                recomputes = given.get(f"{prefix}recompute_granularity") is not None
                verdict, text = _option_verdict(library, name, value, recomputes=recomputes)
                yield key, verdict, f"{target}.{name}" if verdict is KeyVerdict.MAPPED else text


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The verdict on one key."""

    key: str
    value: Tree
    verdict: KeyVerdict
    text: str
    """The recipe's key, or why there is none, or what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    tree: dict[str, Tree]
    entries: tuple[Entry, ...]
    """One per key of the file, in its order."""
    notes: tuple[str, ...]
    """The assumptions of the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlKeys:
    values: Mapping[str, Tree]
    notes: tuple[str, ...] = ()


class Translation:
    def __init__(self, keys: VerlKeys, *, name: str) -> None:
        self.written = keys.values
        self.given = {key: value for key, value in keys.values.items() if not is_unresolved(value)}
        """The keys whose values do not depend on something outside the file."""
        self.name = name
        self.notes = list(keys.notes)
        self.has_critic = False
        self.has_fp8_engines = False
        self.is_sft = not any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in self.written)
        self.is_ahead = any(key.startswith(("async_training.", "rollout.n_gpus_per_node")) for key in self.written)
        """Whether engines have GPUs of their own and generate while the trainer trains."""
        self.pool, self.engine_pool = ("train", "rollout") if self.is_ahead else ("shared", "shared")
        self._document = Document(tree={}, origins={})
        self._entries: dict[str, Entry] = {}

    def take(self, key: str, target: str, *, default: Tree = None) -> Tree:
        """Return the given value or `default`, and report that the key became `target`."""
        value = self.given.get(key)
        if key in self.given:
            self.mapped(key, target)
        return default if value is None else value

    def move(self, key: str, target: str, *, default: Tree = None) -> None:
        """Put the given value, or the default if there is one, at `target`."""
        value = self.take(key, target, default=default)
        if value is not None:
            self.put(target, value)

    def move_count(self, key: str, target: str) -> None:
        """Put a given whole number above 0 at `target`; others stand for no limit."""
        value = self.take(key, target)
        if isinstance(value, int) and value > 0:
            self.put(target, value)

    def move_path(self, key: str, target: str) -> None:
        path = self.path(key, target)
        if path is not None:
            self.put(target, path)

    def path(self, key: str, target: str, *, default: str | None = None) -> str | None:
        """Return a given path or `default`; what is not known of it becomes a name that the user has to replace."""
        value = self.written.get(key)
        if value is None:
            return None if default is None else self._path(default, key)
        self.report(key, KeyVerdict.MAPPED, target)
        return self._path(str(value), key)

    def _path(self, text: str, key: str) -> str:
        if is_unresolved(text):
            self.notes.append(f"{key}={text}: {reason_unresolved(text)}")
            text = _OUTSIDE.sub(lambda use: re.sub(r"^(\d)", r"ARGUMENT_\1", _name_of(use)), text)
        return str(Path(text).expanduser())

    def paths(self, key: str, target: str, *, default: str | None = None) -> list[Tree]:
        """Return the paths of a key that takes one or several."""
        value = self.written.get(key)
        if isinstance(value, str) and value.startswith("["):
            # A list with a variable in it is still text.
            value = [part.strip(" '\"") for part in value.strip("[]").split(",")]
        if isinstance(value, list):
            self.report(key, KeyVerdict.MAPPED, target)
            return [self._path(str(each), key) for each in value]
        path = self.path(key, target, default=default)
        return [] if path is None else [path]

    def number(self, key: str, default: int) -> int:
        value = self.given.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def put(self, key: str, value: Tree) -> None:
        self._document = override_value(self._document, tuple(key.split(".")), value)

    def __contains__(self, key: str) -> bool:
        """Whether the recipe has a value at this key."""
        tree: Tree = self._document.tree
        for name in key.split("."):
            if not isinstance(tree, dict) or name not in tree:
                return False
            tree = tree[name]
        return True

    def mapped(self, key: str, target: str) -> None:
        """Report that a key became `target`, unless its value is not known and the default is taken."""
        value = self.written.get(key)
        if is_unresolved(value):
            self.report(key, KeyVerdict.NOT_SUPPORTED, reason_unresolved(value))
        else:
            self.report(key, KeyVerdict.MAPPED, target)

    def report(self, key: str, verdict: KeyVerdict, text: str) -> None:
        if key in self.written:
            self._entries[key] = Entry(key=key, value=self.written[key], verdict=verdict, text=text)

    def imported(self) -> Imported:
        """Return the recipe, with an entry for every given key, also for those that nothing was done with."""
        entries = tuple(self._entries.get(key) or _untouched_entry(key, value) for key, value in self.written.items())
        return Imported(tree=self._document.tree, entries=entries, notes=tuple(self.notes))


def whole(value: Tree, *, default: int) -> int:
    """Return a positive whole number, or else the default."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


def _name_of(outside: re.Match[str]) -> str:
    return outside["name"] or outside["braced"] or ""


def without_outside(text: str) -> str:
    """Return a text without what is not known of it."""
    return _OUTSIDE.sub("", text)


def is_unresolved(value: Tree) -> bool:
    """Whether a value depends on something outside the file."""
    return isinstance(value, str) and "$" in value


def reason_unresolved(value: Tree) -> str:
    """Return why a value is not known, and how to give it."""
    outside = _OUTSIDE.search(str(value))
    name = _name_of(outside) if outside is not None else ""
    if not name or re.search(r"\$\{\w+[.:]", str(value)):
        return "an interpolation or the output of a command; write the value out"
    if name.isdigit():
        return f"argument {name} of the script; write the arguments after the file"
    return f"a variable that the script does not set; write {name}=VALUE after the file"


def _untouched_entry(key: str, value: Tree) -> Entry:
    """Return the entry of a key that no section used."""
    rule = rule_for(key)
    if is_unresolved(value) and rule is not None and rule.treatment in (Treatment.RENAME, Treatment.COMPUTE):
        return Entry(key=key, value=value, verdict=KeyVerdict.NOT_SUPPORTED, text=reason_unresolved(value))
    if rule is None:
        near = nearest_known(key)
        text = f"verl 0.9.1 has no such key; did you mean {near}?" if near else "verl 0.9.1 has no such key"
        return Entry(key=key, value=value, verdict=KeyVerdict.UNKNOWN, text=text)
    verdict, text = _rule_verdict(rule, key, value)
    return Entry(key=key, value=value, verdict=verdict, text=text)


def _rule_verdict(rule: KeyRule, key: str, value: Tree) -> tuple[KeyVerdict, str]:
    is_off = value in (None, False, 0, -1, "") or value in ([], {}) or (value == 1 and key.endswith("_size"))
    match rule.treatment:
        case Treatment.UNSUPPORTED if is_off:
            return KeyVerdict.NO_EFFECT, "off, as in megarl"
        case Treatment.UNSUPPORTED:
            return KeyVerdict.NOT_SUPPORTED, rule.text
        case Treatment.NONE:
            return KeyVerdict.NO_EFFECT, rule.text
        case Treatment.RENAME | Treatment.COMPUTE:
            return KeyVerdict.NO_EFFECT, "has no use with the other keys"


def read_verl(path: Path, arguments: Sequence[str] = ()) -> VerlKeys:
    """Return the values by dotted key, in the order of the file; a later one replaces an earlier one.

    `arguments` are those of a script; `NAME=value` sets a variable that the script takes from its environment.
    """
    if path.suffix in (".yaml", ".yml"):
        tree = {name: value for name, value in read_document(path).tree.items() if name not in _HYDRA_SECTIONS}
        return VerlKeys(values=_resolved(dict(_flat(tree, ""))))
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), (Problem(key="", message=f"cannot be read: {error}"),)) from None
    named = dict(argument.split("=", 1) for argument in arguments if _NAMED.match(argument))
    slurm = {name: count for option, count in _SBATCH.findall(text) for name in _SLURM[option]}
    outside = {"HOME": "~", "PWD": ".", "BASH_SOURCE": str(path), **slurm, **named}
    positional = [argument for argument in arguments if not _NAMED.match(argument)]
    for holds_unknown in (False, True):
        variables = {name: [value] for name, value in outside.items()}
        script = Script(arguments=positional, variables=variables, holds_unknown=holds_unknown)
        try:
            found = _from_words(script.read(text), path)
        except ShellSyntaxError as error:
            raise ConfigError(str(path), (Problem(key="", message=f"not a shell script: {error}"),)) from None
        if found.values:
            break
    if not found.values:
        message = "no key=value words as verl takes them; name a YAML file or a shell script"
        if called := _CALLED.findall(text):
            message = f"starts no trainer itself; import the script that it calls: {called[0]}"
        raise ConfigError(str(path), (Problem(key="", message=message),))
    if script.holds_unknown:
        note = "the trainer depends on the script's arguments; it is read as if they asked for it"
        found = replace(found, notes=(*found.notes, note))
    if script.num_trainers > 1:
        note = f"the script starts {script.num_trainers} trainers; the recipe is that of the first"
        found = replace(found, notes=(*found.notes, note))
    return found


def _from_words(words: Sequence[str], path: Path) -> VerlKeys:
    """Return the keys among the words of a command, the groups of defaults that it chooses, and torchrun's ranks."""
    options: dict[str, str] = {}
    values: dict[str, Tree] = {}
    groups: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        key, group, option = KEY_WORD.match(word), _GROUP.match(word), _OPTION.match(word)
        if key is not None:
            values |= _flat({key[1]: _parsed(key[2])}, "")
        elif option is not None:
            options[option[1]] = option[2] or following
        elif group is not None:
            groups[group[1]] = group[2]
    notes = [f"{name}={value}: a group of verl's defaults; only keys are taken over" for name, value in groups.items()]
    named = _named_configuration(options, path)
    ranks = {
        key: _parsed(options[name])
        for name in options
        for begin, key in _OPTION_KEYS.items()
        if begin == name[: len(begin)]
    }
    return VerlKeys(values=_resolved({**named.values, **ranks, **values}), notes=(*named.notes, *notes))


def _named_configuration(options: Mapping[str, str], path: Path) -> VerlKeys:
    """Return the keys of the configuration that a command names, if it is none of verl's own and its file is here."""
    name = options.get("config-name", "")
    if not name or _OWN_CONFIGS.match(name):
        return VerlKeys(values={})
    folder = Path(options.get("config-dir") or options.get("config-path", "config")).expanduser()
    file = name if name.endswith(".yaml") else f"{name}.yaml"
    for place in (folder / file, path.parent / folder / file):
        if place.is_file():
            return read_verl(place)
    note = f"--config-name {name}: {folder / file} is not here, and its keys are missing: import it where it is"
    return VerlKeys(values={}, notes=(note,))


def _parsed(text: str) -> Tree:
    """Return the value of a word, as YAML where it is YAML."""
    if "$" in text:
        return text
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" and text[1] in "[{":
        # Quotes within a string that the shell split.
        text = text[1:-1]
    try:
        return override(Document(tree={}, origins={}), f"value={text}").tree["value"]
    except ConfigError:
        return text


def _resolved(values: dict[str, Tree]) -> dict[str, Tree]:
    """Replace interpolations by the values that they name, where the file gives them."""
    for key, value in values.items():
        for _ in range(_MAX_INTERPOLATIONS):
            named = _INTERPOLATION.match(value) if isinstance(value, str) else None
            if named is None:
                break
            value = values.get(named[1], _parsed(named[2]) if named[2] is not None else None)
        if value is not None and not is_unresolved(value):
            values[key] = value
    return values


def _flat(tree: dict[str, Tree], prefix: str) -> Iterator[tuple[str, Tree]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
