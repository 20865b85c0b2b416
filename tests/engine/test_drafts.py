"""Drafts: the options that SGLang gets, and the hooks in its schedulers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch

from megarl.config.draft import DraftConfig, EagleDraftConfig, ModelDraftConfig, NgramDraftConfig
from megarl.config.roles import RolloutRoleConfig
from megarl.engine import drafts
from megarl.engine.drafts import as_chain, draft_words, write_switch
from megarl.engine.process import EngineSpec
from megarl.env import engine_environment
from tests.engine.engines import engine_spec
from tests.engine.test_process import words_of

NGRAM = NgramDraftConfig(kind="ngram", max_requests=32)
MODEL = ModelDraftConfig(kind="model", path=Path("/small"))


def spec_with(draft: DraftConfig, tmp_path: Path, *, requests: int = 16) -> EngineSpec:
    config = RolloutRoleConfig(pool="all", max_running_requests=requests, draft=draft)
    return replace(engine_spec(tmp_path / "model", tmp_path / "run"), device="cuda", config=config)


def value_of(option: str, words: list[str]) -> str:
    return words[words.index(option) + 1]


def test_a_model_drafts_with_its_own_weights_beside_those_of_a_publish(tmp_path: Path) -> None:
    words = words_of(spec_with(MODEL, tmp_path))
    assert value_of("--speculative-algorithm", words) == "STANDALONE"
    assert value_of("--speculative-num-steps", words) == "3"
    assert value_of("--speculative-num-draft-tokens", words) == "4"
    assert value_of("--speculative-draft-model-path", words) == "/small"
    assert value_of("--speculative-draft-load-format", words) == "auto"
    assert "--enable-draft-weights-cpu-backup" not in words


def test_a_draft_comes_back_with_the_memory_that_an_engine_gave_up(tmp_path: Path) -> None:
    shared = replace(spec_with(MODEL, tmp_path), shares_devices=True)
    assert {"--enable-memory-saver", "--enable-draft-weights-cpu-backup"} < set(words_of(shared))


def test_ngrams_are_a_chain(tmp_path: Path) -> None:
    words = words_of(spec_with(NGRAM, tmp_path))
    assert value_of("--speculative-algorithm", words) == "NGRAM"
    assert value_of("--speculative-num-draft-tokens", words) == "8"
    assert value_of("--speculative-ngram-max-bfs-breadth", words) == "1"


def test_an_engine_that_gets_more_requests_than_ngrams_are_for_has_none(tmp_path: Path) -> None:
    words = words_of(spec_with(NGRAM, tmp_path, requests=33))
    assert "--speculative-algorithm" not in words


@pytest.mark.parametrize(("name", "algorithm"), [("LlamaForCausalLMEagle3", "EAGLE3"), ("Qwen2EagleModel", "EAGLE")])
def test_the_kind_of_an_eagle_head_is_in_its_config(name: str, algorithm: str, tmp_path: Path) -> None:
    config = {"architectures": [name], "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(config))
    draft = EagleDraftConfig(kind="eagle", path=tmp_path, num_tokens=5)
    words = draft_words(draft, switch=tmp_path / "switch.json", has_saver=False)
    assert value_of("--speculative-algorithm", words) == algorithm
    assert value_of("--speculative-adaptive-config", words) == str(tmp_path / "switch.json")
    assert "--speculative-adaptive" in words


def test_an_engine_tries_without_drafts_that_are_not_kept(tmp_path: Path) -> None:
    write_switch(MODEL, tmp_path / "switch.json")
    assert json.loads((tmp_path / "switch.json").read_text())["1"]["candidate_steps"] == [0, 3]


def test_a_draft_may_be_made_for_shorter_texts() -> None:
    environments = [
        engine_environment(device="cuda", tensor=1, interface=None, has_draft=has_draft) for has_draft in (False, True)
    ]
    assert ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN" in each for each in environments] == [False, True]


def test_places_without_an_ngram_follow_one_another() -> None:
    """SGLang hangs all of them on the last token."""
    width = 4
    mask = np.tile(np.eye(width, dtype=np.uint8), (2, 1, 1))
    mask[:, :, 0] = 1
    tokens = np.array([7, 0, 0, 0, 8, 5, 0, 0])

    def draft(_corpus: object, _request_ids: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return tokens, mask.reshape(-1)

    given, chained = as_chain(draft, None, ["a", "b"])
    assert given.tolist() == tokens.tolist()
    for each in chained.reshape(2, width, width):
        parents = [int(np.flatnonzero(row[:index])[-1]) for index, row in enumerate(each) if index]
        assert parents == [0, 1, 2]


def test_hooks_and_the_switch_fit_the_sglang_that_is_installed(tmp_path: Path) -> None:
    write_switch(MODEL, tmp_path / "switch.json")
    code = f"""
from types import SimpleNamespace
from megarl.engine.drafts import add_switch, only_with_chains, register_hooks
from megarl.errors import MachineError
from sglang.srt.plugins.hook_registry import HookRegistry
try:
    only_with_chains(print, "started")
except MachineError as error:
    print(error)
register_hooks(["--speculative-algorithm", "NGRAM"])
HookRegistry.apply_hooks()
only_with_chains(print, "started")
worker = SimpleNamespace(speculative_num_steps=3)
add_switch(worker, {str(tmp_path / "switch.json")!r})
print([worker.adaptive_controller.params.get_steps_for_batch(size) for size in (1, 32)])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=600)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("this SGLang drafts n-grams elsewhere"), done.stderr
    assert lines[1:] == ["started", "[3, 3]"], done.stderr


def test_a_worker_whose_rank_sglang_forgot_gets_that_of_its_draft() -> None:
    forgotten: Any = SimpleNamespace(draft_worker=SimpleNamespace(ps="rank 1"))
    known: Any = SimpleNamespace(draft_worker=SimpleNamespace(ps="rank 1"), ps="its own")
    newer: Any = SimpleNamespace(draft_worker=SimpleNamespace())
    for worker in (forgotten, known, newer):
        drafts.give_place(worker)
    assert (forgotten.ps, known.ps, hasattr(newer, "ps")) == ("rank 1", "its own", False)


def test_a_command_for_the_draft_reaches_no_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang before 0.5.21 hands it to the policy as well."""
    policy, draft = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    handled: list[torch.nn.Module] = []
    monkeypatch.setattr("megarl.engine.loader.load", lambda model, _: handled.append(model))
    monkeypatch.setattr(drafts, "_DRAFTING", WeakSet([draft]))
    for model in (draft, policy):
        drafts.load(model, [])
    assert handled == [draft]


def test_a_server_with_a_draft_knows_the_loader_of_its_weights(tmp_path: Path) -> None:
    words = words_of(spec_with(MODEL, tmp_path))
    last = len(words) - words[::-1].index("--custom-weight-loader")
    assert words[last : last + 2] == ["megarl.engine.loader.load", "megarl.engine.drafts.load"]


def test_the_worker_that_is_hooked_has_the_field_of_its_switch() -> None:
    """No CPU imports the worker."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "srt" / "speculative" / "standalone_worker_v2.py"
    text = source.read_text()
    assert "class StandaloneWorkerV2(EAGLEWorkerV2)" in text
    assert "self.adaptive_controller: Optional[AdaptiveController] = None" in text
