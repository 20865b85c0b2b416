"""Tokenised prompts from parquet files, and the demonstrations among them. `rows` checks the files, `stream` orders.

Knows no epochs: the position of a prompt is its place in the set, its epoch is 0.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from megarl.config.recipe import DataConfig
from megarl.data.rows import DataRow, check_pairs, read_rows
from megarl.data.tokenizer import Chat, Template, Tokenizer, ToolFunction, load_tokenizer
from megarl.errors import DataError, MachineError
from megarl.system.guard import die_with_parent
from megarl.tokens import Content
from megarl.types import (
    DEMONSTRATION,
    BoolArray,
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    ScoredGroup,
    TokenArray,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_ROWS_PER_CHUNK = 1024
_ROWS_PER_WORKER = 8192
"""Fewer rows are tokenised in less time than a worker process takes to start."""
_MAX_WORKERS = 16

_Encoded: TypeAlias = tuple[list[TokenArray], list[tuple[TokenArray, BoolArray]]]
"""The prompts of some rows; and the demonstrations of those that have one, with what of them is imitated."""


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    prompts: tuple[Prompt, ...]
    num_dropped: int
    """Rows dropped for their length, if the recipe allows that."""

    @cached_property
    def digest(self) -> str:
        """Digest of all prompts in their order: equal digests mean that positions in the stream are comparable."""
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self.prompts:
            parts = [prompt.uid.encode(), prompt.token_ids.tobytes(), prompt.ground_truth.encode()]
            arrays = (prompt.demonstration, prompt.demonstration_mask, prompt.rejected)
            parts += [b"" if array is None else array.tobytes() for array in arrays]
            for part in parts:
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()


def load_prompts(files: Sequence[Path], config: DataConfig, tokenizer: Tokenizer) -> PromptSet:
    """Return the prompts to generate answers to, each with the ground truth that its score needs."""
    prompts = _tokenise(read_rows(files, config, as_demonstrations=False), tokenizer)
    return _without_overlong(prompts, [_prompt_limit(config)], config)


def load_demonstrations(
    files: Sequence[Path], config: DataConfig, tokenizer: Tokenizer, *, max_response_tokens: int
) -> PromptSet:
    """Return the prompts with the answers to imitate: the response column, or else assistant messages."""
    prompts = _tokenise(read_rows(files, config, as_demonstrations=True), tokenizer)
    response_limit = _Limit(
        key="sampling.max_response_tokens",
        max_tokens=max_response_tokens,
        length=lambda prompt: 0 if prompt.demonstration is None else len(prompt.demonstration),
    )
    return _without_overlong(prompts, [_prompt_limit(config), response_limit], config)


def load_pairs(
    files: Sequence[Path], config: DataConfig, tokenizer: Tokenizer, *, max_response_tokens: int, as_chats: bool = False
) -> PromptSet:
    """Return the prompts with two answers each, the better one as the demonstration.

    With `as_chats` an answer goes on to where the template ends the chat, as a reward model reads it on engines.
    """
    check_pairs(files, config)
    chosen, rejected = (
        _tokenise(
            read_rows(files, config.model_copy(update={"response_key": key}), as_demonstrations=True),
            tokenizer,
            as_chats=as_chats,
        )
        for key in (config.chosen_key, config.rejected_key)
    )
    pairs = list(map(_pair_of_chats if as_chats else _pair, chosen, rejected))
    limit = _Limit(
        key="sampling.max_response_tokens",
        max_tokens=max_response_tokens,
        length=lambda prompt: max(len(answer) for answer in _answers(prompt)),
    )
    return _without_overlong(pairs, [_prompt_limit(config), limit], config)


def _pair(better: Prompt, worse: Prompt) -> Prompt:
    return replace(better, rejected=worse.demonstration)


def _pair_of_chats(better: Prompt, worse: Prompt) -> Prompt:
    """Return the pair of two whole chats: the prompt is the part of it that both begin with."""
    whole, other = better.demonstration, worse.demonstration
    assert whole is not None, f"row {better.uid} has no chosen answer"
    assert other is not None, f"row {better.uid} has no rejected answer"
    longest = min(len(better.token_ids), len(whole), len(other))
    heads = (better.token_ids[:longest], whole[:longest], other[:longest])
    differs = (heads[0] != heads[1]) | (heads[0] != heads[2])
    shared = int(differs.argmax()) if differs.any() else longest
    return replace(
        better,
        token_ids=whole[:shared],
        demonstration=whole[shared:],
        demonstration_mask=None,
        rejected=other[shared:],
    )


def _answers(prompt: Prompt) -> list[TokenArray]:
    return [answer for answer in (prompt.demonstration, prompt.rejected) if answer is not None]


def _tokenise(rows: Sequence[DataRow], tokenizer: Tokenizer, *, as_chats: bool = False) -> list[Prompt]:
    """Tokenise all rows, many of them in worker processes."""
    chunks = [rows[start : start + _ROWS_PER_CHUNK] for start in range(0, len(rows), _ROWS_PER_CHUNK)]
    num_workers = min(_num_cores(), _MAX_WORKERS, len(rows) // _ROWS_PER_WORKER)
    if num_workers > 1:
        encodings = _encode_all(chunks, tokenizer, num_workers, as_chats=as_chats)
    else:
        encodings = map(partial(_encode, tokenizer, as_chats=as_chats), chunks)
    prompts: list[Prompt] = []
    for chunk, (questions, answers) in zip(chunks, encodings, strict=True):
        remaining = iter(answers)
        for row, token_ids in zip(chunk, questions, strict=True):
            demonstration, mask = next(remaining) if row.continuation else (None, None)
            prompts.append(
                Prompt(
                    uid=row.uid,
                    position=len(prompts),
                    epoch=0,
                    token_ids=token_ids,
                    data_source=row.data_source,
                    ground_truth=row.ground_truth,
                    extra_info=row.extra_info,
                    messages=row.chat,
                    demonstration=demonstration,
                    demonstration_mask=mask,
                )
            )
        logger.info("tokenised num_rows=%d of=%d", len(prompts), len(rows))
    return prompts


def _encode(tokenizer: Tokenizer, rows: Sequence[DataRow], *, as_chats: bool) -> _Encoded:
    questions = tokenizer.encode([_named(row, tokenizer.render_chat, row.chat) for row in rows])
    if as_chats:
        wholes = [_named(row, tokenizer.render_answered, (*row.chat, *row.continuation)) for row in rows]
        return questions, [(token_ids, np.ones(len(token_ids), np.bool_)) for token_ids in tokenizer.encode(wholes)]
    answered = [_named(row, tokenizer.spans, row.chat, row.continuation) for row in rows if row.continuation]
    return questions, tokenizer.encode_spans(answered)


def _encode_all(
    chunks: Sequence[Sequence[DataRow]], tokenizer: Tokenizer, num_workers: int, *, as_chats: bool
) -> Iterator[_Encoded]:
    """Yield the encoded chunks in their order, so that the first row that is refused is the first of the data."""
    # Spawned, not forked: this process has threads. Workers that outlive a killed driver would wait for ever.
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer.folder, tokenizer.vocab, tokenizer.template, tokenizer.tools, os.getpid()),
    )
    try:
        yield from pool.map(partial(_encode_in_worker, as_chats=as_chats), chunks)
    except BrokenProcessPool as error:
        raise MachineError(
            "a process that tokenises the data was killed; is there enough memory? (data.train, data.eval)"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_tokenizer_of_worker: Tokenizer | None = None


def _start_worker(folder: Path, vocab: int, template: Template, tools: Sequence[ToolFunction], parent: int) -> None:
    global _tokenizer_of_worker
    die_with_parent(parent)
    _tokenizer_of_worker = load_tokenizer(folder, vocab=vocab, template=template, tools=tools)


def _encode_in_worker(rows: Sequence[DataRow], *, as_chats: bool) -> _Encoded:
    assert _tokenizer_of_worker is not None, "_start_worker comes first"
    return _encode(_tokenizer_of_worker, rows, as_chats=as_chats)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _named(row: DataRow, render: Callable[..., _T], *chats: Chat) -> _T:
    """Return what `render` makes of the row's messages; an error names the row."""
    try:
        return render(*chats)
    except DataError as error:
        raise DataError(f"{row.uid}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    key: str
    max_tokens: int
    length: Callable[[Prompt], int]


def _prompt_limit(config: DataConfig) -> _Limit:
    return _Limit(
        key="data.max_prompt_tokens",
        max_tokens=config.max_prompt_tokens,
        length=lambda prompt: len(prompt.token_ids),
    )


def _without_overlong(prompts: Sequence[Prompt], limits: Sequence[_Limit], config: DataConfig) -> PromptSet:
    """Return the prompts within the limits; a longer one is dropped or an error, as the recipe says."""
    complaints = [complaint for limit in limits if (complaint := _complaint(prompts, limit))]
    if complaints and config.overlong_prompts == "refuse":
        raise DataError(f"{'; '.join(complaints)}; or set data.overlong_prompts to drop")
    within = [prompt for prompt in prompts if all(limit.length(prompt) <= limit.max_tokens for limit in limits)]
    if not within:
        raise DataError(f"no prompt is left: {'; '.join(complaints)}")
    num_dropped = len(prompts) - len(within)
    if num_dropped:
        logger.warning("dropped overlong prompts num_dropped=%d num_prompts=%d", num_dropped, len(within))
    return PromptSet(
        prompts=tuple(replace(prompt, position=place) for place, prompt in enumerate(within)),
        num_dropped=num_dropped,
    )


def _complaint(prompts: Sequence[Prompt], limit: _Limit) -> str:
    """Return one line about the rows over the limit; empty without any."""
    overlong = [prompt for prompt in prompts if limit.length(prompt) > limit.max_tokens]
    if not overlong:
        return ""
    longest = max(overlong, key=limit.length)
    return (
        f"{len(overlong)} of {len(prompts)} rows are longer than {limit.key} {limit.max_tokens} "
        f"(longest: {longest.uid} with {limit.length(longest)} tokens); raise it"
    )


class Demonstrations:
    """A `stages.Generator` that answers each prompt with the response of the data set, or with both of a pair."""

    def __init__(self, tokenizer: Tokenizer, *, is_scored_at_end: bool = False) -> None:
        """`is_scored_at_end`: the loss counts one number of each answer, that after its last token."""
        self._tokenizer = tokenizer
        self._is_scored_at_end = is_scored_at_end

    async def generate(self, prompt: Prompt) -> RolloutGroup:
        assert prompt.demonstration is not None, f"prompt {prompt.uid} has no demonstration; it was not loaded as one"
        masks = (prompt.demonstration_mask, None)
        rollouts = [self._rollout(answer, mask) for answer, mask in zip(_answers(prompt), masks, strict=False)]
        return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))

    def _rollout(self, token_ids: TokenArray, mask: BoolArray | None) -> Rollout:
        if self._is_scored_at_end:
            # A position's number stands at its target: one more target has the number of the whole answer.
            token_ids = np.append(token_ids, np.int32(0))
            mask = np.arange(len(token_ids)) == len(token_ids) - 1
        return Rollout(
            content=Content(
                token_ids=token_ids,
                logprobs=np.zeros(len(token_ids), dtype=np.float32),
                text=self._tokenizer.decode_response(token_ids),
            ),
            versions=np.full(len(token_ids), DEMONSTRATION, dtype=np.int32),
            loss_mask=np.ones(len(token_ids), np.bool_) if mask is None else mask,
            finish_reason=FinishReason.STOP,
        )


class DemonstrationScorer:
    """A `stages.Scorer` that gives the answers of each prompt the same scores."""

    def __init__(self, values: tuple[float, ...] = (1.0,)) -> None:
        self._scores = tuple(Score(value=value, components={}) for value in values)

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        return ScoredGroup(group=group, scores=self._scores)
