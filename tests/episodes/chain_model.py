"""Models that say what a test wants, on real engines: the next token depends on the last one alone, by a given table.

Embeddings are orthogonal and layers add nothing, so that the output layer is the table of logits. All log-probabilities
are known, and a call of a tool is one token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megarl.config.model import read_model_shape
from megarl.data.tokenizer import Tokenizer, ToolFunction, load_tokenizer
from megarl.families.shape import ModelShape
from megarl.types import Rollout
from tests.episodes.templates import write_tokenizer
from tests.tiny_models import QWEN2

MAX_CONTEXT = 4096
VOCAB = 384
"""One size for all families, so that one engine serves them in turn."""
_UNLIKELY = -30.0
_HEAD_DIM = 64


def call_of(name: str, **arguments: int | str) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


CALL_ADD = call_of("add", a=3, b=4)
RIGHT_STEP, WRONG_STEP = call_of("step", guess=7), call_of("step", guess=3)
RIGHT_COMMAND = call_of("bash", command="echo 'Hello, world!' > hello.txt")
WRONG_COMMAND = call_of("bash", command="rm -f hello.txt; ls -la /app")
SPOKEN = (CALL_ADD, RIGHT_STEP, WRONG_STEP, RIGHT_COMMAND, WRONG_COMMAND, "seven", "eight")
"""Texts of one token each."""


@dataclass(frozen=True, kw_only=True)
class ChainModel:
    folder: Path
    shape: ModelShape
    logprobs: npt.NDArray[np.float64]  # [last token, next token]

    def tokenizer(self, tools: Sequence[ToolFunction] = ()) -> Tokenizer:
        return load_tokenizer(self.folder, vocab=self.shape.vocab, tools=tools)

    def largest_error(self, prompt_ids: npt.NDArray[np.int32], rollout: Rollout) -> float:
        """Return how far the log-probability of a sampled token is from the table's, given the token before it."""
        whole = np.concatenate([prompt_ids, rollout.token_ids])
        first = len(prompt_ids)
        expected = self.logprobs[whole[first - 1 : -1], whole[first:]]
        return float(np.abs(rollout.logprobs - expected)[rollout.loss_mask].max())


def write_chain(folder: Path, family: str, said: Mapping[str, float]) -> ChainModel:
    """Write a model whose responses are these texts with their probabilities, each one token and the end."""
    _, tokenizer = _tokenizer(folder, family)
    logits = np.full((VOCAB, VOCAB), _UNLIKELY)
    logits[:, tokenizer.eos_ids[0]] = 0.0
    begin = _generation_start(tokenizer)
    logits[begin] = _UNLIKELY
    for text, probability in said.items():
        (token_id,) = tokenizer.encode([text])[0].tolist()
        logits[begin, token_id] = np.log(probability)
    return _write(folder, logits)


def write_babble(folder: Path, family: str, *, end: float) -> ChainModel:
    """Write a model that says anything: any token follows any other, and the end with probability `end`."""
    num_known, tokenizer = _tokenizer(folder, family)
    logits = np.random.default_rng(num_known).normal(size=(VOCAB, VOCAB))
    ends = list(tokenizer.eos_ids)
    logits[:, [*ends, *range(num_known, VOCAB)]] = _UNLIKELY
    others = np.log(np.exp(logits).sum(axis=1))
    logits[:, ends[0]] = np.log(end / (1 - end)) + others
    logits[_generation_start(tokenizer), ends[0]] = _UNLIKELY
    return _write(folder, logits)


def _tokenizer(folder: Path, family: str) -> tuple[int, Tokenizer]:
    num_known = write_tokenizer(folder, family, added=SPOKEN)
    return num_known, load_tokenizer(folder, vocab=VOCAB)


def _generation_start(tokenizer: Tokenizer) -> int:
    """Return the token after which every response begins."""
    return int(tokenizer.encode([tokenizer.render_chat([{"role": "user", "content": "hi"}])])[0][-1])


def _write(folder: Path, logits: npt.NDArray[np.float64]) -> ChainModel:
    hidden = VOCAB
    config_class, model_class = QWEN2
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=hidden // _HEAD_DIM,
        num_key_value_heads=2,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )
    generation = (folder / "generation_config.json").read_text()
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        # A vector of length sqrt(hidden) is its own norm.
        model.model.embed_tokens.weight[:] = hidden**0.5 * torch.eye(VOCAB)
        model.lm_head.weight[:] = torch.from_numpy(logits.T / hidden**0.5).float()
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(generation)
    table = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return ChainModel(folder=folder, shape=read_model_shape(folder), logprobs=table)
