"""Drafted tokens in SGLang: the options of a server, and two hooks for what SGLang itself lacks.

SGLang keeps a drafted token with the policy's probability of it, so that any draft leaves the distribution as it is, if
a token has no two successors that are equal. N-gram drafts have them: free places are filled with token 0, each as a
further successor of the last token, and its probability would count several times. `as_chain` hangs every place on the
one before. `add_switch` lets an engine with a small model go on without drafts that are not kept, as SGLang does for
EAGLE alone.

`load` hands commands of a publish to the model that drafts. Only engines with a draft open this module: the process
that starts one, and its schedulers.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

import numpy as np

from megarl.config.draft import DraftConfig, NgramDraftConfig
from megarl.config.model import read_eagle_head
from megarl.errors import MachineError

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

ALGORITHM = "--speculative-algorithm"
_SWITCH = "--speculative-adaptive-config"
_CORPUS = "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get"
_NGRAM_WORKER = "sglang.srt.speculative.ngram_worker.NGRAMWorker.__init__"
_WORKER = "sglang.srt.speculative.standalone_worker_v2.StandaloneWorkerV2.__init__"


def draft_words(draft: DraftConfig, *, switch: Path, has_saver: bool) -> list[str]:
    """Return the words of a command line; `switch` is where `write_switch` wrote, `has_saver` whether weights leave."""
    words = [ALGORITHM, _algorithm(draft), "--speculative-num-draft-tokens", str(draft.tokens + 1)]
    if isinstance(draft, NgramDraftConfig):
        # One successor for each token: a tree of guesses is for batches of a few requests.
        return [*words, "--speculative-ngram-min-bfs-breadth", "1", "--speculative-ngram-max-bfs-breadth", "1"]
    words += ["--speculative-num-steps", str(draft.tokens), "--speculative-eagle-topk", "1"]
    # The policy's weights come with a publish, and those of the draft from its folder, once.
    words += ["--speculative-draft-model-path", str(draft.path.absolute()), "--speculative-draft-load-format", "auto"]
    words += ["--enable-draft-weights-cpu-backup"] if has_saver else []
    words += ["--speculative-adaptive"] if draft.kind == "eagle" else []
    return [*words, _SWITCH, str(switch)]


def _algorithm(draft: DraftConfig) -> str:
    match draft.kind:
        case "ngram":
            return "NGRAM"
        case "model":
            return "STANDALONE"
        case "eagle":
            return "EAGLE3" if read_eagle_head(draft.path).is_third else "EAGLE"


def write_switch(draft: DraftConfig, path: Path) -> None:
    """Write the numbers of tokens that SGLang may draft.

    It measures how many are kept, and tries without a draft where fewer than a quarter of a token are in each pass.
    """
    switch = {"candidate_steps": [0, draft.tokens], "up_hysteresis": 0.0, "down_hysteresis": -0.25}
    path.write_text(json.dumps({"1": switch}))


def register_hooks(arguments: Sequence[str]) -> None:
    """Register what a scheduler of a server with these arguments needs; it applies hooks when it loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - only in the server

    algorithm = arguments[arguments.index(ALGORITHM) + 1]
    if algorithm == "NGRAM":
        HookRegistry.register(_CORPUS, as_chain, HookType.AROUND)
        HookRegistry.register(_NGRAM_WORKER, only_with_chains, HookType.AROUND)
    elif algorithm == "STANDALONE":
        config_path = arguments[arguments.index(_SWITCH) + 1]

        def with_switch(start: Callable[..., None], worker: _Worker, *args: object, **kwargs: object) -> None:
            start(worker, *args, **kwargs)
            _DRAFTING.add(worker.draft_worker.draft_runner.model)
            give_place(worker)
            add_switch(worker, config_path)

        HookRegistry.register(_WORKER, with_switch, HookType.AROUND)


def only_with_chains(start: Callable[..., None], *args: object, **kwargs: object) -> None:
    """Start no worker whose n-grams are not hooked: SGLang goes on where it could not apply a hook."""
    if not hasattr(resolve_name(_CORPUS), "__wrapped__"):
        raise MachineError(f"this SGLang drafts n-grams elsewhere than in {_CORPUS}; remove roles.rollout.draft")
    start(*args, **kwargs)


_Drafts = tuple["npt.NDArray[np.int64]", "npt.NDArray[np.uint8]"]


def as_chain(draft: Callable[..., _Drafts], corpus: object, request_ids: list[str], *args: object) -> _Drafts:
    """Return SGLang's drafts with each token as the only successor of the one before, whatever it hung them on."""
    tokens, mask = draft(corpus, request_ids, *args)
    width = len(tokens) // max(1, len(request_ids))
    chain = np.tril(np.ones((width, width), dtype=mask.dtype))
    return tokens, np.broadcast_to(chain, (len(request_ids), width, width)).reshape(mask.shape).copy()


class _Runner(Protocol):
    model: torch.nn.Module


class _DraftWorker(Protocol):
    draft_runner: _Runner
    ps: object


class _Worker(Protocol):
    """The fields of SGLang's worker that are used."""

    speculative_num_steps: int
    adaptive_controller: object
    draft_worker: _DraftWorker
    ps: object


_DRAFTING: WeakSet[torch.nn.Module] = WeakSet()
"""The models of this process that draft."""


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Handle a command for the model that drafts. SGLang before 0.5.21 calls this with the policy's as well."""
    if model in _DRAFTING:
        from megarl.engine import loader  # noqa: PLC0415 - only in a scheduler, which has torch

        loader.load(model, named_tensors)


def give_place(worker: _Worker) -> None:
    """Give the worker its rank where SGLang 0.5.17 forgets it: a load of the draft's weights would end the engine."""
    if hasattr(worker.draft_worker, "ps") and not hasattr(worker, "ps"):
        worker.ps = worker.draft_worker.ps


def add_switch(worker: _Worker, config_path: str) -> None:
    """Give the worker of a small model the controller that SGLang has for EAGLE, whose worker it extends."""
    from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController  # noqa: PLC0415
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams  # noqa: PLC0415

    if "policy" in inspect.signature(AdaptiveController).parameters:  # from 0.5.21, at the latest
        policy = AdaptiveSpeculativeParams(initial_steps=worker.speculative_num_steps, cfg_path=config_path)
        worker.adaptive_controller = AdaptiveController(worker, policy)
    else:
        worker.adaptive_controller = AdaptiveController(worker, config_path)
