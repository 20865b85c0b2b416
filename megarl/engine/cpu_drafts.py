"""Kernels of SGLang that check drafted tokens, for machines without a GPU, in torch: each draft is a chain of tokens.

`cpu` installs them in engines with a draft. On a CPU, SGLang keeps the drafted tokens that are the policy's likeliest;
`draw_first` lets it keep those that the policy has drawn: they are of its distribution, and with seeds the same as
without a draft.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

Checked = TypeVar("Checked")


def draw_first(
    check: Callable[..., Checked], drafted: Any, batch: Any, output: Any, *arguments: Any, **options: Any
) -> Checked:
    """Check drafts against one token that is drawn at each place, which is then the only one that `check` can take."""
    from sglang.srt.layers import sampler  # noqa: PLC0415 - only in an engine

    sampling = batch.sampling_info
    if batch.forward_mode.is_idle() or sampling.is_all_greedy:
        return check(drafted, batch, output, *arguments, **options)

    def at_places(of_requests: Tensor) -> Tensor:
        return of_requests.repeat_interleave(drafted.draft_token_num, dim=0)

    logits = output.next_token_logits
    probabilities = torch.softmax(logits / at_places(sampling.temperatures), dim=-1)
    seeds = None if sampling.sampling_seed is None else at_places(sampling.sampling_seed)
    if sampling.need_top_p_sampling or sampling.need_top_k_sampling or sampling.need_min_p_sampling:
        limits = (at_places(each) for each in (sampling.top_ks, sampling.top_ps, sampling.min_ps))
        drawn = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            probabilities, *limits, sampling.need_min_p_sampling, seeds, drafted.positions
        )
    else:
        drawn = sampler.sampling_from_probs_torch(probabilities, seeds, drafted.positions)
    only = copy(output)  # log-probabilities are those of the whole distribution
    only.next_token_logits = torch.full_like(logits, -torch.inf).scatter_(1, drawn.long()[:, None], 0.0)
    return check(drafted, batch, only, *arguments, **options)


def copy_cache(
    layers: Tensor,  # [L], addresses
    widths: Tensor,  # [L], bytes of a token
    targets: Tensor,  # [N]
    sources: Tensor,  # [N]
) -> None:
    """Copy the cached keys and values of tokens to other places, in every layer."""
    places = [(target, source) for target, source in zip(targets.tolist(), sources.tolist(), strict=True)]
    for layer, width in zip(layers.tolist(), widths.tolist(), strict=True):
        read = [ctypes.string_at(layer + source * width, width) for _, source in places]
        for (target, _), data in zip(places, read, strict=True):
            ctypes.memmove(layer + target * width, data, width)


def locate_drafts(
    rows: Tensor, table: Tensor, starts: Tensor, locations: Tensor, _num_positions: int, _width: int, num_steps: int
) -> None:
    """Write the cache locations of the next `num_steps` tokens of each request into `locations`."""
    locate_tokens(rows, table, starts, starts + num_steps, locations, _num_positions)


def locate_tokens(
    rows: Tensor,  # [R]
    table: Tensor,  # [requests, positions]
    starts: Tensor,  # [R]
    ends: Tensor,  # [R]
    locations: Tensor,  # [at least the sum of ends - starts], updated
    _num_positions: int,
) -> None:
    """Write the cache locations of a range of tokens of each request into `locations`, end to end."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        locations[done : done + end - start] = table[row, start:end].to(locations.dtype)
        done += end - start


def build_chain(
    _parents: Tensor,
    _scores: Tensor,
    lengths: Tensor,  # [R], tokens before the draft
    mask: Tensor,  # [R * T * T]
    positions: Tensor,  # [R * T]
    indices: Tensor,  # [R, T]
    following: Tensor,  # [R, T]; the one after, or -1
    _siblings: Tensor,  # [R, T]; -1
    num_successors: int,
    *_sizes: int,
) -> None:
    """Fill what says how the tokens of each draft follow one another."""
    assert num_successors == 1, f"{num_successors} successors of a drafted token; a CPU checks chains"
    num_tokens = indices.shape[1]
    places = indices.new_tensor(range(num_tokens))
    indices.copy_(places + num_tokens * indices.new_tensor(range(len(indices)))[:, None])
    positions.view(-1, num_tokens).copy_(lengths[:, None] + places)
    following.copy_((places + 1).expand_as(following))
    following[:, -1] = -1
    mask.view(-1, num_tokens, num_tokens).copy_(places <= places[:, None])


def keep_likeliest(
    *,
    predicts: Tensor,  # [R * T], updated
    accept_index: Tensor,  # [R, T], updated; -1 at first
    accept_token_num: Tensor,  # [R], updated
    candidates: Tensor,  # [R, T]
    target_predict: Tensor,  # [R, T]
    **_links: Any,
) -> None:
    """Keep the tokens of each draft up to the first that is not the policy's likeliest, which takes its place."""
    num_tokens = candidates.shape[1]
    for row, (drafted, likeliest) in enumerate(zip(candidates.tolist(), target_predict.tolist(), strict=True)):
        num_kept = 0
        while num_kept + 1 < num_tokens and drafted[num_kept + 1] == likeliest[num_kept]:
            num_kept += 1
        first = row * num_tokens
        for place in range(num_kept + 1):
            predicts[first + place] = likeliest[place]
            accept_index[row, place] = first + place
        accept_token_num[row] = num_kept


def take_last(
    tokens: Tensor,  # [R * width]
    lengths: Tensor,  # [R]
    last: Tensor,  # [R], updated
    width: int,
) -> None:
    """Write the last of the tokens that each request keeps into `last`."""
    last.copy_(tokens.view(-1, width).gather(1, (lengths - 1).view(-1, 1).long()).view(-1))


def pack_places(
    indices: Tensor,  # [N]; -1 where a drafted token is not kept
    locations: Tensor,
    packed: Tensor,  # [N], updated
) -> None:
    """Write the cache locations of the tokens that are kept into `packed`, end to end."""
    kept = indices.flatten()[indices.flatten() >= 0].long()
    packed[: len(kept)] = locations[kept].to(packed.dtype)


KERNELS = {
    "copy_all_layer_kv_cache_cpu": copy_cache,
    "assign_draft_cache_locs_contiguous_cpu": locate_drafts,
    "assign_extend_cache_locs_cpu": locate_tokens,
    "build_tree_kernel_efficient_cpu": build_chain,
    "verify_tree_greedy_cpu": keep_likeliest,
    "fill_bonus_tokens_cpu": take_last,
    "fill_accept_out_cache_loc_cpu": pack_places,
}
"""By their names in SGLang."""
