"""Tokenised prompts from parquet files, and the demonstrations among them. `rows` checks the files, `stream` orders.

Knows no epochs: the position of a prompt is its place in the set, its epoch is 0.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from megarl.config.algorithm import RowKind
from megarl.config.recipe import DataConfig
from megarl.data.images import ImageError, ImageReader
from megarl.data.rows import (
    DataRow,
    RowBatch,
    check_files,
    check_pairs,
    checked_rows,
    num_rows_of,
    refuse_bad_rows,
    row_batches,
    row_keys,
)
from megarl.data.tokenizer import Chat, Template, Tokenizer, ToolFunction, load_tokenizer, without_torch
from megarl.errors import DataError, MachineError
from megarl.system.guard import die_with_parent
from megarl.tokens import Content
from megarl.types import (
    DEMONSTRATION,
    BoolArray,
    FinishReason,
    ImagePlace,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    ScoredGroup,
    TokenArray,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_ROWS_PER_WORKER = 8192
"""Fewer rows are tokenised in less time than a worker process takes to start."""
_IMAGE_ROWS_PER_WORKER = 256
_MAX_WORKERS = 16
_PARTS_PER_WORKER = 4
"""Batches of rows that wait for each worker: more would only take memory."""

_Encoded: TypeAlias = tuple[list[TokenArray], list[tuple[TokenArray, BoolArray]]]
"""The prompts of some rows; and the demonstrations of those that have one, with what of them is imitated."""


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    prompts: tuple[Prompt, ...]
    num_prompts: int
    """Rows within the limits of length; more than `prompts` where only the first of each source are kept."""
    num_dropped: int
    """Rows dropped for their length, if the recipe allows that."""

    @cached_property
    def digest(self) -> str:
        """Digest of all prompts in their order: equal digests mean that positions in the stream are comparable."""
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self.prompts:
            parts = [prompt.uid.encode(), prompt.token_ids.tobytes(), prompt.ground_truth.encode()]
            parts += [image.digest.encode() for image in prompt.images]
            arrays = (prompt.demonstration, prompt.demonstration_mask, prompt.rejected)
            parts += [b"" if array is None else array.tobytes() for array in arrays]
            for part in parts:
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """Reads prompts from files: what of a row becomes a prompt, and which rows are too long."""

    config: DataConfig
    kind: RowKind
    max_response_tokens: int = 0
    """The limit of given answers."""
    as_chats: bool = False
    """An answer of a pair goes on to where the template ends the chat, as a reward model reads it on engines."""
    images: ImageReader | str = "the model sees none"
    """A text says why there can be none."""
    keeps_all: bool = True
    """False keeps the first prompt of each data source: the others are checked and counted."""

    def read(self, files: Sequence[Path], tokenizer: Tokenizer) -> PromptSet:
        """Return the prompts; raise a DataError that names a row."""
        check_files(files, self.config, as_demonstrations=self.kind != "prompts")
        if self.kind == "pairs":
            check_pairs(files, self.config)
        num_rows, num_read, num_prompts = num_rows_of(files), 0, 0
        prompts: list[Prompt] = []
        sources: set[str] = set()
        excess = [_Excess()] * len(self._limits)
        errors: dict[Path, list[str]] = {}
        for path, part in self._parts(files, tokenizer, num_rows):
            if path not in errors:
                refuse_bad_rows([error for wrong in errors.values() for error in wrong])
            errors.setdefault(path, []).extend(part.errors)
            excess = [before.joined(more) for before, more in zip(excess, part.excess, strict=True)]
            for prompt in part.prompts:
                if self.keeps_all or prompt.data_source not in sources:
                    prompts.append(replace(prompt, position=len(prompts)))
                    sources.add(prompt.data_source)
            num_read, num_prompts = num_read + part.num_rows, num_prompts + part.num_prompts
            logger.info("tokenised num_rows=%d of=%d", num_read, num_rows)
        refuse_bad_rows([error for wrong in errors.values() for error in wrong])
        self._refuse_overlong(excess, num_rows=num_rows, num_prompts=num_prompts)
        return PromptSet(prompts=tuple(prompts), num_prompts=num_prompts, num_dropped=num_rows - num_prompts)

    def part(self, tokenizer: Tokenizer, batch: RowBatch) -> _Part:
        """Return the prompts of some rows; none where a row is bad."""
        prompts, errors = self._prompts(tokenizer, batch)
        if errors:
            return _Part(num_rows=len(batch.rows), errors=tuple(errors), excess=(_Excess(),) * len(self._limits))
        excess = tuple(_excess(prompts, limit) for limit in self._limits)
        within = [prompt for prompt in prompts if all(limit.holds(prompt) for limit in self._limits)]
        firsts: dict[str, Prompt] = {}
        for prompt in () if self.keeps_all else within:
            firsts.setdefault(prompt.data_source, prompt)
        kept = within if self.keeps_all else firsts.values()
        return _Part(num_rows=len(batch.rows), num_prompts=len(within), prompts=tuple(kept), excess=excess)

    def _parts(self, files: Sequence[Path], tokenizer: Tokenizer, num_rows: int) -> Iterator[tuple[Path, _Part]]:
        """Yield the parts in the order of the rows; those of many rows are made in worker processes."""
        keys = [*row_keys(self.config), *((self.config.chosen_key, self.config.rejected_key) * (self.kind == "pairs"))]
        batches = row_batches(files, keys, images_key=self.config.images_key)
        per_worker = _ROWS_PER_WORKER if isinstance(self.images, str) else _IMAGE_ROWS_PER_WORKER
        num_workers = min(_num_cores(), _MAX_WORKERS, num_rows // per_worker)
        if num_workers <= 1:
            yield from ((batch.path, self.part(tokenizer, batch)) for batch in batches)
            return
        with _workers(self, tokenizer, num_workers) as pool:
            waiting: deque[tuple[Path, Future[_Part]]] = deque()
            for batch in batches:
                waiting.append((batch.path, pool.submit(_part_in_worker, batch)))
                if len(waiting) > num_workers * _PARTS_PER_WORKER:
                    path, future = waiting.popleft()
                    yield path, future.result()
            yield from ((path, future.result()) for path, future in waiting)

    def _prompts(self, tokenizer: Tokenizer, batch: RowBatch) -> tuple[list[Prompt], list[str]]:
        if self.kind != "pairs":
            return self._tokenised(tokenizer, batch, self.config)
        keys = (self.config.chosen_key, self.config.rejected_key)
        (chosen, wrong), (rejected, also_wrong) = (
            self._tokenised(tokenizer, batch, self.config.model_copy(update={"response_key": key})) for key in keys
        )
        if wrong or also_wrong:
            return [], wrong or also_wrong
        return list(map(_pair_of_chats if self.as_chats else _pair, chosen, rejected)), []

    def _tokenised(self, tokenizer: Tokenizer, batch: RowBatch, config: DataConfig) -> tuple[list[Prompt], list[str]]:
        rows, errors = checked_rows(batch, config, as_demonstrations=self.kind != "prompts")
        if errors:
            return [], errors
        questions, answers = _encode(tokenizer, rows, as_chats=self.as_chats)
        remaining = iter(answers)
        prompts: list[Prompt] = []
        wrong: list[str] = []
        for row, question in zip(rows, questions, strict=True):
            demonstration, mask = next(remaining) if row.continuation else (None, None)
            try:
                token_ids, images = self._with_images(row, question)
            except ImageError as error:
                wrong.append(f"{batch.path} row {row.uid.rpartition(':')[2]}, column {config.images_key}: {error}")
                continue
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
                    images=images,
                )
            )
        return prompts, wrong

    def _with_images(self, row: DataRow, token_ids: TokenArray) -> tuple[TokenArray, tuple[ImagePlace, ...]]:
        if isinstance(self.images, ImageReader):
            return self.images.placed(token_ids, row.images)
        if row.images:
            raise ImageError(f"{len(row.images)} images, and {self.images}; set data.images_key to null to ignore them")
        return token_ids, ()

    @property
    def _limits(self) -> tuple[_Limit, ...]:
        prompt = _Limit(key="data.max_prompt_tokens", max_tokens=self.config.max_prompt_tokens, length=_prompt_tokens)
        if self.kind == "prompts":
            return (prompt,)
        answer = _Limit(key="sampling.max_response_tokens", max_tokens=self.max_response_tokens, length=_answer_tokens)
        return (prompt, answer)

    def _refuse_overlong(self, excess: Sequence[_Excess], *, num_rows: int, num_prompts: int) -> None:
        """Raise a DataError for rows that are too long, unless the recipe drops them and others are left."""
        complaints = [
            f"{rows.num_rows} of {num_rows} rows are longer than {limit.key} {limit.max_tokens} "
            f"(longest: {rows.longest} with {rows.num_tokens} tokens); raise it"
            for rows, limit in zip(excess, self._limits, strict=True)
            if rows.num_rows
        ]
        if complaints and self.config.overlong_prompts == "refuse":
            raise DataError(f"{'; '.join(complaints)}; or set data.overlong_prompts to drop")
        if not num_prompts:
            raise DataError(f"no prompt is left: {'; '.join(complaints)}")
        if num_prompts < num_rows:
            dropped = num_rows - num_prompts
            logger.warning("dropped overlong prompts num_dropped=%d num_prompts=%d", dropped, num_prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    key: str
    max_tokens: int
    length: Callable[[Prompt], int]

    def holds(self, prompt: Prompt) -> bool:
        return self.length(prompt) <= self.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Excess:
    """The rows over a limit, and the longest of them."""

    num_rows: int = 0
    num_tokens: int = 0
    longest: str = ""

    def joined(self, later: _Excess) -> _Excess:
        longest = max(self, later, key=lambda each: each.num_tokens)
        return replace(longest, num_rows=self.num_rows + later.num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    num_rows: int
    num_prompts: int = 0
    prompts: tuple[Prompt, ...] = ()
    excess: tuple[_Excess, ...]
    """By limit."""
    errors: tuple[str, ...] = ()


def _excess(prompts: Sequence[Prompt], limit: _Limit) -> _Excess:
    overlong = [prompt for prompt in prompts if not limit.holds(prompt)]
    if not overlong:
        return _Excess()
    longest = max(overlong, key=limit.length)
    return _Excess(num_rows=len(overlong), num_tokens=limit.length(longest), longest=longest.uid)


def _prompt_tokens(prompt: Prompt) -> int:
    return len(prompt.token_ids)


def _answer_tokens(prompt: Prompt) -> int:
    return max((len(answer) for answer in _answers(prompt)), default=0)


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


def _encode(tokenizer: Tokenizer, rows: Sequence[DataRow], *, as_chats: bool) -> _Encoded:
    questions = tokenizer.encode(_rendered(tokenizer, rows))
    if as_chats:
        wholes = [_named(row, tokenizer.render_answered, (*row.chat, *row.continuation)) for row in rows]
        return questions, [(token_ids, np.ones(len(token_ids), np.bool_)) for token_ids in tokenizer.encode(wholes)]
    answered = [_named(row, tokenizer.spans, row.chat, row.continuation) for row in rows if row.continuation]
    return questions, tokenizer.encode_spans(answered)


def _rendered(tokenizer: Tokenizer, rows: Sequence[DataRow]) -> list[str]:
    """Return the texts of the questions: all at once, or one by one where a row has to be named."""
    try:
        return tokenizer.render_chats([row.chat for row in rows])
    except DataError:
        return [_named(row, tokenizer.render_chat, row.chat) for row in rows]


@contextmanager
def _workers(reader: PromptReader, tokenizer: Tokenizer, num_workers: int) -> Iterator[ProcessPoolExecutor]:
    # Spawned, not forked: this process has threads. Workers that outlive a killed driver would wait for ever.
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(reader, tokenizer.folder, tokenizer.vocab, tokenizer.template, tokenizer.tools, os.getpid()),
    )
    try:
        yield pool
    except BrokenProcessPool as error:
        raise MachineError(
            "a process that tokenises the data was killed; is there enough memory? (data.train, data.eval)"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_of_worker: tuple[PromptReader, Tokenizer] | None = None


def _start_worker(
    reader: PromptReader, folder: Path, vocab: int, template: Template, tools: Sequence[ToolFunction], parent: int
) -> None:
    global _of_worker
    die_with_parent(parent)
    with without_torch():
        _of_worker = reader, load_tokenizer(folder, vocab=vocab, template=template, tools=tools)


def _part_in_worker(batch: RowBatch) -> _Part:
    assert _of_worker is not None, "_start_worker comes first"
    reader, tokenizer = _of_worker
    return reader.part(tokenizer, batch)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _named(row: DataRow, render: Callable[..., _T], *chats: Chat) -> _T:
    """Return what `render` makes of the row's messages; an error names the row."""
    try:
        return render(*chats)
    except DataError as error:
        raise DataError(f"{row.uid}: {error}") from error


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
