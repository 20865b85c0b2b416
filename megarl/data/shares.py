"""The share of one data-parallel rank of a step: handles of its responses, and the micro-batches that it makes of them.

The driver makes shares from lengths and credit; it does not read a token. The rank loads the responses of its share and
fills the micro-batches. Deterministic: equal samples give equal batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megarl.data.packing import MiniBatchPlan, Packing, plan_packs
from megarl.data.prefixes import NOTHING, Prefix
from megarl.routes import PackedRoutes
from megarl.tokens import (
    COLUMNS,
    OF_CONTENT,
    OF_SAMPLE,
    ColumnName,
    Content,
    ContentSource,
    PackedColumns,
    PackedRows,
    RouteArray,
    SampleColumn,
    by_sample,
    is_repeated,
    num_true,
)
from megarl.types import (
    FloatArray,
    ImagePlace,
    MicroBatch,
    MiniBatch,
    SharedPositions,
    TokenArray,
    TrainBatch,
    TrainSample,
)

_PADDING = -1
UNUSED_IN_FORWARD = tuple(column.packed_as for column in COLUMNS if column.packed_as and column.is_single)
"""Columns that a model does not need for a forward pass."""
UNUSED_FOR_LOSS_TOKENS = tuple(name for name in UNUSED_IN_FORWARD if name != "loss_mask")
"""Columns that a model does not need for a forward pass whose results are of tokens in the loss only."""
_REMOTE = ("old_logprobs", "reference_logprobs", "values")
"""Columns that ranks have computed: an update gets them from there, not with the samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSample:
    """One row of a sample in the rank that trains it: all of it, or a part of an episode."""

    sample_id: int
    """Index into the step's samples."""
    prompt_ids: TokenArray  # [P]; empty where the first token of the row is all that is given
    start: int
    """The row's place among the sample's tokens."""
    end: int
    content: Content
    columns: Mapping[str, npt.NDArray[Any] | float]  # [T] each, or the number that all tokens have
    num_episode_loss_tokens: int
    is_whole: bool
    """The sample has no other row, and the prompt is not part of it."""
    images: tuple[ImagePlace, ...] = ()
    """Images of the prompt; () where the row has a context of its own."""

    @property
    def first(self) -> int:
        """The first token that the row predicts."""
        return self.start if len(self.prompt_ids) else self.start + 1

    @property
    def num_tokens(self) -> int:
        """Tokens that the row predicts."""
        return self.end - self.first

    @property
    def num_positions(self) -> int:
        return max(len(self.prompt_ids), 1) + self.num_tokens - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOfUpdate:
    """The part of one optimizer update: the rows of each micro-batch, and the counts of all ranks."""

    micro_batches: tuple[tuple[int, ...], ...]
    prefixes: tuple[tuple[Prefix, ...], ...]
    """See `MiniBatchPlan`."""
    num_tokens: int
    """The tokens that every micro-batch computes."""
    num_loss_tokens: int
    num_sequences: int
    sequence_multiple: int
    """Every sequence is padded to a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One data-parallel rank's S rows of a step, before their tokens are loaded.

    Columns of few objects, whatever S is: the driver pickles the rows of thousands of samples.
    """

    row_ids: tuple[int, ...]
    """Indices into the rows of the step's samples."""
    sample_ids: tuple[int, ...]
    """This and the next five as in `ShareSample`."""
    prompt_ids: TokenArray
    """The different prompts, end to end: many small arrays are slow to pickle."""
    prompt_bounds: tuple[tuple[int, int], ...]
    bounds: tuple[tuple[int, int], ...]
    """Start and end."""
    num_episode_loss_tokens: tuple[int, ...]
    are_whole: tuple[bool, ...]
    columns: Mapping[str, tuple[npt.NDArray[Any] | float, ...]]
    sources: tuple[ContentSource, ...]
    places: tuple[tuple[int, int], ...]
    """The source of each row's content, and the index there."""
    images: tuple[tuple[ImagePlace, ...], ...]
    widths: Mapping[str, int]
    """The packed columns that the rank fills from its contents, with the numbers per token: 0 for a plain [N]."""
    has_routes: bool
    """Whether the rank needs the experts that the engine chose."""
    updates: tuple[ShareOfUpdate, ...]
    temperature: float

    @property
    def shared_lengths(self) -> list[int]:
        """The tokens of each row that are computed with another one."""
        prefixes = (prefix for update in self.updates for micro_batch in update.prefixes for prefix in micro_batch)
        return [prefix.num_tokens for prefix in prefixes if prefix.num_tokens]

    @property
    def is_here(self) -> bool:
        """Whether the responses are in the share itself."""
        return all(isinstance(source, Content) for source in self.sources)

    def load(self) -> dict[int, ShareSample]:
        """Load the responses; return the rows by their indices."""
        return {
            row_id: ShareSample(
                sample_id=self.sample_ids[i],
                prompt_ids=self.prompt_ids[slice(*self.prompt_bounds[i])],
                start=self.bounds[i][0],
                end=self.bounds[i][1],
                content=self.sources[self.places[i][0]].content(self.places[i][1]),
                columns={name: column[i] for name, column in self.columns.items()},
                num_episode_loss_tokens=self.num_episode_loss_tokens[i],
                is_whole=self.are_whole[i],
                images=self.images[i],
            )
            for i, row_id in enumerate(self.row_ids)
        }

    def fill(self) -> TrainBatch:
        """Load the responses and pack them."""
        samples = self.load()
        widths = {**dict.fromkeys(self.columns, 0), **self.widths}
        mini_batches = []
        for update in self.updates:
            saved = [sum(prefix.num_tokens for prefix in each) for each in update.prefixes]
            rows = _rows([update.num_tokens + each for each in saved], widths)
            mini_batches.append(
                MiniBatch(
                    micro_batches=tuple(
                        _micro_batch(samples, *each, update.sequence_multiple, has_routes=self.has_routes)
                        for each in zip(update.micro_batches, update.prefixes, rows, strict=True)
                    ),
                    num_loss_tokens=update.num_loss_tokens,
                    num_sequences=update.num_sequences,
                )
            )
        return TrainBatch(mini_batches=tuple(mini_batches), temperature=self.temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPacking:
    """Makes the shares of one model's data-parallel ranks, for an update and for a forward pass alike.

    Both pack the same, so that a rank computes columns of the samples that it learns from.
    """

    packing: Packing
    temperature: float
    has_versions: bool = False
    has_routes: bool = False
    """The model follows the engine's choice of experts."""
    teacher_width: int = 0
    shares_prefixes: bool = False
    """Tokens that rows of a micro-batch have in common are computed once."""

    def for_update(self, samples: Sequence[TrainSample]) -> Iterator[Share]:
        return make_shares(
            samples,
            self.packing,
            temperature=self.temperature,
            has_versions=self.has_versions,
            has_routes=self.has_routes,
            teacher_width=self.teacher_width,
            shares_prefixes=self.shares_prefixes,
            without=_REMOTE,
        )

    def for_forward(
        self,
        samples: Sequence[TrainSample],
        *,
        among: Sequence[int] | None = None,
        without: Collection[str] = UNUSED_IN_FORWARD,
    ) -> Iterator[Share]:
        """Yield shares for a forward pass of all samples, or of those whose indices are in `among`."""
        return make_shares(
            samples,
            self.packing,
            temperature=self.temperature,
            has_routes=self.has_routes,
            shares_prefixes=self.shares_prefixes,
            without=without,
            among=among,
        )


def make_shares(
    samples: Sequence[TrainSample],
    packing: Packing,
    *,
    temperature: float,
    has_versions: bool = False,
    has_routes: bool = False,
    teacher_width: int = 0,
    shares_prefixes: bool = False,
    without: Collection[str] = (),
    among: Sequence[int] | None = None,
) -> Iterator[Share]:
    """Yield the share of each data-parallel rank; no response is loaded.

    `has_versions` adds the policy that chose each token, `has_routes` its experts, `teacher_width` the numbers that an
    engine's teacher gave it. Columns named in `without` are left out, and so are samples not `among` those given.
    """
    chosen = range(len(samples)) if among is None else among
    rows = [row for sample_id in chosen for row in _rows_of(sample_id, samples[sample_id])]
    ends = [i + 1 for i, row in enumerate(rows) if i + 1 == len(rows) or rows[i + 1].sample_id != row.sample_id]
    prefixes = _prefixes(rows, samples, has_routes=has_routes) if shares_prefixes else None
    plans = plan_packs([row.num_positions for row in rows], packing, ends=ends, prefixes=prefixes)
    num_chosen = [num_true(sample.rollout.loss_mask) for sample in samples]
    columns = _sent_columns(samples[0], has_versions=has_versions, without=without)
    singles = [column.packed_as for column in OF_CONTENT if column.packed_as and column.is_single]
    widths = {name: 0 for name in singles if name not in without}
    if teacher_width:
        widths["teacher"] = teacher_width
    counts = [_counts(num_chosen, {rows[i].sample_id for i in plan.members}) for plan in plans]
    for rank in range(packing.data_parallel):
        members = sorted(i for plan in plans for micro_batch in plan.shares[rank] for i in micro_batch)
        mine = [rows[i] for i in members]
        theirs = [samples[row.sample_id] for row in mine]
        located = [sample.rollout.content.locate() for sample in theirs]
        sources = {id(source): source for source, _ in located}
        order = {key: place for place, key in enumerate(sources)}
        prompt_ids, prompt_bounds = _joined_prompts(mine, theirs)
        yield Share(
            row_ids=tuple(members),
            sample_ids=tuple([row.sample_id for row in mine]),
            prompt_ids=prompt_ids,
            prompt_bounds=tuple(prompt_bounds),
            bounds=tuple([(row.start, row.end) for row in mine]),
            num_episode_loss_tokens=tuple([num_chosen[row.sample_id] for row in mine]),
            are_whole=tuple([not sample.rollout.episode.rows for sample in theirs]),
            columns={name: tuple(map(_column_part, mine, map(get, theirs))) for name, get in columns.items()},
            sources=tuple(sources.values()),
            places=tuple([(order[id(source)], index) for source, index in located]),
            images=tuple([each.images if row.continues_prompt else () for row, each in zip(mine, theirs, strict=True)]),
            widths=widths,
            has_routes=has_routes,
            updates=tuple(_part_of(plan, rank, *of_plan, packing) for plan, of_plan in zip(plans, counts, strict=True)),
            temperature=temperature,
        )


def _part_of(
    plan: MiniBatchPlan, rank: int, num_loss_tokens: int, num_sequences: int, packing: Packing
) -> ShareOfUpdate:
    return ShareOfUpdate(
        micro_batches=plan.shares[rank],
        prefixes=plan.prefixes[rank],
        num_tokens=plan.num_tokens,
        num_loss_tokens=num_loss_tokens,
        num_sequences=num_sequences,
        sequence_multiple=packing.sequence_multiple,
    )


def _sent_columns(
    sample: TrainSample, *, has_versions: bool, without: Collection[str]
) -> dict[str, Callable[[TrainSample], npt.NDArray[Any]]]:
    """Return how to read each column that goes with the samples; all samples of a step have the same as this one."""
    of_sample = [column.name for column in OF_SAMPLE if getattr(sample, column.name) is not None]
    names = [name for name in ("loss_mask", *(["versions"] if has_versions else []), *of_sample) if name not in without]
    return {name: attrgetter(name if name in of_sample else f"rollout.{name}") for name in names}


class _RowOf(NamedTuple):
    """The tokens of a sample that are one sequence."""

    sample_id: int
    start: int
    end: int
    num_positions: int
    continues_prompt: bool


def _joined_prompts(rows: list[_RowOf], samples: list[TrainSample]) -> tuple[TokenArray, list[tuple[int, int]]]:
    """Return the different prompts, end to end, and where each row's is; a row with its own context has none."""
    prompts = {id(sample.prompt_ids): sample.prompt_ids for sample in samples}
    ends = accumulate(map(len, prompts.values()))
    bounds = {key: (end - len(prompts[key]), end) for key, end in zip(prompts, ends, strict=True)}
    pairs = zip(rows, samples, strict=True)
    of_rows = [bounds[id(sample.prompt_ids)] if row.continues_prompt else (0, 0) for row, sample in pairs]
    return np.concatenate([np.zeros(0, np.int32), *prompts.values()]), of_rows


def _counts(num_chosen: Sequence[int], sample_ids: Collection[int]) -> tuple[int, int]:
    """Return the loss tokens of these samples, and how many of them have some."""
    counts = [num_chosen[i] for i in sample_ids]
    return sum(counts), sum(count > 0 for count in counts)


def _column_part(row: _RowOf, array: npt.NDArray[Any]) -> npt.NDArray[Any] | float:
    """Return the numbers of the tokens that the row predicts, or the number that all have."""
    if is_repeated(array):
        return float(array[0])
    return array[row.start if row.continues_prompt else row.start + 1 : row.end]


def _rows_of(sample_id: int, sample: TrainSample) -> list[_RowOf]:
    starts, num_tokens = sample.rollout.episode.rows, sample.rollout.num_tokens
    if not starts:
        num_prompt = len(sample.prompt_ids)
        assert min(num_prompt, num_tokens) > 0, f"prompt of {num_prompt} tokens, response of {num_tokens}"
        return [_RowOf(sample_id, 0, num_tokens, num_prompt + num_tokens - 1, continues_prompt=True)]
    # A row with its own context predicts all tokens but its first; what precedes all of those continues the prompt.
    num_first = len(sample.prompt_ids) + starts[0] - 1
    rows = [_RowOf(sample_id, 0, starts[0], num_first, continues_prompt=True)] if starts[0] else []
    bounds = zip(starts, (*starts[1:], num_tokens), strict=True)
    return [*rows, *(_RowOf(sample_id, start, end, end - start - 1, continues_prompt=False) for start, end in bounds)]


def _prefixes(rows: Sequence[_RowOf], samples: Sequence[TrainSample], *, has_routes: bool) -> list[Prefix]:
    """Return what each row has in common with an earlier one: the prompt, or the history of its episode.

    With `has_routes` a prompt is common to rollouts for which the engine chose the same experts in it.
    """
    prefixes: list[Prefix] = []
    # By content: after a resume equal prompts may be other objects than before.
    # The tokens of all images are equal.
    keys = {id(sample.prompt_ids): _key_of(sample) for sample in samples}
    firsts: dict[tuple[bytes | str, ...], int] = {}
    begin = 0
    for index, row in enumerate(rows):
        sample = samples[row.sample_id]
        if index == 0 or rows[index - 1].sample_id != row.sample_id:
            begin = index
        shared = sample.rollout.episode.shared
        if row.continues_prompt:
            key = keys[id(sample.prompt_ids)]
            if has_routes:
                # Where an engine names no experts, as for a demonstration, the model chooses them.
                key = *key, sample.rollout.prompt_routes
            first = firsts.setdefault(key, index)
            prefixes.append(NOTHING if first == index else Prefix(first, len(sample.prompt_ids)))
        elif shared and (earlier := Prefix(*shared[index - begin])).row >= 0:
            prefixes.append(Prefix(begin + earlier.row, earlier.num_tokens))
        else:
            prefixes.append(NOTHING)
    return prefixes


def _key_of(sample: TrainSample) -> tuple[bytes | str, ...]:
    return sample.prompt_ids.tobytes(), *(image.digest.encode() for image in sample.images)


def unpack(batch: TrainBatch, columns: Sequence[Sequence[FloatArray]]) -> SampleColumn:
    """Return the column of the response tokens of a share's samples. `columns`: [N] per mini-batch and micro-batch."""
    rows = [
        (sample_id, first, of_tokens[start:end])
        for mini_batch, of_share in zip(batch.mini_batches, columns, strict=True)
        for micro_batch, of_tokens in zip(mini_batch.micro_batches, of_share, strict=True)
        for sample_id, first, start, end in _responses(micro_batch)
    ]
    firsts, arrays = [first for _, first, _ in rows], [numbers for _, _, numbers in rows]
    return SampleColumn(
        sample_ids=_int32([sample_id for sample_id, _, _ in rows]),
        starts=np.cumsum([0, *map(len, arrays)], dtype=np.int64),
        numbers=np.concatenate(arrays).astype(np.float32, copy=False) if arrays else np.zeros(0, np.float32),
        firsts=_int32(firsts) if any(firsts) else None,
    )


def with_columns(batch: TrainBatch, columns: Mapping[ColumnName, Sequence[SampleColumn]]) -> TrainBatch:
    """Return the share with these columns, each from parts that together have all of its samples."""
    if not columns:
        return batch
    arrays = {name: by_sample(parts) for name, parts in columns.items()}

    def fill(micro_batch: MicroBatch) -> MicroBatch:
        packed: dict[str, Any] = {name: _packed_column(micro_batch, each) for name, each in arrays.items()}
        return replace(micro_batch, **packed)

    mini_batches = [replace(each, micro_batches=tuple(map(fill, each.micro_batches))) for each in batch.mini_batches]
    return replace(batch, mini_batches=tuple(mini_batches))


def _packed_column(micro_batch: MicroBatch, arrays: Mapping[int, FloatArray]) -> FloatArray:
    width = next(iter(arrays.values())).shape[1:] if arrays else ()
    column = np.zeros((len(micro_batch.token_ids), *width), np.float32)
    for sample_id, first, start, end in _responses(micro_batch):
        column[start:end] = arrays[sample_id][first : first + end - start]
    return column


def _responses(micro_batch: MicroBatch) -> Iterator[tuple[int, int, int, int]]:
    """Yield of every row its sample, its first token there, and the first and end position of what it predicts."""
    ends, rows = micro_batch.response_ends, micro_batch.rows
    firsts = np.zeros(len(ends), np.int32) if rows is None else rows.firsts
    columns = (micro_batch.sample_ids, firsts, micro_batch.response_starts, ends)
    for sample_id, first, start, end in zip(*(column.tolist() for column in columns), strict=True):
        if sample_id != _PADDING:
            yield sample_id, first, start, end


def row_lengths(sample: TrainSample) -> list[int]:
    """Return the number of input tokens of each row: the last token predicts nothing and is no input."""
    return [row.num_positions for row in _rows_of(0, sample)]


class _Row(NamedTuple):
    """The columns of one micro-batch, [N] each, to be filled."""

    token_ids: TokenArray
    columns: Mapping[str, npt.NDArray[Any]]


_PACKED = {column.packed_as: column for column in COLUMNS if column.packed_as is not None}
_EMPTY = {each.name: np.zeros(0, _PACKED[each.name].dtype) for each in fields(PackedColumns) if each.default is MISSING}
_LOADED = {column.packed_as: column.name for column in OF_CONTENT if column.packed_as is not None}


def _rows(lengths: Sequence[int], widths: Mapping[str, int]) -> Iterator[_Row]:
    """Yield zeros for each micro-batch. The columns of all are allocated at once: large arrays get large pages."""
    total = sum(lengths)
    token_ids = np.zeros(total, np.int32)
    columns = {
        name: np.zeros((total, width) if width else total, _PACKED[name].dtype) for name, width in widths.items()
    }
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        own = slice(end - length, end)
        yield _Row(token_ids=token_ids[own], columns={name: column[own] for name, column in columns.items()})


def _micro_batch(
    samples: Mapping[int, ShareSample],
    members: Sequence[int],
    prefixes: Sequence[Prefix],
    row: _Row,
    sequence_multiple: int,
    *,
    has_routes: bool,
) -> MicroBatch:
    num_tokens = len(row.token_ids)
    starts, last_ids, response_starts, response_ends, sample_ids = [0], [], [], [], []
    routed: list[tuple[int, RouteArray]] = []
    images: list[ImagePlace] = []
    for index in members:
        sample = samples[index]
        content = sample.content
        token_ids = content.token_ids[sample.start : sample.end]
        assert len(token_ids) == sample.end - sample.start, f"{len(content.token_ids)} tokens, not {sample.end}"
        start, end = starts[-1], starts[-1] + sample.num_positions
        first = end - sample.num_tokens
        row.token_ids[start : first + 1] = sample.prompt_ids if len(sample.prompt_ids) else token_ids[:1]
        row.token_ids[first + 1 : end] = token_ids[-sample.num_tokens : -1]
        _fill_columns(row.columns, sample, slice(first, end))
        if has_routes and content.routes is not None:
            before_last = len(content.routes) - len(content.token_ids) + sample.end
            routed.append((start, content.routes[before_last - sample.num_positions : before_last]))
        images += [replace(image, start=start + image.start) for image in sample.images]
        num_padded = -sample.num_positions % sequence_multiple
        # The last token is what its predecessor predicts; as an input it is padding, like the zeros behind it.
        row.token_ids[end : end + min(num_padded, 1)] = token_ids[-1]
        starts.append(end + num_padded)
        last_ids.append(0 if num_padded else int(token_ids[-1]))
        response_starts.append(first)
        response_ends.append(end)
        sample_ids.append(sample.sample_id)
    if starts[-1] < num_tokens:
        # The same token at every position would be sent to the same few experts of a mixture.
        filler = row.token_ids[: starts[-1]] if members else next((each.prompt_ids for each in samples.values()), [0])
        row.token_ids[starts[-1] :] = np.resize(filler, num_tokens - starts[-1])
        for ends in (starts, response_starts, response_ends):
            ends.append(num_tokens)
        last_ids.append(0)
        sample_ids.append(_PADDING)
    columns: dict[str, Any] = {**_EMPTY, **row.columns}
    return MicroBatch(
        token_ids=row.token_ids,
        sequence_starts=_int32(starts),
        last_ids=_int32(last_ids),
        sample_ids=_int32(sample_ids),
        response_starts=_int32(response_starts),
        response_ends=_int32(response_ends),
        **columns,
        rows=_packed_rows([samples[index] for index in members], _int32(starts)),
        routes=PackedRoutes(num_tokens=num_tokens, parts=tuple(routed)) if routed else None,
        shared=_shared_positions(prefixes, row.token_ids, starts) if prefixes else None,
        images=tuple(images),
    )


def _fill_columns(columns: Mapping[str, npt.NDArray[Any]], sample: ShareSample, positions: slice) -> None:
    """Fill the positions that predict the sample's tokens."""
    for name, column in columns.items():
        if name not in _LOADED:
            column[positions] = sample.columns[name]
        elif (of_content := getattr(sample.content, _LOADED[name])) is not None:
            column[positions] = of_content[sample.first : sample.end]
        else:
            # No engine returned it for a demonstration; a teacher's numbers must not be missing.
            assert _PACKED[name].is_single, f"a response without {_LOADED[name]}"


def _shared_positions(prefixes: Sequence[Prefix], token_ids: TokenArray, starts: Sequence[int]) -> SharedPositions:
    """`starts`: of each row, perhaps of padding, then the end."""
    spans = [(start, starts[row], length) for start, (row, length) in zip(starts, prefixes, strict=False)]
    places, is_computed = np.empty(len(token_ids), np.int32), np.ones(len(token_ids), np.bool_)
    for start, _, length in spans:
        is_computed[start : start + length] = False
    computed = np.flatnonzero(is_computed)
    places[computed] = np.arange(len(computed))
    for start, earlier, length in spans:
        mine, equal = slice(start, start + length), slice(earlier, earlier + length)
        assert np.array_equal(token_ids[mine], token_ids[equal]), f"rows at {earlier} and {start} differ in {length}"
        places[mine] = places[equal]
    return SharedPositions(computed=computed, places=places)


def _packed_rows(members: Sequence[ShareSample], starts: npt.NDArray[np.int32]) -> PackedRows | None:
    """`starts`: of each row, perhaps of padding, then the end."""
    if all(row.is_whole for row in members):
        return None
    begins = [i for i, row in enumerate(members) if i == 0 or members[i - 1].sample_id != row.sample_id]
    counts = [members[i].num_episode_loss_tokens for i in begins]
    num_padding = len(starts) - 1 - len(members)
    return PackedRows(
        firsts=_int32([*(row.first for row in members), *[0] * num_padding]),
        episode_starts=starts[[*begins, *range(len(members), len(starts))]],
        num_loss_tokens=np.array([*counts, *[0] * num_padding], np.int64),
    )


def _int32(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.asarray(values, np.int32)
